"""Training goes on from converted files: with the old optimizer's moments where they fit, and as an affinity model."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hf_ext.checkpoints.format.trees import load_tree
from old_scripts import NUM_STEPS, save_old, train_by_hand, write_config
from safetensors.torch import load_file
from small_runs import make_rows, make_trainer, small_esm
from token_rows import stack_rows
from torch import nn
from transformers import EsmForSequenceClassification, EsmModel
from weight_models import affinity, bits, different, esm, write_bases

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.affinity.building import build_model as build_affinity
from hf_ext.checkpoints.tools.inspection import inspect_folder
from hf_ext.checkpoints.tools.migration import ConversionSettings, convert
from hf_ext.errors import CheckpointError
from hf_ext.models.affinity import AffinityModel
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return write_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"))


# --- the optimizer ----------------------------------------------------------------------------------------------------


def moments(optimizer, model) -> dict[str, torch.Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: entry["exp_avg"].clone() for p, entry in optimizer.state.items()}


def without_contact_head(seed=0):
    """Without dropout, so that every trainer takes the same steps; the contact head never has a gradient."""
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = esm(EsmForSequenceClassification, seed, num_labels=1, **dropout)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("contact_head" not in name)
    return model


@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
def test_training_goes_on_as_if_nobody_had_switched(weight_decay, tmp_path):
    without_contact_head().save_pretrained(tmp_path / "config")
    model, whole = without_contact_head(seed=1), without_contact_head(seed=1)
    optimizer = train_by_hand(model, weight_decay=weight_decay)
    train_by_hand(whole, NUM_STEPS + 1, weight_decay=weight_decay)
    report = convert(save_old(tmp_path / "old.pth", model, optimizer), tmp_path / "config", tmp_path / "new")
    assert report["optimizer"] == {"checkpoint": "checkpoint-5", "step": 5, "learning_rate": 3e-3}
    assert inspect_folder(tmp_path / "new").continues_from == "checkpoint-5"

    plain = {
        "eval_strategy": "no",
        "metric_for_best_model": None,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }
    plain |= {"per_device_train_batch_size": 1, "train_sampling_strategy": "sequential", "save_strategy": "no"}
    trainer = make_trainer(tmp_path / "new", model=without_contact_head(seed=2), resume="auto", **plain)
    trainer.train()
    assert trainer.state.global_step == NUM_STEPS + 1
    assert moments(trainer.optimizer, trainer.model).keys() == moments(optimizer, model).keys()
    assert different(trainer.model, whole) == []
    # The weights alone, with moments that begin anew, take another step.
    started = EsmForSequenceClassification.from_pretrained(tmp_path / "new")
    begun = make_trainer(tmp_path / "other", model=started, **{**plain, "max_steps": 1, "learning_rate": 3e-3})
    begun.train()
    assert different(begun.model, whole) != []


def test_the_order_of_moments_is_that_of_the_file_and_not_of_the_model(tmp_path):
    """Two layers of one shape, registered the other way round: positions alone would swap their moments."""
    model = small_esm(seed=1)
    optimizer = train_by_hand(model)
    state = model.state_dict()
    names, first, second = list(state), "esm.encoder.layer.0.", "esm.encoder.layer.1."
    swapped = [n.replace(first, "?").replace(second, first).replace("?", second) for n in names]
    order = [n for n in swapped if n in dict(model.named_parameters())]
    mine = [name for name, _ in model.named_parameters()]
    saved = optimizer.state_dict()
    saved["state"] = {i: saved["state"][mine.index(n)] for i, n in enumerate(order) if mine.index(n) in saved["state"]}
    model.save_pretrained(tmp_path / "config")
    torch.save({"model": OrderedDict((n, state[n]) for n in swapped), "optimizer": saved}, tmp_path / "old.pth")
    convert(tmp_path / "old.pth", tmp_path / "config", tmp_path / "new")
    tree = load_tree(tmp_path / "new" / "checkpoint-5", "optimizer")
    exp_avg = [entry["exp_avg"] for entry in tree["state_dict"]["state"].values()]
    wanted = moments(optimizer, model)
    for layer in (first, second):
        assert any(torch.equal(wanted[f"{layer}intermediate.dense.weight"], found) for found in exp_avg)
    # In Trainer's order: what decays, of layer 0 first.
    mine = [i for i, found in enumerate(exp_avg) if found.shape == (32, 16)]
    assert torch.equal(exp_avg[mine[0]], wanted[f"{first}intermediate.dense.weight"])
    assert not torch.equal(exp_avg[mine[0]], exp_avg[mine[1]])


def two_groups(model):
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}])
    optimizer.step()
    return optimizer


def only_head(model):
    model.esm.requires_grad_(False)
    return train_by_hand(model)


def with_momentum(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(**stack_rows([make_rows(1)[0]])).loss.backward()
    optimizer.step()
    return optimizer


def coupled(model):
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    model(**stack_rows([make_rows(1)[0]])).loss.backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (two_groups, "not what torch's optimizers return"),
        (only_head, "It is of 4 parameters"),
        (with_momentum, "['momentum_buffer'], not AdamW's"),
        (coupled, "Adam with weight decay in the gradient"),
    ],
)
def test_an_optimizer_that_does_not_certainly_fit_is_left_out_with_the_reason(make, words, config, tmp_path):
    model = small_esm(seed=1)
    report = convert(save_old(tmp_path / "old.pth", model, make(model)), config, tmp_path / "new")
    assert words in report["optimizer"]["left_out"]
    assert not list((tmp_path / "new").glob("checkpoint-*"))
    assert different(model, EsmForSequenceClassification.from_pretrained(tmp_path / "new")) == []


def test_training_starts_from_converted_weights(config, tmp_path):
    model = small_esm(seed=1)
    convert(save_old(tmp_path / "old.pth", model), config, tmp_path / "new")
    started = EsmForSequenceClassification.from_pretrained(tmp_path / "new")
    assert bits(started) == bits(model)
    trainer = make_trainer(tmp_path / "run", model=started, max_steps=1, save_strategy="no")
    trainer.train()
    assert len(different(model, trainer.model)) > 10


# --- affinity models --------------------------------------------------------------------------------------------------


class OldAffinity(nn.Module):
    """Frozen encoders and a head, with names of its own."""

    def __init__(self, model: AffinityModel, bases):
        super().__init__()
        self.antibody = EsmModel.from_pretrained(bases["esm"], add_pooling_layer=False)
        self.regressor = model.head.layers


@pytest.fixture
def frozen(bases, tmp_path) -> AffinityModel:
    """An affinity model as a recipe would write it, with one frozen tower; in `config`."""
    model = affinity(bases, "frozen", seed=3, encoders=("esm",))
    model.config.label_mean, model.config.label_std, model.config.is_scaled = 7.0, 2.0, True
    model.head.input_mean.fill_(5.0)
    model.save_pretrained(tmp_path / "config")
    return model


NAMES = [("antibody.", "encoders.0."), ("regressor.", "head.layers.")]


def test_a_head_beside_frozen_encoders_becomes_an_affinity_model_in_the_old_units(frozen, bases, tmp_path):
    old = OldAffinity(affinity(bases, "frozen", seed=4, encoders=("esm",)), bases)
    save_old(tmp_path / "old.pth", old)
    settings = ConversionSettings(NAMES, label_scale=(6.5, 1.5))
    report = convert(tmp_path / "old.pth", tmp_path / "config", tmp_path / "new", settings)
    loaded = AffinityModel.from_pretrained(tmp_path / "new")
    assert (loaded.config.label_mean, loaded.config.label_std, loaded.config.is_scaled) == (6.5, 1.5, True)
    assert report["computed_by_the_model"] == ["head.input_mean", "head.input_scale"]
    embeddings = {"heavy": torch.randn(4, 16)}
    expected = 6.5 + 1.5 * old.regressor(embeddings["heavy"]).squeeze(-1)
    assert torch.equal(loaded.eval()(embeddings=embeddings).logits, expected)
    # Encoders that the model names are not stored a second time.
    assert {name.split(".")[0] for name in load_file(tmp_path / "new" / "model.safetensors")} == {"head"}


def test_the_head_is_carried_over_by_init_head_from_and_trains(frozen, bases, tmp_path):
    old = OldAffinity(affinity(bases, "frozen", seed=4, encoders=("esm",)), bases)
    convert(save_old(tmp_path / "old.pth", old), tmp_path / "config", tmp_path / "new", ConversionSettings(NAMES))
    towers = AffinityArguments(
        encoders=[bases["esm"]], tower_training=["full"], head_sizes=[8], init_head_from=str(tmp_path / "new")
    )
    model = build_affinity(towers, ["heavy"])
    assert torch.equal(model.head.layers[0].weight, old.regressor[0].weight)
    loaded = AffinityModel.from_pretrained(tmp_path / "new")
    optimizer = torch.optim.SGD(loaded.head.parameters(), lr=0.1)
    loaded(embeddings={"heavy": torch.randn(4, 16)}, labels=torch.arange(4.0)).loss.backward()
    optimizer.step()
    assert not torch.equal(loaded.head.layers[0].weight, old.regressor[0].weight)


def test_a_run_of_an_affinity_model_goes_on_from_a_head_and_its_moments(make_affinity, demo_rows, tmp_path):
    old, _ = make_affinity(seed=1)
    rows = demo_rows.select(range(8))
    embeddings = {name: torch.randn(4, width) for name, width in old.embedding_sizes.items()}
    optimizer = torch.optim.AdamW(old.head.parameters(), lr=1e-3)
    for _ in range(2):
        old(embeddings=embeddings, labels=torch.arange(4.0)).loss.backward()
        optimizer.step()
    model, collator = make_affinity(seed=2)
    model.save_pretrained(tmp_path / "config")
    report = convert(save_old(tmp_path / "old.pth", old, optimizer), tmp_path / "config", tmp_path / "new")
    assert report["optimizer"] == {"checkpoint": "checkpoint-2", "step": 2, "learning_rate": 1e-3}
    settings = {"output_dir": str(tmp_path / "new"), "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    args = FastTrainingArguments(**settings, max_steps=3, per_device_train_batch_size=2, resume="auto")
    trainer = FastTrainer(model, args, collator, rows)
    begun = {}
    model.register_forward_pre_hook(lambda *_: begun.setdefault("bits", bits(model.head)) and None)
    trainer.train()
    assert begun["bits"] == bits(old.head)
    assert trainer.state.global_step == 3
    assert (model.config.label_mean, model.config.label_std) == (0.0, 1.0)
    assert {int(entry["step"]) for entry in trainer.optimizer.state.values()} == {3}


def test_encoders_that_were_trained_are_never_replaced_silently(frozen, bases, tmp_path):
    old = OldAffinity(affinity(bases, "frozen", seed=4, encoders=("esm",)), bases)
    with torch.no_grad():
        old.antibody.encoder.layer[1].output.dense.bias.add_(1)
    save_old(tmp_path / "old.pth", old)
    with pytest.raises(CheckpointError) as error:
        convert(tmp_path / "old.pth", tmp_path / "config", tmp_path / "new", ConversionSettings(NAMES))
    assert "encoders.0.encoder.layer.1.output.dense.bias (1 in all) are not the weights of the encoders" in str(
        error.value
    )
    settings = ConversionSettings(NAMES, drop=["encoders."])
    convert(tmp_path / "old.pth", tmp_path / "config", tmp_path / "new", settings)


@pytest.mark.parametrize("training", ["lora", "full"])
def test_towers_that_train_come_over(training, bases, tmp_path):
    model = affinity(bases, training, seed=4, encoders=("esm",))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) if parameter.requires_grad else 0)
    affinity(bases, training, seed=5, encoders=("esm",)).save_pretrained(tmp_path / "config")
    save_old(tmp_path / "old.pth", model)
    convert(tmp_path / "old.pth", tmp_path / "config", tmp_path / "new")
    assert different(model, AffinityModel.from_pretrained(tmp_path / "new")) == []
