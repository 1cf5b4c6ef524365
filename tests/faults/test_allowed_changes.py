"""A run continued with other arguments: contradictions are refused and listed, allowed and harmless changes act."""

import logging
from pathlib import Path

import pytest
from closing_line import tally
from faulty_runs import make_rows
from miniature_esm import make_narrow_esm
from stock_runs import KINDS, NUM_STEPS, SAVED, Runs, differing
from transformers import Trainer

from hf_ext.errors import ArgumentError, CheckpointError
from hf_ext.trainer import FastTrainer

KIND = KINDS[0]
# Argument -> (another value, how the refusal names the difference). The checkpoint's run has those of `SETTINGS`.
CHANGES = {
    "learning_rate": (5e-3, "learning_rate: 0.01 in the checkpoint, 0.005 now"),
    "lr_scheduler_type": ("constant", "lr_scheduler_type: linear in the checkpoint, constant now"),
    "warmup_steps": (2, "warmup_steps: 0 in the checkpoint, 2 now"),
    "max_steps": (9, "max_steps: 6 in the checkpoint, 9 now"),
    "per_device_train_batch_size": (3, "per_device_train_batch_size: 2 in the checkpoint, 3 now"),
    "gradient_accumulation_steps": (2, "gradient_accumulation_steps: 1 in the checkpoint, 2 now"),
    "seed": (4, "seed: 3 in the checkpoint, 4 now"),
    "data_seed": (5, "data_seed: None in the checkpoint, 5 now"),
    "optim": ("sgd", "optim: adamw_torch_fused in the checkpoint, sgd now"),
    "weight_decay": (0.1, "weight_decay: 0.0 in the checkpoint, 0.1 now"),
    "adam_beta1": (0.5, "adam_beta1: 0.9 in the checkpoint, 0.5 now"),
    "max_grad_norm": (0.5, "max_grad_norm: 1.0 in the checkpoint, 0.5 now"),
    "train_sampling_strategy": ("sequential", "train_sampling_strategy: random in the checkpoint, sequential now"),
    "label_smoothing_factor": (0.1, "label_smoothing_factor: 0.0 in the checkpoint, 0.1 now"),
    "neftune_noise_alpha": (5.0, "neftune_noise_alpha: None in the checkpoint, 5.0 now"),
    "dataloader_drop_last": (True, "dataloader_drop_last: False in the checkpoint, True now"),
    "data": (make_rows(row3=9.0), "data: "),
    "model": (None, "model."),
}
# What an allowed change does to the learning rates of steps 4 to 6 (9), by hand: linear, from 0.01 to 0 in 6 steps.
RATES = {
    "learning_rate": [0.0025, 0.005 / 3, 0.005 / 6],
    "lr_scheduler_type": [0.01, 0.01, 0.01],
    "warmup_steps": [0.0075, 0.005, 0.0025],
    "max_steps": [0.06 / 9, 0.05 / 9, 0.04 / 9, 0.03 / 9, 0.02 / 9, 0.01 / 9],
}
OLD_RATES = [0.005, 0.01 / 3, 0.01 / 6]


@pytest.fixture(scope="module")
def counts(request):
    with tally(request, "allowed changes", contradictions=0, refused=0, allowed=0, took_effect=0, harmless=0) as found:
        yield found


class Bench(Runs):
    """One run with a checkpoint after 3 of 6 steps, which others continue in folders of their own."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.trainer, self.watch = self.train(KIND, FastTrainer, folder / "whole")
        self.checkpoint = folder / "whole" / f"checkpoint-{SAVED}"
        self.train(KIND, Trainer, folder / "stock", logging_steps=2)
        self.stock_checkpoint = folder / "stock" / f"checkpoint-{SAVED}"

    def changed(self, folder: Path, changes: dict, **given):
        """A trainer with other arguments, data or model than the checkpoint's run, and what watches it."""
        own = self.models[KIND]
        if "model" in changes:
            self.models[KIND] = make_wider()
        arguments = {name: value for name, value in changes.items() if name not in ("data", "model")}
        trainer, watch = self.make(KIND, FastTrainer, folder, **arguments, **given)
        self.models[KIND] = own
        trainer.train_dataset = changes.get("data", trainer.train_dataset)
        return trainer, watch


