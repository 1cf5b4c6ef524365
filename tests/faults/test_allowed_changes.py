"""Checkpoints of other runs: contradictions are refused and listed, allowed ones act; those of stock Trainer too."""

import json
import logging
import shutil
import warnings
from pathlib import Path

import pytest
from faulty_runs import bits, make_rows
from miniature_esm import make_narrow_esm
from peft import PeftModel
from stock_runs import BEST, ESM_KINDS, KINDS, LAYER_NORMS, NUM_STEPS, SAVED, Runs, differing
from transformers import Trainer

from hf_ext.checkpoints import compare_runs
from hf_ext.errors import ArgumentError, CheckpointError
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

KIND = KINDS[0]
# Argument -> (another value, how the refusal names the difference). The checkpoint's run has those of `SETTINGS`.
CHANGES = {
    "learning_rate": (5e-3, "learning_rate: 0.01 in the checkpoint, 0.005 now"),
    "warmup_steps": (2, "warmup_steps: 0 in the checkpoint, 2 now"),
    "max_steps": (9, "max_steps: 6 in the checkpoint, 9 now"),
    "per_device_train_batch_size": (3, "per_device_train_batch_size: 2 in the checkpoint, 3 now"),
    "gradient_accumulation_steps": (2, "gradient_accumulation_steps: 1 in the checkpoint, 2 now"),
    "seed": (4, "seed: 3 in the checkpoint, 4 now"),
    "data_seed": (5, "data_seed: None in the checkpoint, 5 now"),
    "weight_decay": (0.1, "weight_decay: 0.0 in the checkpoint, 0.1 now"),
    "adam_beta1": (0.5, "adam_beta1: 0.9 in the checkpoint, 0.5 now"),
    "max_grad_norm": (0.5, "max_grad_norm: 1.0 in the checkpoint, 0.5 now"),
    "train_sampling_strategy": ("sequential", "train_sampling_strategy: random in the checkpoint, sequential now"),
    "label_smoothing_factor": (0.1, "label_smoothing_factor: 0.0 in the checkpoint, 0.1 now"),
    "neftune_noise_alpha": (5.0, "neftune_noise_alpha: None in the checkpoint, 5.0 now"),
    "data": (make_rows(row3=9.0), "data: column 'labels' holds other values"),
}
NEVER = {"optim": "sgd", "lr_scheduler_type": "constant", "encoder_learning_rate": 1e-3}
# What an allowed change does to the learning rates of steps 4 to 6 (9), by hand: linear, from 0.01 to 0 in 6 steps.
RATES = {
    "learning_rate": [0.0025, 0.005 / 3, 0.005 / 6],
    "warmup_steps": [0.0075, 0.005, 0.0025],
    "max_steps": [0.06 / 9, 0.05 / 9, 0.04 / 9, 0.03 / 9, 0.02 / 9, 0.01 / 9],
}
OLD_RATES = [0.005, 0.01 / 3, 0.01 / 6]


class Bench(Runs):
    """One run with a checkpoint after 3 of 6 steps, which others continue in folders of their own."""

    @property
    def checkpoint(self) -> Path:
        return self.whole(KIND, FastTrainer)[0]

    @property
    def watch(self):
        return self.whole(KIND, FastTrainer)[2]

    def changed(self, folder: Path, changes: dict, **given):
        """A trainer with other arguments or data than the checkpoint's run, and what watches it."""
        arguments = {name: value for name, value in changes.items() if name != "data"}
        trainer, watch = self.make(KIND, FastTrainer, folder, **arguments, **given)
        trainer.train_dataset = changes.get("data", trainer.train_dataset)
        return trainer, watch

    def resume(self, folder: Path, **given):
        """The same, trained on from the checkpoint."""
        trainer, watch = self.changed(folder, given.pop("changes", {}), **given)
        trainer.train(resume_from_checkpoint=str(self.checkpoint))
        assert watch.began_at == SAVED
        return trainer, watch


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("changes"))


def refusal_of(trainer, checkpoint) -> str:
    with pytest.raises(CheckpointError) as refusal:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    return str(refusal.value)


def logged(trainer, name) -> dict[int, float]:
    return {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}


def test_all_contradictions_are_listed_at_once_but_those_that_are_allowed(bench, tmp_path):
    changes = {name: value for name, (value, _) in CHANGES.items()}
    trainer, watch = bench.changed(tmp_path, changes, allow_changed=["seed"])
    message = refusal_of(trainer, bench.checkpoint)
    lines = [line for name, (_, line) in CHANGES.items() if name != "seed"]
    assert [line for line in lines if f"\n  {line}" not in message] == []
    assert CHANGES["seed"][1] not in message
    assert "--allow_changed NAME" in message
    assert watch.weights == {}  # it did not begin


