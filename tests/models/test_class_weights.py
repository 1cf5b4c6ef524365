"""Balanced class weights and the focal loss: by hand, in any split of a step, in a run, and where they are refused."""

import json
import math

import numpy as np
import pytest
import torch
from closeness import distance
from labelled_rows import KINDS, LETTERS, make_labelled, make_rows, make_trainer
from run_outcomes import KillAt, Killed
from transformers import TrainerCallback

from hf_ext.errors import ArgumentError, CheckpointError
from hf_ext.labels import make_kind
from hf_ext.models import balanced_weights
from hf_ext.property import TASK

LOG2 = math.log(2)
WEIGHTS = {"classes": [2.0, 0.5, 1.0], "residue_classes": [2.0, 0.5, 1.0], "sets": [[1.0, 3.0, 1.0], [2.0, 1.0, 5.0]]}
FLAGS = (
    "--num_train_epochs 4 --learning_rate 0.01 --per_device_train_batch_size 16 --head_sizes 16 --head_dropout 0.1 "
    "--save_strategy epoch --disable_tqdm true --use_cpu true --speedups embedding_cache --preset none "
    "--split_sizes 0.5 0.2 0.3"
)


def weigh(name, labels, weights=None):
    """The weight of each label, 0 where it is not known."""
    weights = torch.as_tensor(WEIGHTS[name] if weights is None else weights)
    index = labels.clamp(min=0).long()
    each = weights[index] if weights.ndim == 1 else torch.where(index > 0, weights[1], weights[0])
    return each * labels.ne(-100)


def test_a_class_of_m_of_n_labels_weighs_n_over_k_times_m():
    classes = KINDS["classes"]
    facts = classes.facts(np.array([0, 0, 0, 1, -100]))
    assert balanced_weights(classes, facts) == pytest.approx([4 / (2 * 3), 4 / 2, 1.0])  # two occur, of four labels
    sets = make_kind("multilabel", ("a", "b"), ("a", "b"))
    facts = sets.facts(np.array([[1, math.nan], [0, 1], [0, 0], [0, math.nan]]))
    # a: in one of four; b: in one of the two where it is known
    assert balanced_weights(sets, facts) == [pytest.approx([4 / (2 * 3), 1.0]), pytest.approx([4 / 2, 1.0])]


@pytest.mark.parametrize("name", WEIGHTS)
def test_balanced_weights_are_1_on_average(name):
    rows = make_rows(name, 64)
    kind = KINDS[name]
    labels = kind.stack(rows["label"])
    weights = weigh(name, labels, np.array(balanced_weights(kind, kind.facts_of(rows))))
    assert weights.sum().item() == pytest.approx(labels.ne(-100).sum().item(), rel=1e-5)


def run(name, encoder, outputs, labels, **settings):
    """A model whose head puts out the same numbers for whatever it reads, on two rows."""
    model, collator = make_labelled(name, encoder, "frozen")
    for key, value in settings.items():
        setattr(model.config, key, value)
    torch.nn.init.zeros_(model.head.layers[-1].weight)
    model.head.layers[-1].bias.data = torch.tensor(outputs)
    rows = [{"chain": chain, "label": label} for chain, label in zip(("ACD", "MK"), labels)]
    return model, model(**collator(rows)).loss


def test_weighted_and_focal_losses_by_hand(demo_encoders):
    encoder = demo_encoders[1]

    def classes(labels, **settings):
        return run("classes", encoder, [0.0, LOG2, 0.0], labels, **settings)[1].item()  # 1/4, 1/2, 1/4

    weights = {"class_weights": WEIGHTS["classes"]}
    assert classes([1, 0], **weights) == pytest.approx((0.5 * LOG2 + 2 * 2 * LOG2) / 2)
    assert classes([1, -100], **weights) == pytest.approx(0.5 * LOG2)  # by the number of labels, not of weights
    focal = {"loss": "focal", "focal_gamma": 3.0}
    assert classes([1, 0], **focal) == pytest.approx((0.5**3 * LOG2 + 0.75**3 * 2 * LOG2) / 2)
    assert classes([1, 0], **focal, **weights) == pytest.approx((0.5**4 * LOG2 + 2 * 0.75**3 * 2 * LOG2) / 2)
    labels = [[1.0, 0.0, math.nan], [0.0, math.nan, math.nan]]
    outputs = [math.log(3), 0.0, 0.0]  # 3/4, 1/2, 1/2
    _, loss = run("sets", encoder, outputs, labels, class_weights=WEIGHTS["sets"])
    assert loss.item() == pytest.approx((-2 * math.log(0.75) + 3 * LOG2 - math.log(0.25)) / 3)
    _, loss = run("sets", encoder, outputs, labels, loss="focal", focal_gamma=1.0)
    assert loss.item() == pytest.approx((-0.25 * math.log(0.75) + 0.5 * LOG2 - 0.75 * math.log(0.25)) / 3)
    residues = [[1, 0, -100], [1, -100]]
    _, loss = run("residue_classes", encoder, [0.0, LOG2, 0.0], residues, **weights)
    assert loss.item() == pytest.approx((0.5 * LOG2 + 2 * 2 * LOG2 + 0.5 * LOG2) / 3)


def test_a_certain_prediction_has_a_finite_gradient(demo_encoders):
    settings = {"loss": "focal", "focal_gamma": 0.5}
    model, loss = run("classes", demo_encoders[1], [200.0, 0.0, 0.0], [0, 0], **settings)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.head.parameters() if p.grad is not None)


