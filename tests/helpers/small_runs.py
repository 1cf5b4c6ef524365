"""Runs of six steps on a small ESM that predicts a number, of FastTrainer and of stock Trainer."""

import os
from pathlib import Path
from typing import Any

from datasets import Dataset
from miniature_esm import make_esm
from token_rows import make_number_rows, stack_rows
from transformers import EsmForSequenceClassification, Trainer, TrainingArguments

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

SAVED = (2, 4, 6)
SETTINGS: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
SETTINGS |= {
    "per_device_train_batch_size": 2,
    "max_steps": 6,
    "save_steps": 2,
    "logging_steps": 4,
    "learning_rate": 1e-2,
}
# The highest loss counts as best: the first evaluation's.
SETTINGS |= {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "greater_is_better": True}


def small_esm(seed: int = 0) -> EsmForSequenceClassification:
    return make_esm(EsmForSequenceClassification, seed, num_hidden_layers=2, num_labels=1)


def make_rows(num: int = 12) -> Dataset:
    return make_number_rows(num)


def make_trainer(folder: Path, cls: type[Trainer] = FastTrainer, model: Any = None, **given: Any) -> Trainer:
    """A trainer; `given` are further arguments."""
    args_class = FastTrainingArguments if issubclass(cls, FastTrainer) else TrainingArguments
    args = args_class(output_dir=str(folder), **{**SETTINGS, **given})
    return cls(model or small_esm(), args, stack_rows, make_rows(), make_rows(6))


def contents(folder: Path) -> dict[str, Any]:
    """Everything below a folder: bytes of files, targets of links, times of change."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        data = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        found[path.relative_to(folder).as_posix()] = data, path.lstat().st_mtime_ns
    return found
