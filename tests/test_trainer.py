"""FastTrainer: stock Trainer without a preset; with one, the same learning from a cache that is filled once."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from miniature_esm import make_esm
from run_outcomes import losses, same_weights
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    EsmForMaskedLM,
    EsmForSequenceClassification,
    EsmTokenizer,
    Trainer,
    TrainingArguments,
)

from hf_ext.affinity.scoring import compute_metrics
from hf_ext.models.affinity import AffinityModel
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


# --- a plain ESM, no preset ------------------------------------------------------------------------------------------


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


# --- towers and a head: live against cached --------------------------------------------------------------------------


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


def test_plain_lists_of_rows_are_cached_like_datasets(fast_trainer, demo_rows):
    from_dataset = fast_trainer("a", speedups=["embedding_cache"])
    from_dataset.train()
    rows = demo_rows.to_list()
    from_list = fast_trainer("b", speedups=["embedding_cache"], train_rows=rows[:120], eval_rows=rows[120:160])
    from_list.train()
    assert losses(from_list) == losses(from_dataset)
    assert from_list.evaluate()["eval_rmse"] == from_dataset.evaluate()["eval_rmse"]


# --- order of rows, and which rows -----------------------------------------------------------------------------------


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


def count_rows(prediction) -> dict[str, float]:
    return {"rows": float(len(prediction.predictions))}


@pytest.mark.nightly
def test_persistent_workers_evaluate_the_dataset_that_is_passed(fast_trainer, demo_rows):
    small, other = demo_rows.select(range(8)), demo_rows.select(range(40))
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = fast_trainer(eval_rows=small, **workers)
    trainer.compute_metrics = count_rows
    seen = [trainer.evaluate(*given)["eval_rows"] for given in ((), (other,), (), (other,))]
    assert seen == [8, 40, 8, 40]


# --- saving and resuming ---------------------------------------------------------------------------------------------


def test_a_head_on_cached_embeddings_resumes_exactly(fast_trainer):
    saving = {"save_strategy": "steps", "save_steps": 5, "max_steps": 12, "speedups": ["all"]}
    whole = fast_trainer("whole", **saving)
    whole.train()
    checkpoint = str(Path(whole.args.output_dir) / "checkpoint-5")
    resumed = fast_trainer("resumed", **saving)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert losses(resumed) == losses(whole)
    assert len(losses(whole)) == 12
    assert same_weights(resumed.model, whole.model)
    assert resumed.model.config.label_mean == whole.model.config.label_mean

    restarted = fast_trainer("restarted", **saving)
    restarted.train()
    assert same_weights(restarted.model, whole.model)
    shorter = fast_trainer("shorter", **{**saving, "max_steps": 5, "save_strategy": "no"})
    shorter.train()
    assert not same_weights(shorter.model, whole.model)  # the comparison sees seven steps


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


def test_predicting_needs_no_training_data_under_any_speedup(fast_trainer, demo_rows, make_affinity, tmp_path):
    model, collator = make_affinity()
    args = FastTrainingArguments(
        output_dir=str(tmp_path), speedups=["all"], embedding_cache_dir=str(tmp_path / "c"), **QUIET
    )
    trainer = FastTrainer(model, args, collator)
    assert trainer.plan["encoder_precision"].status == "skipped"
    assert trainer.predict(demo_rows.select(range(10))).predictions.shape == (10,)
    trainer.end()


def test_no_file_of_a_run_holds_the_token_and_none_is_a_pickle_of_arguments(fast_trainer):
    secret = "hf_secretsecretsecret"
    trainer = fast_trainer(
        speedups=["all"], hub_token=secret, save_strategy="steps", save_steps=5, load_best_model_at_end=False
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    files = [path for path in Path(trainer.args.output_dir).rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"model.safetensors", "training_args.json", "plan.json", "inputs.json", "trainer_state.json"} <= names
    assert "training_args.bin" not in names
    assert len(list(Path(trainer.args.output_dir).glob("checkpoint-*/model.safetensors"))) == 2
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    assert json.loads((Path(trainer.args.output_dir) / "training_args.json").read_text())["max_steps"] == 10


def test_a_module_that_is_no_pretrained_model_is_saved_without_a_pickle_too(tmp_path):
    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x, labels=None):
            return {"loss": ((self.weight * x - labels) ** 2).mean(), "logits": self.weight * x}

    data = Dataset.from_dict({"x": [1.0, 2.0], "labels": [2.0, 4.0]})
    args = FastTrainingArguments(output_dir=str(tmp_path), max_steps=2, **QUIET)
    trainer = FastTrainer(Line(), args, train_dataset=data)
    trainer.train()
    trainer.save_model()
    assert {path.name for path in tmp_path.iterdir()} >= {"model.safetensors", "training_args.json"}
    assert not list(tmp_path.rglob("training_args.bin"))


# --- towers that train -----------------------------------------------------------------------------------------------


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
