"""Tiny models whose evaluations are counted: regression on whole sequences, and masked tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from miniature_esm import NO_DROPOUT, make_narrow_esm
from token_rows import IGNORED, pad_rows
from transformers import EsmForMaskedLM, EsmForSequenceClassification

from hf_ext.masked_lm import sum_rows
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments


def make_model(task: str = "regression") -> torch.nn.Module:
    """Tiny ESM with random weights, the same every time."""
    return make_narrow_esm(EsmForMaskedLM if task == "masked" else EsmForSequenceClassification, **NO_DROPOUT)


def make_rows(num: int, task: str = "regression", seed: int = 1) -> Dataset:
    """Rows of 3 to 20 tokens with their numbers; of masked tokens, later rows have fewer."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(3, 21, (num,), generator=generator).tolist()
    ids = [torch.randint(4, 23, (size,), generator=generator).tolist() for size in sizes]
    labels: list[Any] = [float(row[0]) + i / 100 for i, row in enumerate(ids)]
    if task == "masked":
        labels = [
            [v if t == 0 or t % (i % 7 + 1) == 0 else IGNORED for t, v in enumerate(r)] for i, r in enumerate(ids)
        ]
    groups = [f"group {i % 3}" for i in range(num)]
    return Dataset.from_dict({"row": list(range(num)), "input_ids": ids, "labels": labels, "group": groups})


class Collator:
    """Pads; `rows` are the numbers of the rows it was given, batch by batch."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.rows.append([row["row"] for row in rows])
        return pad_rows(rows)


def make_trainer(folder: Path, evals: Any, task: str = "regression", trainer_cls: Any = FastTrainer, **given) -> Any:
    """A trainer of 16 rows in 4 batches; other arguments go to `FastTrainingArguments`, or to the trainer."""
    own = {name: given.pop(name) for name in ("compute_metrics", "callbacks") if name in given}
    fixed = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    fixed |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-2, "seed": 3}
    fixed |= {"eval_strategy": "epoch", "save_strategy": "no", "logging_strategy": "no", "num_train_epochs": 1}
    args_cls = given.pop("args_cls", FastTrainingArguments)
    if task == "masked" and "compute_metrics" in own:
        own["preprocess_logits_for_metrics"] = sum_rows
    args = args_cls(output_dir=str(folder), **{**fixed, **given})
    return trainer_cls(make_model(task), args, Collator(), make_rows(16, task), evals, **own)


class Scripted:
    """`compute_metrics` whose score was written beforehand: of the subset by its size, of all rows by theirs."""

    def __init__(self, **scores: list[float]):
        self.scores = {int(name.removeprefix("of_")): list(values) for name, values in scores.items()}
        self.num_rows: list[int] = []

    def __call__(self, prediction: Any) -> dict[str, float]:
        num_rows = len(prediction.predictions)
        self.num_rows.append(num_rows)
        return {"score": self.scores[num_rows].pop(0) if self.scores.get(num_rows) else 0.0}


def count(prediction: Any) -> dict[str, float]:
    """`compute_metrics`: over all rows at once, in an order that matters."""
    predictions = np.asarray(prediction.predictions, np.float64)
    labels = np.where(prediction.label_ids == IGNORED, 0.0, np.asarray(prediction.label_ids, np.float64))
    places = np.arange(len(predictions))
    return {
        "rows": float(len(predictions)),
        "error": float(np.abs(predictions.reshape(len(predictions), -1).mean(1)).mean()),
        "order": float((labels.reshape(len(labels), -1).sum(1) * places).mean()),
    }


def evaluations(trainer: Any, full: bool | None = None) -> list[dict[str, float]]:
    """Logged evaluations; `full`: only those with, or without, the metrics of all rows."""
    logs = [log for log in trainer.state.log_history if any(key.startswith("eval_") for key in log)]
    return [log for log in logs if full in (None, any(key.startswith("eval_full_") for key in log))]


def evaluated_epochs(trainer: Any) -> list[float]:
    """Epochs after which the run was evaluated."""
    return [log["epoch"] for log in evaluations(trainer)]
