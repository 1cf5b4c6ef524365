"""FastTrainer: stock Trainer without a preset; with one, the same learning from a cache, by a plan, at two rates."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from inside import compute_metrics
from miniature_esm import make_esm, make_wide_esm
from run_outcomes import losses, same_weights
from tiny_masked_lm import make_trainer
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    EsmForMaskedLM,
    EsmForSequenceClassification,
    EsmModel,
    EsmTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_ext.errors import ArgumentError, PlanRefused
from hf_ext.models import AffinityModel, AntibodyGenerator, GeneratorConfig, LoraSettings, read_encoder
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

QUIET = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "seed": 3,
}
EXACT = ["cpu_matmul", "encoder_precision", "precision", "tf32"]  # left out where float32 is compared


@pytest.fixture(scope="module")
def tokenizer(demo_encoders) -> EsmTokenizer:
    return EsmTokenizer.from_pretrained(demo_encoders[1])


def plain_case(kind: str, tokenizer, rows: Dataset):
    """Model, collator and data of masked language modelling or of classification."""
    ids = [tokenizer(text)["input_ids"] for text in rows["antigen"][:24]]
    if kind == "masked":
        return (
            make_esm(EsmForMaskedLM),
            DataCollatorForLanguageModeling(tokenizer),
            Dataset.from_dict({"input_ids": ids}),
        )
    labels = [int(label > 7.5) for label in rows["label"][:24]]
    data = Dataset.from_dict({"input_ids": ids, "labels": labels})
    return make_esm(EsmForSequenceClassification), DataCollatorWithPadding(tokenizer), data


def train_plain(trainer_cls, args_cls, kind, tokenizer, rows, folder, resume=None, **given) -> Trainer:
    model, collator, data = plain_case(kind, tokenizer, rows)
    settings = {"per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, **given}
    trainer = trainer_cls(model, args_cls(output_dir=str(folder), **{**QUIET, **settings}), collator, data)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("kind", ["masked", "classification"])
def test_without_a_preset_fast_trainer_trains_bit_for_bit_like_trainer(kind, tokenizer, demo_rows, tmp_path):
    ours = train_plain(FastTrainer, FastTrainingArguments, kind, tokenizer, demo_rows, tmp_path / "a")
    stock = train_plain(Trainer, TrainingArguments, kind, tokenizer, demo_rows, tmp_path / "b")
    assert len(losses(ours)) == 6
    assert losses(ours) == losses(stock)
    assert same_weights(ours.model, stock.model)
    other = train_plain(FastTrainer, FastTrainingArguments, kind, tokenizer, demo_rows, tmp_path / "c", seed=4)
    assert losses(other) != losses(stock)
    assert not same_weights(other.model, stock.model)


def test_a_plain_esm_resumes_with_its_layer_norms(tokenizer, demo_rows, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3, "warmup_steps": 0}
    given = (FastTrainer, FastTrainingArguments, "classification", tokenizer, demo_rows)
    whole = train_plain(*given, tmp_path / "a", **saving)
    resumed = train_plain(*given, tmp_path / "b", resume=str(tmp_path / "a" / "checkpoint-3"), **saving)
    assert losses(resumed)[-3:] == losses(whole)[-3:]
    assert same_weights(resumed.model, whole.model)
    assert same_weights(EsmForSequenceClassification.from_pretrained(tmp_path / "a" / "checkpoint-6"), whole.model)


def test_saving_keeps_the_tokenizer_of_a_stock_collator(tokenizer, demo_rows, tmp_path):
    trainer = train_plain(FastTrainer, FastTrainingArguments, "masked", tokenizer, demo_rows, tmp_path, max_steps=1)
    trainer.save_model(str(tmp_path / "model"))
    assert EsmTokenizer.from_pretrained(tmp_path / "model")("MKT")["input_ids"] == tokenizer("MKT")["input_ids"]


@pytest.fixture
def fast_trainer(tmp_path, demo_rows, make_affinity):
    """A FastTrainer on the demo towers; frozen, 120 training rows in batches of 16, unless said otherwise."""
    trainers = []

    def make(folder="run", towers=("frozen", "frozen"), cache="cache", train_rows=None, eval_rows=None, **given):
        model, collator = make_affinity(*towers)
        settings = {
            "per_device_train_batch_size": 16,
            "max_steps": 10,
            "learning_rate": 1e-2,
            "without": EXACT,
            **given,
        }
        args = FastTrainingArguments(
            output_dir=str(tmp_path / folder), embedding_cache_dir=str(tmp_path / cache), **{**QUIET, **settings}
        )
        trainer = FastTrainer(
            model,
            args,
            collator,
            demo_rows.select(range(120)) if train_rows is None else train_rows,
            demo_rows.select(range(120, 160)) if eval_rows is None else eval_rows,
            compute_metrics=compute_metrics,
        )
        trainers.append(trainer)
        return trainer

    yield make
    for trainer in trainers:
        trainer.end()


@pytest.mark.nightly
def test_a_head_learns_from_the_cache_what_it_learns_from_live_encoders(fast_trainer, demo_rows):
    live, cached, broken = (
        fast_trainer(name, speedups=given) for name, given in (("a", []), ("b", ["all"]), ("c", ["all"]))
    )
    assert [trainer.plan.applied("embedding_cache") for trainer in (live, cached)] == [False, True]
    live.train()
    cached.train()
    assert len(losses(live)) == 10
    assert losses(cached) == pytest.approx(losses(live), rel=1e-4)
    assert len(set(losses(live))) == 10
    rows = demo_rows.select(range(160, 200))
    ours, theirs = cached.predict(rows), live.predict(rows)
    np.testing.assert_allclose(ours.predictions, theirs.predictions, rtol=0, atol=1e-3)
    assert np.std(theirs.predictions) > 0.01
    assert ours.metrics["test_rmse"] == pytest.approx(theirs.metrics["test_rmse"], rel=1e-3)

    dataset = broken.embed_dataset(broken.train_dataset)
    dataset.positions["antigen"] = dataset.positions["antigen"].roll(1)  # rows of another antigen
    broken.train()
    assert losses(broken) != pytest.approx(losses(live), rel=1e-4)


def test_each_sequence_is_encoded_once_ever(fast_trainer, demo_rows):
    first = fast_trainer("a", speedups=["embedding_cache"])
    first.train()
    first.evaluate()
    used = demo_rows.select(range(160))
    distinct = len({*used["heavy"][:], *used["light"][:]}) + len(set(used["antigen"][:]))
    assert first.plan["embedding_cache"].evidence["num_encoded"] == distinct
    assert len(first.model.encoders) == 0  # let go

    second = fast_trainer("b", speedups=["embedding_cache"])
    second.train()
    second.evaluate()
    evidence = json.loads((Path(second.args.output_dir) / "plan.json").read_text())["decisions"]
    assert next(d for d in evidence if d["name"] == "embedding_cache")["evidence"]["num_encoded"] == 0
    assert losses(second) == losses(first)


def predict_one_by_one(trainer: FastTrainer, rows: Dataset) -> np.ndarray:
    with torch.no_grad():
        batches = [trainer.data_collator([row]) for row in rows]
        return np.array([trainer.model(sequences=batch["sequences"]).logits.item() for batch in batches])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("speedups", [[], ["embedding_cache"]], ids=["live", "cached"])
def test_predictions_line_up_with_rows_under_length_grouping(fast_trainer, demo_rows, speedups):
    rows = demo_rows.select(range(160, 200)).map(
        lambda row, i: {"antigen": row["antigen"][i % 20 :]}, with_indices=True
    )
    trainer = fast_trainer(
        speedups=speedups, train_sampling_strategy="group_by_length", per_device_eval_batch_size=8, max_steps=4
    )
    trainer.train()
    predicted = trainer.predict(rows)
    expected = predict_one_by_one(trainer, rows)
    np.testing.assert_allclose(predicted.predictions, expected, rtol=0, atol=1e-3)
    assert np.abs(expected - np.roll(expected, 1)).max() > 0.01  # a shifted order would be seen
    np.testing.assert_allclose(predicted.label_ids, rows["label"][:], rtol=1e-6)


def test_a_saved_model_predicts_the_same_and_weighs_no_more_than_its_head(fast_trainer, demo_rows, tmp_path):
    trainer = fast_trainer(speedups=["all"])
    trainer.train()
    rows = demo_rows.select(range(160, 200))
    expected = trainer.predict(rows).predictions
    trainer.save_model(str(tmp_path / "model"))
    model = AffinityModel.from_pretrained(tmp_path / "model")
    args = FastTrainingArguments(output_dir=str(tmp_path / "again"), **QUIET)
    again = FastTrainer(model, args, trainer.data_collator).predict(rows).predictions
    np.testing.assert_allclose(again, expected, rtol=0, atol=1e-3)
    assert (tmp_path / "model" / "model.safetensors").stat().st_size < 30_000


@pytest.mark.sampled(2)
@pytest.mark.parametrize("grouped", [False, True])
def test_frozen_towers_are_cached_beside_towers_that_train(fast_trainer, grouped):
    given = {"train_sampling_strategy": "group_by_length"} if grouped else {}
    given |= {"max_steps": 4, "learning_rate": 1e-3}
    live, cached = (
        fast_trainer(name, ("frozen", "lora"), speedups=speedups, **given)
        for name, speedups in (("a", []), ("b", ["embedding_cache"]))
    )
    assert cached.plan["embedding_cache"].settings["inputs"] == ["heavy", "light"]
    before = {name: p.clone() for name, p in cached.model.named_parameters() if "lora_B" in name}
    live.train()
    cached.train()
    assert len(before) > 0
    assert all(not torch.equal(before[name], dict(cached.model.named_parameters())[name]) for name in before)
    assert "0" not in cached.model.encoders  # the frozen encoder is let go
    assert all(math.isfinite(loss) for loss in losses(cached))
    if not grouped:  # LoRA's dropout draws the same numbers, batches come in the same order
        assert losses(cached) == pytest.approx(losses(live), rel=1e-3)
    metrics = cached.evaluate()
    assert metrics["eval_num_distinct"] > 1


@pytest.fixture
def make(make_affinity, demo_rows, tmp_path):
    """A trainer on 12 rows, with a cache or not."""

    def make_trainer(is_cached=True, cls=FastTrainer, rows=None):
        speedups = ["embedding_cache"] if is_cached else []
        settings = {"speedups": speedups, "embedding_cache_dir": str(tmp_path / "cache"), "max_steps": 1}
        settings |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
        model, collator = make_affinity()
        args = FastTrainingArguments(str(tmp_path / "run"), **settings)
        return cls(model, args, collator, demo_rows.select(range(12)) if rows is None else rows)

    return make_trainer


def test_a_refusal_is_raised_before_anything_is_carried_out(tmp_path):
    with pytest.raises(PlanRefused, match="batch_size"):
        make_trainer(tmp_path / "run", effective_batch_size=9)
    assert not (tmp_path / "run").exists()


class Raises(TrainerCallback):
    def on_init_end(self, *args, **kwargs):
        raise TypeError("not built")


def test_what_a_plan_changed_is_as_before_where_the_trainer_cannot_be_built(tmp_path):
    model = make_wide_esm()
    forward = model.esm.encoder.layer[0].intermediate.forward
    make_trainer(tmp_path, model=model, speedups=["fused_gelu"])
    assert model.esm.encoder.layer[0].intermediate.forward != forward  # the twin
    model = make_wide_esm()
    forward = model.esm.encoder.layer[0].intermediate.forward
    with pytest.raises(TypeError, match="not built"):
        make_trainer(tmp_path, model=model, speedups=["fused_gelu"], callbacks=[Raises()])
    assert model.esm.encoder.layer[0].intermediate.forward == forward


def make_groups(model, folder, **given) -> list[dict]:
    args = FastTrainingArguments(
        str(folder), use_cpu=True, report_to="none", learning_rate=1e-3, weight_decay=0.1, **given
    )
    return FastTrainer(model, args).create_optimizer().param_groups


def rates(groups) -> dict[int, float]:
    found = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups)  # no parameter twice
    return found


def test_encoder_and_head_have_their_own_rates_and_weight_decay_stays(make_affinity, tmp_path):
    model, _ = make_affinity("full", "frozen")
    plain = make_groups(model, tmp_path)
    groups = make_groups(model, tmp_path, encoder_learning_rate=1e-5)
    found = rates(groups)
    encoder = [p for p in model.encoders.parameters() if p.requires_grad]
    assert {found[id(p)] for p in encoder} == {1e-5}
    assert {found[id(p)] for p in model.head.parameters()} == {1e-3}
    assert found.keys() == rates(plain).keys()
    decay = [{id(p) for group in side for p in group["params"] if group["weight_decay"]} for side in (plain, groups)]
    assert decay[0] == decay[1]


def test_a_generator_that_trains_its_encoder_has_two_rates_and_one_of_its_own_none(demo_encoders, tmp_path):
    spec = read_encoder(demo_encoders[1], None, "lora", LoraSettings())
    model = AntibodyGenerator(GeneratorConfig.of_size("esm", "tiny", antigen_encoder=asdict(spec)))
    found = rates(make_groups(model, tmp_path, encoder_learning_rate=1e-5))
    encoder = {id(p) for p in model.encoder.parameters() if p.requires_grad}
    assert {found[one] for one in encoder} == {1e-5}
    assert {found[one] for one in found.keys() - encoder} == {1e-3}
    with pytest.raises(ArgumentError, match="no encoder that trains"):
        make_groups(AntibodyGenerator(GeneratorConfig.of_size("lstm", "tiny")), tmp_path, encoder_learning_rate=1e-5)


@pytest.mark.parametrize("kind", ["frozen towers", "no head"])
def test_models_without_an_encoder_beside_a_head_are_refused(make_affinity, tmp_path, kind):
    model = make_affinity("frozen", "frozen")[0] if kind == "frozen towers" else make_esm(EsmModel)
    with pytest.raises(ArgumentError, match=r"--encoder_learning_rate.*no encoder that trains"):
        make_groups(model, tmp_path, encoder_learning_rate=1e-5)
