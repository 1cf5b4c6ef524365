"""Whoever overrides a method of Trainer, or gives a loss or an optimizer, gets the numbers of stock Trainer."""

import random
import types

import numpy as np
import pytest
import torch
from stock_twins import Numbers, make_model, make_rows, run, run_both, settings
from token_rows import pad_rows
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

import hf_ext.trainer
from hf_ext.data import random_states
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

WEIGHT = torch.tensor([1.0, 9.0, 2.0])
MODELS = ("EsmForSequenceClassification", "EsmForTokenClassification", "BertForSequenceClassification")
MODELS += ("BertForTokenClassification", "T5ForTokenClassification", "Plain")


def weighted_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    loss = cross_entropy(outputs["logits"].reshape(-1, 3), labels.reshape(-1), weight=WEIGHT)
    return (loss, outputs) if return_outputs else loss


def weighted(base):
    return type("Weighted", (base,), {"compute_loss": weighted_loss})


def grandchild(base):
    return type("Grandchild", (type("Child", (weighted(base),), {}),), {})


def mixed_in(base):
    return type("Mixed", (type("WeightedMixin", (), {"compute_loss": weighted_loss}), base), {})


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


def term_added_without_items(base):
    class Added(base):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            loss = loss + penalty(model)
            return (loss, outputs) if return_outputs else loss

    return Added


def scaled_by_itself(base):
    class Scaled(weighted(base)):
        loss_is_scaled_for_ga = True

    return Scaled


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


def own_step(base):
    class OwnStep(base):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            loss = loss / self.args.gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    return OwnStep


def step_scaled(base):
    class Scaled(base):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs) * 2

    return Scaled


def batches_without_items(base):
    class Uncounted(base):
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            return super().get_batch_samples(epoch_iterator, num_batches, device)[0], None

    return Uncounted


def own_inputs(base):
    class Relabelled(base):
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            labels = inputs["labels"]
            return {**inputs, "labels": torch.where(labels == 1, -100 if labels.ndim > 1 else 2, labels)}

    return Relabelled


def own_prediction(base):
    class Doubled(base):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return 2 * loss + 5, logits, labels

    return Doubled


def own_loop(base):
    class Shifted(base):
        def evaluation_loop(self, *args, **kwargs):
            output = super().evaluation_loop(*args, **kwargs)
            key = f"{kwargs.get('metric_key_prefix', 'eval')}_loss"
            output.metrics[key] += 5
            return output

    return Shifted


LOSSES = (weighted, grandchild, mixed_in, behind, term_added, term_added_without_items, scaled_by_itself, items_used)
TRAINED = {"losses", "grad_norms", "weights"}
STEPS = (own_step, batches_without_items, own_inputs)


def same(pair: tuple[Numbers, Numbers]) -> bool:
    ours, stock = pair
    assert len(ours.losses) == len(ours.grad_norms) == 3
    assert len(ours.eval_losses) == 4
    assert ours.differences(stock) == []
    return True


# --- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_an_overridden_compute_loss_trains_and_evaluates_as_in_stock_trainer(name, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}  # else there is no best checkpoint to compare
    ours, stock = run_both(tmp_path, name, weighted, gradient_accumulation_steps=8, **saving)
    assert same((ours, stock))
    assert ours.best[0] in (1, 2, 3)


@pytest.mark.parametrize("steps", [1, 2])
def test_so_it_does_with_less_accumulation_or_none(steps, tmp_path):
    assert same(run_both(tmp_path, "EsmForSequenceClassification", weighted, gradient_accumulation_steps=steps))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("override", LOSSES[1:])
def test_every_way_to_override_compute_loss_is_stock(override, tmp_path):
    assert same(run_both(tmp_path, "EsmForTokenClassification", override, gradient_accumulation_steps=8))


