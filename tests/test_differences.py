"""What differs from Trainer (docs/library.md) and is tested nowhere else."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny_classifier import ROWS, make_args, make_model
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from hf_ext.errors import CheckpointError
from hf_ext.trainer import FastTrainer


def make(folder: Any, cls: type = FastTrainer, rows: Any = ROWS, model: Any = None, **given: Any) -> Any:
    args_cls = {} if issubclass(cls, FastTrainer) else {"cls": TrainingArguments}
    optimizers, compute = given.pop("optimizers", (None, None)), given.pop("compute_metrics", None)
    args = make_args(folder, **args_cls, **given)
    data = {"train_dataset": rows, "eval_dataset": ROWS}
    return cls(model or make_model(), args, **data, compute_metrics=compute, optimizers=optimizers)


def test_the_loader_of_a_stream_is_ours(tmp_path):
    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    assert make(tmp_path, Trainer, rows=stream).get_train_dataloader().dataset.__class__ is stream.__class__
    assert make(tmp_path, rows=stream).get_train_dataloader().dataset.__class__ is not stream.__class__


@pytest.mark.parametrize(("cls", "kept"), [(Trainer, {2}), (FastTrainer, {2, 4})])
def test_a_limit_of_one_keeps_the_best_and_the_newest(cls, kept, tmp_path):
    given = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    trainer = make(tmp_path, cls, metric_for_best_model="loss", greater_is_better=False, **given)
    trainer.train()
    assert trainer.state.best_global_step == 2
    assert {int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")} == kept


def test_links_in_a_checkpoint_are_refused_or_left_alone(tmp_path):
    class Links(FastTrainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            os.symlink(__file__, Path(output_dir) / "link")

    with pytest.raises(CheckpointError, match="no links or devices"):
        make(tmp_path / "before", Links).train()

    class LinksLater(FastTrainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            os.symlink(__file__, Path(self.args.output_dir, f"checkpoint-{self.state.global_step}", "link"))

    make(tmp_path / "after", LinksLater).train()
    assert (tmp_path / "after" / "checkpoint-4" / "link").is_symlink()
    assert "link" not in json.loads((tmp_path / "after" / "checkpoint-4" / "manifest.json").read_text())["files"]


def test_ours_come_beside_the_callbacks_of_trainer(tmp_path):
    names = {
        cls: [type(c).__name__ for c in make(tmp_path, cls).callback_handler.callbacks]
        for cls in (Trainer, FastTrainer)
    }
    assert names[Trainer][0] == DefaultFlowCallback.__name__
    assert DefaultFlowCallback.__name__ in names[FastTrainer]
    assert len(names[Trainer]) == 2
    assert len(names[FastTrainer]) > 8


class Counted(torch.utils.data.Dataset):
    """Rows that count how often they are read."""

    def __init__(self, num_rows: int):
        self.num_rows, self.num_reads = num_rows, 0

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.num_reads += 1
        return ROWS[i % len(ROWS)]


def test_reads_beside_batches_do_not_grow_with_the_data(tmp_path):
    num_reads = {}
    for cls, size in ((Trainer, 1000), (FastTrainer, 1000), (FastTrainer, 50_000)):
        rows = Counted(size)
        make(tmp_path, cls, rows=rows, save_strategy="no", max_steps=2).train()
        num_reads[cls.__name__, size] = rows.num_reads
    assert num_reads["Trainer", 1000] <= 12
    assert num_reads["FastTrainer", 1000] == num_reads["FastTrainer", 50_000] <= 200


def test_logs_hold_what_trainers_hold_and_rates(tmp_path):
    logs = {}
    for cls in (Trainer, FastTrainer):
        trainer = make(tmp_path / cls.__name__, cls, save_strategy="no")
        trainer.train()
        logs[cls] = [set(entry) for entry in trainer.state.log_history]
    assert len(logs[Trainer]) == len(logs[FastTrainer]) == 5
    assert all(theirs <= ours for theirs, ours in zip(logs[Trainer], logs[FastTrainer]))
    assert "peak_memory_gib" in logs[FastTrainer][0]


def test_a_class_behind_ours_is_called_where_ours_goes_on(tmp_path):
    called = []

    class Library(Trainer):
        def _save_checkpoint(self, model, trial):
            called.append(self.state.global_step)
            super()._save_checkpoint(model, trial)

    make(tmp_path / "behind", type("Behind", (FastTrainer, Library), {})).train()
    assert called == [2, 4]
    called.clear()
    make(tmp_path / "before", type("Before", (Library, FastTrainer), {})).train()
    assert called == [2, 4]


@pytest.mark.parametrize(("cls", "num_trained"), [(Trainer, 1), (FastTrainer, 0)])
def test_a_run_that_had_ended_is_not_trained_on(cls, num_trained, tmp_path):
    make(tmp_path, cls, max_steps=3, save_steps=3).train()
    again = make(tmp_path, cls, max_steps=3, save_steps=3)
    trained = []
    step, again.training_step = again.training_step, lambda *args, **kwargs: trained.append(1) or step(*args, **kwargs)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(trained) == num_trained
