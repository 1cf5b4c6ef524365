"""Generators train as under the stock trainer, on encoders of their own or a pretrained ESM, and continue exactly."""

import pytest
import torch
from inside import LayoutMaker
from run_outcomes import losses
from tiny_generators import TINY, make_batch, make_named, make_on_encoder, make_rows
from transformers import EsmModel, EsmTokenizer, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from hf_ext.data import AntibodyCollator
from hf_ext.errors import ArgumentError
from hf_ext.models import (
    AntibodyGenerator,
    LoraSettings,
    find_encoders,
    has_adapters,
    merged_copy,
    pack_encoders,
    read_encoder,
    register_attention,
)
from hf_ext.trainer import FastSeq2SeqTrainer

KINDS = ("lstm", "transformer", "light")


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


def make(cls, folder, name, *callbacks, dropout=0.0, **given):
    model, rows = make_named(name, dropout=dropout), make_rows()
    settings = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "seed": 1, "learning_rate": 1e-2}
    settings |= {"per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 1, "save_steps": 2}
    args = Seq2SeqTrainingArguments(output_dir=str(folder), **{**settings, **given})
    data = {"train_dataset": rows * 3, "eval_dataset": rows, "data_collator": AntibodyCollator()}
    return cls(model, args, **data, callbacks=list(callbacks))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", KINDS)
def test_training_is_that_of_the_stock_trainer_also_where_activations_are_recomputed(tmp_path, name):
    ours, stock = (make(cls, tmp_path / cls.__name__, name) for cls in (FastSeq2SeqTrainer, Seq2SeqTrainer))
    again = make(FastSeq2SeqTrainer, tmp_path / "again", name, activation_checkpointing=True)
    for trainer in (ours, stock, again):
        trainer.train()
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-5)
    assert losses(again) == pytest.approx(losses(ours), abs=1e-6)
    assert losses(ours)[-1] < losses(ours)[0]
    ours.end(), again.end()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["lstm", "light"])