@pytest.mark.parametrize("name", NEVER)
def test_states_of_another_optimizer_or_schedule_are_refused_whatever_is_allowed(bench, name, tmp_path):
    trainer, _ = bench.changed(tmp_path, {name: NEVER[name]}, allow_changed=["all"])
    assert "its states do not fit; start from the weights alone" in refusal_of(trainer, bench.checkpoint)


def test_another_model_is_refused_by_its_configuration_and_where_that_is_allowed_by_its_shapes(bench, tmp_path):
    trainer, _ = bench.changed(tmp_path, {}, allow_changed=["seed"])
    trainer.model = make_narrow_esm(intermediate_size=16)
    assert "\n  model.config.intermediate_size: 8 in the checkpoint, 16 now" in refusal_of(trainer, bench.checkpoint)
    trainer.args.allow_changed = ["model"]
    assert "esm.encoder.layer.0.intermediate.dense.weight" in refusal_of(trainer, bench.checkpoint)


def test_what_trains_and_how_adapters_are_scaled_are_part_of_the_model(bench, tmp_path):
    trainer, _ = bench.changed(tmp_path, {})
    trainer.model.classifier.dense.weight.requires_grad_(False)
    assert "\n  model.num_trainable: " in refusal_of(trainer, bench.checkpoint)
    bench.train("LoRA", FastTrainer, tmp_path / "lora")
    trainer, _ = bench.make("LoRA", FastTrainer, tmp_path / "other")
    trainer.model.peft_config["default"].lora_alpha = 9
    message = refusal_of(trainer, tmp_path / "lora" / f"checkpoint-{SAVED}")
    assert "\n  model.adapters.default.lora_alpha: 8 in the checkpoint, 9 now" in message


def test_an_unknown_name_to_allow_is_refused_with_those_that_there_are(bench, tmp_path):
    trainer, _ = bench.changed(tmp_path, {}, allow_changed=["lerning_rate"])
    with pytest.raises(ArgumentError, match=r"unknown \['lerning_rate'\]. Known: all, .*learning_rate"):
        trainer.train(resume_from_checkpoint=str(bench.checkpoint))


class Masking:
    """A collator with a setting."""

    def __init__(self, collate, mask_share):
        self.collate, self.mask_share = collate, mask_share

    def __call__(self, rows):
        return self.collate(rows)


def test_settings_of_the_collator_are_compared(bench, tmp_path):
    def make(folder, share):
        trainer, _ = bench.make(KIND, FastTrainer, tmp_path / folder)
        trainer.data_collator = Masking(trainer.data_collator, share)
        return trainer

    make("old", 0.15).train()
    trainer, checkpoint = make("new", 0.3), tmp_path / "old" / f"checkpoint-{SAVED}"
    assert "\n  collator.mask_share: 0.15 in the checkpoint, 0.3 now" in refusal_of(trainer, checkpoint)
    trainer.args.allow_changed = ["collator"]
    trainer.train(resume_from_checkpoint=str(checkpoint))


EVALS = {"eval_strategy": "steps", "eval_steps": 3}
SETS = {  # what the changed set is called -> how the trainer has it
    "eval_data": lambda trainer, rows: setattr(trainer, "eval_dataset", rows),
    "eval_data, set 'far'": lambda trainer, rows: setattr(trainer, "eval_dataset", {"near": make_rows(4), "far": rows}),
    "test_data": lambda trainer, rows: setattr(trainer, "test_dataset", rows),
}


@pytest.mark.parametrize("place", SETS)
def test_held_out_rows_of_another_run_are_refused_by_the_name_of_their_set(bench, place, tmp_path):
    def make(rows):
        trainer, watch = bench.make(KIND, FastTrainer, tmp_path, **EVALS, resume="auto")
        SETS[place](trainer, rows)
        return trainer, watch

    make(make_rows(6))[0].train()
    checkpoint, group = tmp_path / f"checkpoint-{SAVED}", place.partition(",")[0]
    for rows, difference in (
        (make_rows(6, row3=9.0), "column 'labels' holds other values"),
        (make_rows(6).rename_column("input_ids", "ids"), "column 'input_ids' is not there now"),
        (make_rows(6).select([1, 0, 2, 3, 4, 5]), "column 'input_ids' holds other values"),
        (make_rows(5), "rows: 6 in the checkpoint, 5 now"),
    ):
        message = refusal_of(make(rows)[0], checkpoint)
        assert f"\n  {place}: {difference}" in message
        assert "\n  data: " not in message
    for rows, allowed in ((make_rows(6), []), (None, []), (make_rows(6, row3=9.0), [group])):
        trainer, watch = make(make_rows(6) if rows is None else rows)
        trainer.args.allow_changed = allowed
        if rows is None:  # which contradicts no score of before
            trainer.eval_dataset = {"another": make_rows(3)}
            trainer.test_dataset = None
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert watch.began_at == SAVED