class Gradients(TrainerCallback):
    """Keeps the gradient of each optimizer step as one vector."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.last = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def train_step(name, folder, encoder, **given):
    trainer = make_trainer(name, folder, encoder, "frozen", **given)
    trainer.model.config.loss = "focal"
    trainer.model.config.class_weights = WEIGHTS[name]
    trainer.model.head.layers[-1].bias.data = torch.linspace(-1, 2, trainer.model.head.num_outputs)
    trainer.add_callback(found := Gradients())
    trainer.train()
    return found.last, trainer.state.log_history[0]["loss"], trainer


@pytest.mark.parametrize("name", WEIGHTS)
def test_accumulated_steps_and_evaluations_in_any_batches_have_one_weighted_loss(name, demo_encoders, tmp_path):
    whole, loss, trainer = train_step(name, tmp_path, demo_encoders[1])
    split = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 6}
    gradient, split_loss, _ = train_step(name, tmp_path, demo_encoders[1], **split)
    assert distance(gradient, whole) < 1e-4
    assert split_loss == pytest.approx(loss, rel=1e-4)
    found = []
    for trainer.args.per_device_eval_batch_size in (16, 3):
        found.append(trainer.evaluate()["eval_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    batch = trainer.data_collator(list(trainer.eval_dataset))
    with torch.no_grad():
        model = trainer.model.eval()
        assert found[0] == pytest.approx(model(**batch).loss.item(), rel=1e-5)
        model.config.class_weights = []
        assert found[0] != pytest.approx(model(**batch).loss.item(), rel=0.01)
    # A twin that divides by the weights in each batch, as torch does
    model.config.class_weights = WEIGHTS[name]
    rows = [*make_rows(name)]
    batches = [trainer.data_collator(rows[start : start + 3]) for start in range(0, len(rows), 3)]
    means = [model(**one, num_items_in_batch=weigh(name, one["labels"]).sum()).loss.item() for one in batches]
    assert np.mean(means) != pytest.approx(found[0], rel=0.01)


def make_table(path, num=120):
    generator = np.random.default_rng(0)
    chains = ["".join(LETTERS[i] for i in generator.integers(0, 20, 8 + i % 8)) for i in range(num)]
    cells = [f"{chain},{'rare' if chain.count('A') + chain.count('C') > 1 else 'usual'}" for chain in chains]
    path.write_text("\n".join(["sequence,label", *cells]))
    return path


@pytest.fixture
def words(tmp_path, demo_encoders):
    def given(name="run", further="--class_weights balanced --loss focal"):
        table = tmp_path / "table.csv"
        if not table.exists():
            make_table(table)
        own = f"--dataset_name {table} --output_dir {tmp_path / name} --encoders {demo_encoders[1]}"
        return f"{own} --embedding_cache_dir {tmp_path / 'cache'} {FLAGS} {further}".split()

    return given


def test_a_run_weighs_by_its_training_rows_and_says_what_decides(words, tmp_path):
    results = TASK.main(words(further="--class_weights balanced --head_dropout 0"))
    log = (tmp_path / "run" / "run.log").read_text()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    counts = results["data"]["labels"]["names"], config["class_weights"]
    assert len(counts[0]) == len(counts[1]) == 2
    low, high = sorted(config["class_weights"])
    assert 1 / low + 1 / high == pytest.approx(2)  # n / (2 m) each: shares that add up to 1
    assert f"Class weights: {low:.3g} to {high:.3g}" in log
    assert "Best checkpoint: lowest validation loss" in log


OF_CLASSES = "--loss focal and --class_weights are for classes, and the label is a number"
REFUSED = {
    "--loss focal --task regression": OF_CLASSES,
    "--class_weights balanced --task regression": OF_CLASSES,
    "--focal_gamma 1": "--focal_gamma is of one loss: give --loss focal, too",
    "--focal_gamma 0 --loss focal": "focal_gamma=0",
    "--loss ranking": "--loss ranking is for one number per row",
}


@pytest.mark.parametrize("further", REFUSED)
def test_losses_that_do_not_fit_the_labels_are_refused(words, tmp_path, further):
    given = words(further=further)
    if "regression" in further:
        (tmp_path / "table.csv").write_text("sequence,label\n" + "\n".join(f"ACD{'K' * i},{i}" for i in range(30)))
    with pytest.raises(ArgumentError, match=REFUSED[further]):
        TASK.main(given)


@pytest.mark.nightly
def test_a_killed_run_goes_on_with_its_weights_to_the_same_bytes(words, tmp_path):
    TASK.main(words("whole"))
    with TASK.parse(words("killed")) as run:
        data = TASK.load(run)
        trainer = run.build_trainer(**TASK.build(run, data))
        trainer.add_callback(KillAt(6))
        with pytest.raises(Killed):
            TASK.train(run, trainer, data)
        trainer.end()
    for further, said in (
        ("--loss focal", "class_weights"),
        ("--class_weights balanced --loss focal --focal_gamma 1", "focal_gamma: 2.0 in the checkpoint, 1.0 now"),
        ("--class_weights balanced", "loss: focal in the checkpoint, mse now"),
    ):
        with pytest.raises(CheckpointError, match=said):
            TASK.main(words("killed", further))
    TASK.main(words("killed"))
    TASK.main(words("plain", ""))
    for name in ("model.safetensors", "predictions.csv"):
        whole = (tmp_path / "whole" / name).read_bytes()
        assert (tmp_path / "killed" / name).read_bytes() == whole
        assert (tmp_path / "plain" / name).read_bytes() != whole