def test_the_loss_does_not_depend_on_how_a_step_or_an_evaluation_is_split(tmp_path, name):
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "per_device_eval_batch_size": 3}
    found = []
    for given in ({}, split):
        trainer = make(FastSeq2SeqTrainer, tmp_path / str(len(given)), name, **given)
        trainer.train()
        found.append([*losses(trainer), trainer.evaluate()["eval_loss"]])
        trainer.end()
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    model, batch = trainer.model.eval(), make_batch()
    with torch.no_grad():
        exact = model(**batch).loss.item()
        per_batch = [model(**make_batch(make_rows()[i : i + 3])).loss.item() for i in (0, 3)]
    assert found[1][-1] == pytest.approx(exact, rel=1e-5)
    assert sum(per_batch) / 2 != pytest.approx(exact, rel=1e-4)  # what a mean of batch means would have been


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", KINDS)
def test_a_killed_run_continues_to_the_same_weights(tmp_path, name):
    whole = make(FastSeq2SeqTrainer, tmp_path / "whole", name, dropout=0.1)
    before = whole.model.shared.weight.detach().clone()
    whole.train()
    killed = make(FastSeq2SeqTrainer, tmp_path / "killed", name, Kill(), dropout=0.1)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    killed.close()
    resumed = make(FastSeq2SeqTrainer, tmp_path / "killed", name, dropout=0.1)
    resumed.train(resume_from_checkpoint=True)
    weights = zip(resumed.model.state_dict().values(), whole.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    assert not torch.equal(whole.model.shared.weight, before)
    assert resumed.evaluate()["eval_loss"] == whole.evaluate()["eval_loss"]
    for trainer in (whole, resumed):
        trainer.end()


def test_a_packed_encoder_changes_nothing():
    model = make_named("transformer")
    plain = model(**make_batch())
    plain.loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    (encoder,) = find_encoders(model)
    register_attention()
    encoder.set_attn_implementation("hf_ext_blocked")
    assert pack_encoders(model) == 1
    collator = AntibodyCollator()
    collator.layout = LayoutMaker(packs=True)
    tokens = []
    encoder.block[0].register_forward_hook(lambda module, args, output: tokens.append(args[0].shape))
    packed = model(**collator(make_rows()))
    packed.loss.backward()
    assert tokens == [(1, 20 + 5 + 9, 16)]  # of the three antigens, and no padding
    assert packed.loss.item() == pytest.approx(plain.loss.item(), abs=1e-5)
    assert all(torch.allclose(p.grad, expected[name], atol=1e-5) for name, p in model.named_parameters())


@pytest.fixture
def esm(demo_encoders):
    return demo_encoders[1]


@pytest.fixture
def batch(esm):
    return make_batch(make_rows(EsmTokenizer.from_pretrained(esm)))


BOUND = 2e-5


def make_on(esm, training="frozen", **settings):
    torch.manual_seed(0)
    spec = read_encoder(esm, None, training, LoraSettings(r=2))
    given = {**TINY, "dropout": 0.0, "label_mean": 8.0, **settings}
    return make_on_encoder(spec, **given)


def train(model, batch, steps=3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    for _ in range(steps):
        model(**batch).loss.backward()
        assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def test_a_frozen_encoder_is_used_but_is_no_part_of_the_model_unless_asked_for(demo_encoders, esm, batch, tmp_path):
    model = make_on(esm)
    assert not [name for name, _ in model.named_parameters() if name.startswith("encoder")]
    train(model, batch)
    states = EsmModel.from_pretrained(esm, add_pooling_layer=False).eval()(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    )
    assert torch.equal(model.encode(batch["input_ids"], batch["attention_mask"])[0], states.last_hidden_state)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 300_000  # without ESM's 66,000 weights: 250 kB
    again = AntibodyGenerator.from_pretrained(tmp_path)
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    assert torch.equal(again.generate(**batch, max_new_tokens=8), model.generate(**batch, max_new_tokens=8))
    model = make_on(esm, save_full=True).train()
    assert not model.encoder.model.training
    model.eval().save_pretrained(tmp_path / "full")
    again = AntibodyGenerator.from_pretrained(tmp_path / "full")
    again.encoder.spec.name_or_path = "gone"
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    assert not any(p.requires_grad for name, p in again.named_parameters() if name.startswith("encoder"))
    with pytest.raises(ArgumentError, match="is of type 'bert'; allowed are esm and esmc"):
        make_on(demo_encoders[0])


def test_given_states_give_the_same_and_the_encoder_is_never_loaded(esm, batch, tmp_path):
    model = make_on(esm).eval()
    live, written = model(**batch), model.generate(**batch, num_beams=2, max_new_tokens=9)
    states, mask = model.encode(batch.pop("input_ids"), batch["attention_mask"])[0], batch["attention_mask"]
    states = states * mask[:, :, None]  # what stands at padding says nothing
    model.encoder.release()
    model.encoder.spec.name_or_path = str(tmp_path / "gone")
    given = {**batch, "encoder_outputs": (states,)}
    assert (model(**given).logits - live.logits).abs().max() < BOUND
    assert torch.equal(model.generate(**given, num_beams=2, max_new_tokens=9), written)
    with pytest.raises(ArgumentError, match=r"gone' (has changed|cannot be loaded)"):
        model(**{**batch, "input_ids": torch.ones_like(mask)})


@pytest.mark.parametrize("training", ["lora", "full"])
def test_an_encoder_that_trains_is_saved_and_goes_on_training(esm, batch, tmp_path, training):
    model = make_on(esm, training)
    published = make_on(esm).encode(batch["input_ids"], batch["attention_mask"])[0]
    found = model.eval().encode(batch["input_ids"], batch["attention_mask"])[0]
    assert torch.allclose(found, published, atol=BOUND)  # adapters begin as nothing
    train(model, batch)
    changed = model.encode(batch["input_ids"], batch["attention_mask"])[0]
    assert not torch.allclose(changed, published, atol=100 * BOUND)
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    again, info = AntibodyGenerator.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    trains = [{name for name, p in m.named_parameters() if p.requires_grad} for m in (model, again)]
    assert trains[0] == trains[1]
    inside = {name for name in trains[0] if name.startswith("encoder")}
    assert inside
    assert all("lora_" in name for name in inside) == (training == "lora")


def test_adapters_can_be_merged(esm, batch):
    model = train(make_on(esm, "lora"), batch)
    merged = merged_copy(model)
    assert has_adapters(model)
    assert not has_adapters(merged)
    assert merged.config.antigen_encoder["training"] == "full"
    assert (merged(**batch).logits - model(**batch).logits).abs().max() < BOUND
    with pytest.raises(ArgumentError, match="no adapters"):
        merged.merge_adapters()