def test_a_checkpoint_says_what_it_was_written_with_without_secrets_or_paths(bench, tmp_path):
    trainer, _ = bench.make(KIND, FastTrainer, tmp_path / "elsewhere")
    given = {"max_steps": 1, "save_steps": 1, "report_to": "none", "use_cpu": True, "per_device_train_batch_size": 2}
    args = FastTrainingArguments(str(tmp_path / "here"), hub_token="hf_canary", **given)
    FastTrainer(trainer.model, args, trainer.data_collator, trainer.train_dataset).train()
    text = (tmp_path / "here" / "checkpoint-1" / "manifest.json").read_text()
    assert json.loads(text)["facts"]["arguments"]["max_steps"] == 1
    assert "hf_canary" not in text
    assert str(tmp_path) not in text


BUDGET = {"token_budget": {"max_tokens": 100, "max_batch_size": None}}


def stepping(batch, accumulation, processes, devices, speedups):
    arguments = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    sizes = {"world_size": processes, "devices_per_process": devices}
    return {"arguments": arguments, **sizes, "speedups": speedups}


@pytest.mark.parametrize(
    ("speedups", "numbers", "is_same"),
    [
        ({}, (4, 4, 1, 1), True),
        ({}, (8, 1, 2, 1), True),
        ({}, (4, 2, 1, 2), True),
        ({}, (8, 2, 2, 1), False),
        ({}, (8, 1, 1, 1), False),
        (BUDGET, (4, 2, 1, 1), True),  # which plans its batches whatever the batch size says
        (BUDGET, (8, 1, 2, 1), True),
        (BUDGET, (8, 2, 2, 1), False),
    ],
)
def test_batches_and_processes_may_change_while_every_step_takes_the_same_rows(speedups, numbers, is_same):
    old = stepping(8, 2, 1, 1, speedups)
    changes = compare_runs(old, stepping(*numbers, speedups))
    assert len(changes.contradictions) == (
        0 if is_same else sum(one != other for one, other in zip(numbers, (8, 2, 1, 1)))
    )


def test_another_number_of_processes_is_refused_with_what_keeps_the_rows_and_can_be_allowed():
    old, new = stepping(8, 2, 1, 1, {}), stepping(8, 2, 4, 1, {})
    (line,) = compare_runs(old, new).contradictions
    assert line == "world_size: 1 in the checkpoint, 4 now; --effective_batch_size 16 keeps the rows of every step"
    assert compare_runs(old, new, ["world_size"]).allowed == {"world_size"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in CHANGES if name != "label_smoothing_factor"])
def test_an_allowed_change_takes_effect(bench, name, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "hf_ext")
    trainer, watch = bench.resume(tmp_path, changes={name: CHANGES[name][0]}, allow_changed=[name])
    assert differing(watch.weights[SAVED], bench.watch.weights[SAVED]) == []
    assert trainer.state.global_step == (9 if name == "max_steps" else NUM_STEPS)
    assert differing(watch.weights[NUM_STEPS], bench.watch.weights[NUM_STEPS]) != []
    rates = logged(trainer, "learning_rate")
    assert [rates[step] for step in sorted(rates) if step > SAVED] == pytest.approx(RATES.get(name, OLD_RATES))
    moves_rows = name in ("data", "seed", "data_seed", "per_device_train_batch_size", "gradient_accumulation_steps")
    assert ("Rows come in another order from here on" in caplog.text) == moves_rows


def test_harmless_changes_go_through_and_new_intervals_are_honoured(bench, tmp_path):
    changes = {"logging_steps": 2, "save_steps": 4, "eval_steps": 5, "eval_strategy": "steps", "save_total_limit": 5}
    changes |= {"run_name": "another", "save_minutes": 60.0, "num_train_epochs": 7, "dataloader_num_workers": 1}
    trainer, watch = bench.resume(tmp_path / "resumed", changes=changes)
    assert sorted(logged(trainer, "loss")) == [1, 2, 3, 4, 6]  # every step before, every second after
    assert sorted(logged(trainer, "eval_loss")) == [5, 6]  # stock Trainer evaluates after the last step too
    assert {path.name for path in (tmp_path / "resumed").glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    _, always = bench.train(KIND, FastTrainer, tmp_path / "always", **changes)  # an evaluation draws random numbers
    assert differing(watch.weights[NUM_STEPS], always.weights[NUM_STEPS]) == []


def read(folder, model, base):
    """The model in `folder` as `from_pretrained` reads it, and the keys it found missing or unexpected."""
    if isinstance(model, PeftModel):
        fresh = type(model.get_base_model()).from_pretrained(base)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return PeftModel.from_pretrained(fresh, folder), set()
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    return loaded, {*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]}


