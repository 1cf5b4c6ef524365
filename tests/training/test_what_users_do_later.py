"""What users assign, return or call after a trainer was made counts as it does in Trainer."""

import copy
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from continued_runs import MODEL, SETTINGS, Collator
from token_rows import make_number_rows as make_rows
from train_until_stopped import Case
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_ext.errors import TrainingStopped
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

ALONE = {"dataloader_num_workers": 0}


def make(folder, cls=FastTrainer, callbacks=(), **given):
    args = FastTrainingArguments(output_dir=str(folder), **{**SETTINGS, **ALONE, **given})
    rows = make_rows(8, 1), make_rows(4, 2) if "eval_strategy" in given else None
    return cls(copy.deepcopy(MODEL), args, Collator(Case()), *rows, callbacks=list(callbacks))


def make_other(folder, **given):
    # Made before the trainer: every TrainingArguments makes accelerate's shared state anew (transformers 5.23).
    return FastTrainingArguments(**{**SETTINGS, **ALONE, "output_dir": str(folder), **given})


def test_other_arguments_that_are_assigned_count_everywhere(tmp_path):
    other = make_other(tmp_path, save_only_model=True)
    trainer = make(tmp_path, save_steps=4)
    before, trainer.args = trainer.args, other
    assert trainer.args is other
    assert not before.save_only_model
    trainer.train()
    trainer.end()
    assert not (tmp_path / "checkpoint-2" / "optimizer.pt").exists()
    assert json.loads((tmp_path / "checkpoint-2" / "training_args.json").read_text())["save_only_model"]


def test_a_run_that_is_to_continue_by_other_arguments_continues(tmp_path):
    other = make_other(tmp_path, resume="auto", num_train_epochs=3, allow_changed=["all"])
    trainer = make(tmp_path)
    trainer.train()
    trainer.args = other
    trainer.train()
    assert not list(tmp_path.glob("previous-*"))
    assert trainer.state.global_step == 12
    trainer.end()


def test_another_output_folder_counts_from_the_next_run_on(tmp_path):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    other = make_other(third, save_steps=8, save_minutes=1e6, local_checkpoint_dir=str(tmp_path / "local"))
    trainer = make(tmp_path / "never", save_steps=4, save_minutes=1e6)  # which keeps records: something is asked for
    written = []
    for folder in (first, second, third):
        if folder == third:
            trainer.args = other
        else:
            trainer.args.output_dir = str(folder)
        trainer.train()
        trainer.save_state()
        assert all(path.stat().st_mtime_ns == then for path, then in written)  # earlier stages stay as they are
        written += [(path, path.stat().st_mtime_ns) for path in folder.rglob("*")]
        assert {"plan.json", "throughput.json", "trainer_state.json"} < {path.name for path in folder.iterdir()}
    trainer.end()
    found = {folder.name: {path.name for path in folder.glob("*checkpoint-*")} for folder in tmp_path.iterdir()}
    saved = {"checkpoint-4", "checkpoint-8"}
    assert found == {"never": set(), "first": saved, "second": saved, "third": {"checkpoint-8"}, "local": set()}
    assert len([*tmp_path.glob("local/third-*/checkpoint-8")]) == 1


def test_a_bound_of_gradients_below_0_clips_nothing_as_0_does(tmp_path):
    losses = []
    for bound in (0, -1, 0.1):
        trainer = make(tmp_path / str(bound), max_grad_norm=bound, save_strategy="no")
        trainer.train()
        trainer.end()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1] != losses[2]


class Asks(FastTrainer):
    """As a class between that needs a loader to make its schedule."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_batches = len(self.get_train_dataloader())


class Behind(FastTrainer.__base__):
    """Another class of Trainer's, behind FastTrainer, whose constructor uses what it has."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_batches = len(self.get_train_dataloader())


def test_a_constructor_behind_ours_can_use_the_loaders(tmp_path):
    both = type("Both", (FastTrainer, Behind), {})
    for cls in (Asks, both):
        trainer = make(tmp_path / cls.__name__, cls)
        assert trainer.num_batches == 4
        trainer.close()


class StopsInEvaluation(TrainerCallback):
    """Is signalled in an evaluation, and returns a control object of its own, as Trainer allows."""

    def __init__(self):
        self.left = 1

    def on_prediction_step(self, args, state, control, **kwargs):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return copy.copy(control)


def test_a_stop_in_an_evaluation_is_not_lost_with_a_control_object(tmp_path):
    given = {"eval_strategy": "steps", "eval_steps": 2}
    whole = make(tmp_path / "whole", **given)
    whole.train()
    trainer = make(tmp_path / "stopped", callbacks=[StopsInEvaluation()], **given)
    with pytest.raises(TrainingStopped, match="checkpoint-2"):
        trainer.train()
    assert trainer.state.global_step == 2
    resumed = make(tmp_path / "stopped", resume="auto", **given)
    resumed.train()
    weights = zip(resumed.model.state_dict().values(), whole.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    for one in (whole, trainer, resumed):
        one.end()


class SavesAtStepEnd(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.trainer._save_checkpoint(self.trainer.model, None)


def test_what_a_callback_saves_at_the_end_of_a_step_stands_after_it(tmp_path):
    saves = SavesAtStepEnd()
    rows = make_rows(16, 1).to_iterable_dataset()
    args = FastTrainingArguments(output_dir=str(tmp_path), **{**SETTINGS, **ALONE, "max_steps": 4, "save_steps": 100})
    saves.trainer = FastTrainer(copy.deepcopy(MODEL), args, Collator(Case()), rows, callbacks=[saves])
    saves.trainer.train()
    saves.trainer.end()
    progress = json.loads(Path(tmp_path, "checkpoint-2", "progress.json").read_text())
    assert progress["data_position"]["rows"] == 4


class Early(FastTrainer):
    """Assigns before Trainer's constructor what that will assign."""

    def __init__(self, model, args, *others, **given):
        self.args, self.compute_loss_func, self.state = args, None, None
        super().__init__(model, args, *others, **given)


def test_a_subclass_may_assign_early(tmp_path):
    losses = []
    for folder, made in ((tmp_path / "plain", FastTrainer), (tmp_path / "own", Early)):
        trainer = make(folder, made, eval_strategy="steps", eval_steps=2)
        trainer.train()
        trainer.end()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]


def test_private_names_of_ours_are_told_from_trainers(tmp_path):
    trainer = make(tmp_path)
    stock = Trainer(copy.deepcopy(MODEL), TrainingArguments(str(tmp_path / "stock"), use_cpu=True, report_to="none"))
    added = {*vars(trainer), *vars(FastTrainer)} - {*vars(stock), *dir(Trainer)}
    assert len(added) > 40
    assert [name for name in added if name.startswith("_") and not name.startswith("_ext_")] == []
    trainer.end()