def make_wider():
    """As `make_narrow_esm`, with a wider layer."""
    return make_narrow_esm(intermediate_size=16)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("changes"))


def refusal_of(bench, folder, changes, **given) -> str:
    trainer, watch = bench.changed(folder, changes, **given)
    with pytest.raises(CheckpointError) as refusal:
        trainer.train(resume_from_checkpoint=str(bench.checkpoint))
    assert watch.weights == {}  # it did not begin
    return str(refusal.value)


def logged(trainer, name) -> dict[int, float]:
    return {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}


def steps_saved(folder) -> set[int]:
    return {int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*")}


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CHANGES)
def test_a_contradiction_is_refused_with_both_values(bench, counts, name, tmp_path):
    counts["contradictions"] += 1
    value, line = CHANGES[name]
    message = refusal_of(bench, tmp_path, {name: value})
    assert f"\n  {line}" in message
    assert "--allow_changed NAME" in message
    counts["refused"] += 1


def test_all_contradictions_are_listed_at_once_but_those_that_are_allowed(bench, tmp_path):
    changes = {name: value for name, (value, _) in CHANGES.items()}
    message = refusal_of(bench, tmp_path, changes, allow_changed=["seed", "model"])
    lines = [line for name, (_, line) in CHANGES.items() if name not in ("seed", "model")]
    assert [line for line in lines if line not in message] == []
    assert CHANGES["seed"][1] not in message
    assert "model." not in message


def test_a_contradiction_beside_an_allowed_one_is_still_refused(bench, tmp_path):
    changes = {name: CHANGES[name][0] for name in ("learning_rate", "seed")}
    message = refusal_of(bench, tmp_path, changes, allow_changed=["learning_rate"])
    assert CHANGES["seed"][1] in message
    assert CHANGES["learning_rate"][1] not in message


def test_an_unknown_name_to_allow_is_refused_with_those_that_there_are(bench, tmp_path):
    trainer, _ = bench.changed(tmp_path, {}, allow_changed=["lerning_rate"])
    with pytest.raises(ArgumentError, match=r"unknown \['lerning_rate'\]. Known: .*learning_rate"):
        trainer.train(resume_from_checkpoint=str(bench.checkpoint))


def test_a_run_without_a_change_is_the_run_that_was_not_interrupted(bench, tmp_path):
    trainer, watch = bench.changed(tmp_path, {})
    trainer.train(resume_from_checkpoint=str(bench.checkpoint))
    assert watch.began_at == SAVED
    assert differing(watch.weights[NUM_STEPS], bench.watch.weights[NUM_STEPS]) == []


def test_another_model_is_refused_by_its_shapes_even_where_it_is_allowed(bench, tmp_path):
    message = refusal_of(bench, tmp_path, {"model": None}, allow_changed=["model"])
    assert "esm.encoder.layer.0.intermediate.dense.weight" in message


