"""Whoever overrides a method of Trainer, or gives a loss or an optimizer, gets the numbers of stock Trainer."""

import types

import pytest
import torch
from stock_twins import Numbers, make_model, make_rows, run, run_both, settings
from token_rows import pad_rows
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

WEIGHT = torch.tensor([1.0, 9.0, 2.0])
MODELS = ("EsmForSequenceClassification", "BertForTokenClassification", "T5ForTokenClassification", "Plain")


def weighted_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    loss = cross_entropy(outputs["logits"].reshape(-1, 3), labels.reshape(-1), weight=WEIGHT)
    return (loss, outputs) if return_outputs else loss


def weighted(base):
    return type("Weighted", (base,), {"compute_loss": weighted_loss})


def behind(base):
    """The override stands between FastTrainer and Trainer."""
    other = weighted(Trainer)
    return other if base is Trainer else type("Behind", (base, other), {})


def penalty(model):
    return 5 + 0.1 * sum(p.square().sum() for p in model.parameters())


def term_added(base):
    class Added(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            loss = loss + penalty(model)
            return (loss, outputs) if return_outputs else loss

    return Added


def items_used(base):
    """Divides by the count that it is handed, which stock Trainer makes for some models only."""

    class Items(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            total = cross_entropy(outputs["logits"].reshape(-1, 3), labels.reshape(-1), reduction="sum")
            loss = total / (2 if num_items_in_batch is None else num_items_in_batch)
            return (loss, outputs) if return_outputs else loss

    return Items


def own_prediction(base):
    class Doubled(base):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return 2 * loss + 5, logits, labels

    return Doubled


LOSSES = (behind, term_added, items_used)
TRAINED = {"losses", "grad_norms", "weights"}


def same(pair: tuple[Numbers, Numbers]) -> bool:
    ours, stock = pair
    assert len(ours.losses) == len(ours.grad_norms) == 3
    assert len(ours.eval_losses) == 4
    assert ours.differences(stock) == []
    return True


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_an_overridden_compute_loss_trains_and_evaluates_as_in_stock_trainer(name, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}  # else there is no best checkpoint to compare
    ours, stock = run_both(tmp_path, name, weighted, gradient_accumulation_steps=8, **saving)
    assert same((ours, stock))
    assert ours.best[0] in (1, 2, 3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("override", LOSSES)
def test_every_way_to_override_compute_loss_is_stock(override, tmp_path):
    assert same(run_both(tmp_path, "EsmForTokenClassification", override, gradient_accumulation_steps=8))


def test_what_an_evaluation_passes_through_is_stock_where_it_is_overridden(tmp_path):
    assert same(run_both(tmp_path, "EsmForTokenClassification", own_prediction))


def patch_loss(trainer):
    trainer.compute_loss = types.MethodType(weighted_loss, trainer)


def test_a_loss_that_is_assigned_to_the_trainer_is_stock(tmp_path):
    assert same(run_both(tmp_path, "EsmForTokenClassification", after=patch_loss, gradient_accumulation_steps=8))


def test_label_smoothing_is_stock(tmp_path):
    given = {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2}
    assert same(run_both(tmp_path, "EsmForTokenClassification", **given))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("override", [lambda base: base, term_added])
def test_an_affinity_model_is_stock_where_its_loss_is_overridden(override, make_affinity, demo_rows, tmp_path):
    rows = demo_rows.select(range(24))
    rows = rows.map(lambda row, i: {"label": -100.0 if i % 3 == 0 else row["label"]}, with_indices=True)
    numbers = []
    for cls, arguments in ((FastTrainer, FastTrainingArguments), (Trainer, TrainingArguments)):
        model, collator = make_affinity("full", "frozen")
        model.fit_scaling(0.0, 30.0, {name: torch.randn(20, size) for name, size in model.embedding_sizes.items()})
        given = settings(tmp_path / cls.__name__, gradient_accumulation_steps=4, remove_unused_columns=False)
        trainer = override(cls)(model, arguments(**given), collator, rows, rows.select(range(11)))
        numbers.append(run(trainer))
    differences = numbers[0].differences(numbers[1])
    if override is term_added:
        assert differences == []
    else:  # ours: a label of -100 is a measurement
        assert set(differences) >= TRAINED


def test_whoever_overrides_the_loss_is_told_how_trainer_scales_it(tmp_path, caplog):
    def told(name, cls, **given):
        caplog.clear()
        args = FastTrainingArguments(**settings(tmp_path, **given))
        cls(make_model(name), args, pad_rows, make_rows(name, 4), make_rows(name, 4))
        return [record.getMessage() for record in caplog.records if record.name.startswith("hf_ext")]

    several = {"gradient_accumulation_steps": 2}
    (said,) = told("EsmForTokenClassification", weighted(FastTrainer), **several)
    assert said.startswith("The loss of Weighted.compute_loss may be averaged over each micro-batch")
    assert told("EsmForTokenClassification", weighted(FastTrainer)) == []
    assert told("EsmForTokenClassification", FastTrainer, **several) == []