def log_of(trainer):
    return [(entry["step"], entry["loss"], entry["learning_rate"]) for entry in trainer.state.log_history[:NUM_STEPS]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stock_run_is_continued_as_if_nobody_had_interrupted_it(bench, kind, tmp_path, caplog):
    checkpoint, whole, watch = bench.whole(kind, Trainer)
    with caplog.at_level(logging.WARNING, "hf_ext"):
        resumed, seen = bench.train(kind, FastTrainer, tmp_path, checkpoint)
    assert seen.began_at == SAVED
    assert differing(seen.weights[SAVED], watch.weights[SAVED]) == []
    assert differing(seen.weights[NUM_STEPS], watch.weights[NUM_STEPS]) == []
    assert log_of(resumed) == log_of(whole)
    assert "its files cannot be verified. Data and most arguments are not compared." in caplog.text


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_stock_trainer_continues_ours_and_of_its_own_loses_the_layer_norms_of_esm(bench, kind, tmp_path):
    for written_by in (FastTrainer, Trainer):
        checkpoint, _, watch = bench.whole(kind, written_by)
        _, seen = bench.train(kind, Trainer, tmp_path / written_by.__name__, checkpoint)
        assert seen.began_at == SAVED
        lost = differing(seen.weights[SAVED], watch.weights[SAVED])
        assert len(lost) == (LAYER_NORMS if kind in ESM_KINDS and written_by is Trainer else 0)
        assert all("LayerNorm" in name for name in lost)
        assert bool(differing(seen.weights[NUM_STEPS], watch.weights[NUM_STEPS])) == bool(lost)


@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_reads_checkpoint_and_export_with_no_key_missing(bench, kind, tmp_path):
    checkpoint, trainer, watch = bench.whole(kind, FastTrainer)
    trainer.save_model(tmp_path)
    for folder, step in ((checkpoint, SAVED), (tmp_path, NUM_STEPS)):
        loaded, wrong = read(folder, trainer.model, bench.base)
        assert wrong == set()
        found = differing(bits(loaded), watch.weights[step])
        assert [name for name in found if "original_module" not in name] == []  # what PEFT keeps of an untrained head


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_model_comes_back_whole_where_stock_trainer_has_the_layer_norms_of_the_last(bench, kind, tmp_path):
    for trainer_class in (FastTrainer, Trainer):
        trainer, watch = bench.train(kind, trainer_class, tmp_path / trainer_class.__name__, **BEST)
        assert trainer.state.best_global_step == SAVED
        lost = differing(bits(trainer.model), watch.weights[SAVED])
        assert len(lost) == (LAYER_NORMS if kind in ESM_KINDS and trainer_class is Trainer else 0)
        from_the_last = differing(bits(trainer.model), watch.weights[NUM_STEPS])
        assert from_the_last != []
        assert not set(lost) & set(from_the_last)


def without(checkpoint, folder, *names):
    """A copy of a checkpoint that lacks some files."""
    copy = folder / checkpoint.name
    shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns(*names))
    return copy


def test_what_a_stock_checkpoint_lacks_is_said_and_the_weights_still_arrive(bench, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "hf_ext")
    checkpoint, _, watch = bench.whole("ESM regression", Trainer)
    copy = without(checkpoint, tmp_path, "scheduler.pt", "rng_state.pth")
    _, seen = bench.train("ESM regression", FastTrainer, tmp_path / "run", copy)
    assert "compared, and it lacks scheduler.pt, rng_state.pth, so that training does not continue" in caplog.text
    assert seen.began_at == SAVED
    assert differing(seen.weights[SAVED], watch.weights[SAVED]) == []
    assert differing(seen.weights[NUM_STEPS], watch.weights[NUM_STEPS]) != []


@pytest.mark.parametrize(
    ("name", "words"),
    [("trainer_state.json", "no checkpoint there"), ("model.safetensors", "Can't find a valid checkpoint")],
)
def test_a_stock_checkpoint_without_state_or_weights_is_refused(bench, name, words, tmp_path):
    copy = without(bench.whole("ESM regression", Trainer)[0], tmp_path, name)
    trainer, _ = bench.make("ESM regression", FastTrainer, tmp_path / "run")
    with pytest.raises((CheckpointError, ValueError), match=words):
        trainer.train(resume_from_checkpoint=str(copy))
