"""Runs whose predictions are written beforehand, one column per step, and cost milliseconds."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from inside import compute_metrics
from torch import nn
from transformers import TrainerCallback

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

NUM_ROWS = 200
LABELS = np.random.default_rng(0).normal(8, 1.5, NUM_ROWS)
NOISE = np.random.default_rng(1).normal(0, 1.5, (30, NUM_ROWS))


class Scripted(nn.Module):
    """Predicts the `n`-th number of a row's `script` after `n` optimizer steps; plain SGD with a rate of 1 counts."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.zeros(()))

    def forward(self, script: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        column = min(round(self.step.item()), script.shape[1] - 1)
        return {"loss": -self.step, "logits": script[:, column]}


class Kill(TrainerCallback):
    """Raises at the beginning of the step after `step`."""

    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def model_of(error: float, number: int = 0) -> np.ndarray:
    """Predictions with `error` times the labels' own spread of noise; another `number` makes other errors."""
    return LABELS + error * NOISE[number]


def make_script(*predictions: np.ndarray, labels: np.ndarray = LABELS) -> Dataset:
    """An evaluation set on which the model makes these predictions after 1, 2, 3, ... steps."""
    columns = np.stack([predictions[0], *predictions], axis=1)
    return Dataset.from_dict({"script": columns.tolist(), "labels": labels.tolist()}).with_format("torch")


def make_trainer(folder: Path | str, rows: Any, *callbacks: TrainerCallback, **given: Any) -> FastTrainer:
    """A run of ten steps that evaluates after each of them.

    Args:
        rows: from `make_script`, or a dict of such.
        given: training arguments, and `metrics` or `kind` for another `compute_metrics` or class.
    """
    metrics, kind = given.pop("metrics", compute_metrics), given.pop("kind", FastTrainer)
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": NUM_ROWS,
        "max_steps": 10,
        "learning_rate": 1.0,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "no",
        "metric_for_best_model": "spearman",
        **given,
    }
    train = next(iter(rows.values())) if isinstance(rows, dict) else rows
    return kind(
        Scripted(),
        FastTrainingArguments(**settings),
        train_dataset=train,
        eval_dataset=rows,
        compute_metrics=metrics,
        callbacks=list(callbacks),
    )