def test_where_the_override_is_not_seen_gradients_are_as_many_times_too_large_as_there_are_batches(
    tmp_path, monkeypatch
):
    for module in (hf_ext.trainer, hf_ext.training.losses):
        monkeypatch.setattr(module, "find_override", lambda trainer, *names: None)
    ours, stock = run_both(tmp_path, "EsmForSequenceClassification", weighted, gradient_accumulation_steps=8)
    assert "weights" in ours.differences(stock)
    assert ours.grad_norms[0] == pytest.approx(8 * stock.grad_norms[0], rel=1e-5)
    assert ours.eval_losses[0] != pytest.approx(stock.eval_losses[0], rel=1e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("override", STEPS)
def test_what_a_training_loss_passes_through_is_stock_where_it_is_overridden(override, tmp_path):
    ours, stock = run_both(tmp_path, "EsmForTokenClassification", override, gradient_accumulation_steps=8)
    assert TRAINED.isdisjoint(ours.differences(stock))  # the loss of an evaluation is over all its items


@pytest.mark.sampled(3)
@pytest.mark.parametrize("override", [own_prediction, own_loop, own_inputs])
def test_what_an_evaluation_passes_through_is_stock_where_it_is_overridden(override, tmp_path):
    assert same(run_both(tmp_path, "EsmForTokenClassification", override))


def patch_loss(trainer):
    trainer.compute_loss = types.MethodType(weighted_loss, trainer)


def assign_function(trainer):
    trainer.compute_loss_func = mean_square


def mean_square(outputs, labels, num_items_in_batch=None):
    return (outputs["logits"] - labels[..., None]).square().mean()


@pytest.mark.parametrize("after", [patch_loss, assign_function])
def test_a_loss_that_is_assigned_to_the_trainer_is_stock(after, tmp_path):
    assert same(run_both(tmp_path, "EsmForTokenClassification", after=after, gradient_accumulation_steps=8))


def test_a_loss_function_is_stock(tmp_path):
    given = {"extra": lambda model: {"compute_loss_func": mean_square}, "gradient_accumulation_steps": 8}
    assert same(run_both(tmp_path, "BertForTokenClassification", **given))


def test_label_smoothing_is_stock(tmp_path):
    given = {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2}
    assert same(run_both(tmp_path, "EsmForTokenClassification", **given))


class Noisy:
    """Data whose rows are another every time that they are read."""

    def __init__(self, rows):
        self.rows, self.generator = list(rows), np.random.default_rng(0)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return {**row, "input_ids": self.generator.permutation(row["input_ids"]).tolist()}


class NoisyCollator:
    def __init__(self):
        self.generator = random.Random(0)

    def __call__(self, rows):
        batch = pad_rows(rows)
        return {**batch, "labels": (batch["labels"] + self.generator.randrange(3)) % 3}


def drawing(base):
    class Drawing(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.generator = torch.Generator().manual_seed(self.args.seed)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            loss = loss * torch.rand((), generator=self.generator)
            return (loss, outputs) if return_outputs else loss

    return Drawing


@pytest.mark.parametrize("is_broken", [False, True])
def test_generators_of_the_users_are_where_they_would_be_in_stock_trainer(is_broken, tmp_path, monkeypatch):
    if is_broken:
        monkeypatch.setattr(random_states, "put_back", lambda generator, state: None)
    numbers = []
    for cls, arguments in ((FastTrainer, FastTrainingArguments), (Trainer, TrainingArguments)):
        args = arguments(**settings(tmp_path / cls.__name__))
        rows, evals = Noisy(make_rows("Plain", 12)), make_rows("Plain", 8)
        trainer = drawing(cls)(make_model("Plain"), args, NoisyCollator(), rows, evals)
        numbers.append(run(trainer))
    assert ("weights" in numbers[0].differences(numbers[1])) is is_broken
    assert is_broken or numbers[0].differences(numbers[1]) == []


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
    (averaged,) = told("EsmForTokenClassification", weighted(FastTrainer), **several)
    assert averaged.startswith("Weighted.compute_loss decides the loss, so it is taken as Trainer takes it: averaged")
    (summed,) = told("BertForTokenClassification", weighted(FastTrainer), **several)
    assert "as Trainer takes it: summed over the batches of a step. Set loss_is_scaled_for_ga" in summed
    assert told("EsmForTokenClassification", scaled_by_itself(FastTrainer), **several) == []
    assert told("EsmForTokenClassification", weighted(FastTrainer)) == []
    assert told("EsmForTokenClassification", FastTrainer, **several) == []