# --- allowed ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(12)
@pytest.mark.parametrize("allow", ["by name", pytest.param("all", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", [name for name in CHANGES if name not in ("model", "label_smoothing_factor")])
def test_an_allowed_change_takes_effect(bench, counts, name, allow, tmp_path, caplog):
    counts["allowed"] += 1
    allowed = [name if allow == "by name" else "all"]
    trainer, watch = bench.changed(tmp_path, {name: CHANGES[name][0]}, allow_changed=allowed)
    with caplog.at_level(logging.WARNING, "hf_ext"):
        trainer.train(resume_from_checkpoint=str(bench.checkpoint))
    assert watch.began_at == SAVED
    assert differing(watch.weights[SAVED], bench.watch.weights[SAVED]) == []
    assert trainer.state.global_step == (9 if name == "max_steps" else NUM_STEPS)
    if name == "dataloader_drop_last":  # no batch is short here
        assert differing(watch.weights[NUM_STEPS], bench.watch.weights[NUM_STEPS]) == []
    else:
        assert differing(watch.weights[NUM_STEPS], bench.watch.weights[NUM_STEPS]) != []
    rates = logged(trainer, "learning_rate")
    assert [rates[step] for step in sorted(rates) if step > SAVED] == pytest.approx(RATES.get(name, OLD_RATES))
    moves_rows = name in ("data", "seed", "data_seed", "per_device_train_batch_size", "gradient_accumulation_steps")
    assert ("Rows come in another order from here on" in caplog.text) == moves_rows
    counts["took_effect"] += 1


def test_allowed_settings_of_the_optimizer_are_those_it_then_has(bench, tmp_path):
    changes = {name: CHANGES[name][0] for name in ("weight_decay", "adam_beta1", "learning_rate")}
    trainer, _ = bench.changed(tmp_path, changes, allow_changed=[*changes])
    trainer.train(resume_from_checkpoint=str(bench.checkpoint))
    decayed, plain = trainer.optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert decayed["betas"] == plain["betas"] == (0.5, 0.999)
    assert decayed["initial_lr"] == plain["initial_lr"] == 5e-3


def test_stock_trainer_ignores_a_changed_learning_rate(bench, tmp_path):
    """The broken twin: resumed with half the rate, it goes on with the whole, and says nothing."""
    trainer, _ = bench.train(KIND, Trainer, tmp_path, bench.stock_checkpoint, learning_rate=5e-3, logging_steps=1)
    rates = logged(trainer, "learning_rate")
    assert rates[NUM_STEPS] == pytest.approx(OLD_RATES[-1])


# --- harmless --------------------------------------------------------------------------------------------------------

HARMLESS = {
    "logging_steps": 2,
    "save_steps": 2,
    "save_total_limit": 5,
    "dataloader_num_workers": 1,
    "dataloader_prefetch_factor": 3,
    "logging_first_step": True,
    "save_minutes": 60.0,
    "run_name": "another",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_change_goes_through_and_leaves_the_weights_as_they_are(bench, counts, name, tmp_path):
    given = {"dataloader_num_workers": 1} if name == "dataloader_prefetch_factor" else {}
    trainer, watch = bench.changed(tmp_path, {name: HARMLESS[name], **given})
    trainer.train(resume_from_checkpoint=str(bench.checkpoint))
    assert watch.began_at == SAVED
    assert differing(watch.weights[NUM_STEPS], bench.watch.weights[NUM_STEPS]) == []
    counts["harmless"] += 1


def test_new_intervals_are_honoured(bench, counts, tmp_path):
    changes = {"logging_steps": 2, "save_steps": 4, "eval_steps": 5, "eval_strategy": "steps"}
    trainer, watch = bench.changed(tmp_path / "resumed", changes)
    trainer.train(resume_from_checkpoint=str(bench.checkpoint))
    assert sorted(logged(trainer, "loss")) == [1, 2, 3, 4, 6]  # every step before, every second after
    assert sorted(logged(trainer, "eval_loss")) == [5, 6]  # stock Trainer evaluates after the last step too
    assert steps_saved(tmp_path / "resumed") == {4, 6}
    _, always = bench.train(KIND, FastTrainer, tmp_path / "always", **changes)  # an evaluation draws random numbers
    assert differing(watch.weights[NUM_STEPS], always.weights[NUM_STEPS]) == []
    counts["harmless"] += 1


def test_stock_trainer_keeps_the_old_intervals(bench, tmp_path):
    trainer, _ = bench.train(KIND, Trainer, tmp_path, bench.stock_checkpoint, logging_steps=1, save_steps=4)
    assert sorted(logged(trainer, "loss")) == [2, 4, 6]
    assert 4 not in steps_saved(tmp_path)


def test_the_same_rows_in_smaller_batches_are_no_contradiction(bench, counts, tmp_path, caplog):
    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    trainer, watch = bench.changed(tmp_path, changes)
    with caplog.at_level(logging.INFO, "hf_ext"):
        trainer.train(resume_from_checkpoint=str(bench.checkpoint))
    assert "per_device_train_batch_size: 2 in the checkpoint, 1 now (the same rows in every step)" in caplog.text
    assert watch.began_at == SAVED
    assert trainer.state.global_step == NUM_STEPS
    counts["harmless"] += 1
