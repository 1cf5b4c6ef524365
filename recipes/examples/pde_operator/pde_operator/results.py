"""Errors of a trained operator per task, and of the trivial predictions beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_ext.evaluation import MODEL, Score, judge, score_mean
from hf_ext.text import format_table

from .configuration import TASKS
from .model import relative_l2


class ErrorMetrics:
    """nRMSE of each task, `{task}_nrmse`, and their mean, `nrmse`: what an evaluation computes.

    A row's nRMSE is the L2 of its error over the L2 of its solution, as in PDEBench; a metric is its mean over rows,
    and so is `loss`, which Trainer reports: that of a row is the weighted sum over tasks.

    Args:
        tasks: in the order in which they stand in a batch.
        task_weights: of each task's loss; None: 1 each.

    Attributes:
        row_metrics: `loss` and these; early stopping compares them row by row.
    """

    def __init__(self, tasks: Sequence[str], task_weights: Sequence[float] | None = None):
        self.tasks = [*tasks]
        self.task_weights = [1.0] * len(tasks) if task_weights is None else [*task_weights]
        self.row_metrics = ("loss", *(f"{task}_nrmse" for task in tasks), "nrmse")

    def row_values(self, metric: str, predictions: np.ndarray) -> np.ndarray:
        """Returns one of `row_metrics` of each row, (n,), from what `reduce` kept, (n, tasks)."""
        if metric == "loss":
            return predictions @ np.asarray(self.task_weights, predictions.dtype)
        if metric == "nrmse":
            return predictions.mean(1)
        return predictions[:, self.tasks.index(metric.removesuffix("_nrmse"))]

    def reduce(self, logits: Any, labels: torch.Tensor) -> torch.Tensor:
        """Reduces as `preprocess_logits_for_metrics`: (B, tasks), float32, so that fields are not kept."""
        return relative_l2(logits[0] if isinstance(logits, tuple) else logits, labels)

    def __call__(self, prediction: Any) -> dict[str, float]:
        """As `compute_metrics`, from what `reduce` kept."""
        errors = np.asarray(prediction.predictions, np.float64)
        return {name: float(self.row_values(name, errors).mean()) for name in self.row_metrics if name != "loss"}


def trivial_errors(train: Mapping[str, Any], split: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Computes nRMSE of each row of predictions that learn nothing of the input.

    Args:
        train, split: task -> {"inputs", "targets"}.

    Returns:
        predictor -> (n, tasks); NaN where a predictor has nothing to say of a task.
    """
    found: dict[str, np.ndarray] = {}
    for i, (task, samples) in enumerate(split.items()):
        exact = samples["targets"].astype(np.float64)
        guesses = {"training mean": train[task]["targets"].mean(0, dtype=np.float64)[None]}
        if TASKS[task].has_time:
            guesses["persistence"] = samples["inputs"][:, None].astype(np.float64)  # the initial state
        scale = np.linalg.norm(exact.reshape(len(exact), -1), axis=1)
        for name, guess in guesses.items():
            errors = np.linalg.norm((guess - exact).reshape(len(exact), -1), axis=1) / scale
            found.setdefault(name, np.full((len(exact), len(split)), np.nan))[:, i] = errors
    return found


def score_split(errors: np.ndarray, trivial: Mapping[str, np.ndarray], tasks: Sequence[str], seed: int) -> dict:
    """Scores of the model and of trivial predictions on one split.

    Args:
        errors: (n, tasks), nRMSE of each row.
        trivial: predictor -> (n, tasks), on the same rows; NaN where a predictor has nothing to say of a task.
        tasks: names.
        seed: of the bootstrap over rows.

    Returns:
        `num_rows`, `scores` (predictor -> metric -> value with its interval), `factors` (task -> by how much the
        model's nRMSE is below the best trivial one), `verdict`.
    """
    means = [{name: _last(found[:, i]) for name, found in trivial.items()} for i in range(len(tasks))]
    best = {task: min(mean, key=mean.__getitem__) for task, mean in zip(tasks, means)}
    rival = np.stack([trivial[best[task]][:, i] for i, task in enumerate(tasks)], axis=1)
    named = " and ".join(dict.fromkeys(f"the {name}" for name in best.values()))
    judged = {MODEL: errors.mean(1), named: rival.mean(1)}
    return {
        "num_rows": len(errors),
        "scores": {name: _scores(found, tasks, seed) for name, found in {MODEL: errors, **trivial}.items()},
        "baselines": {name: {} for name in trivial},
        "factors": {task: float(rival[:, i].mean() / errors[:, i].mean()) for i, task in enumerate(tasks)},
        "verdict": judge(np.ones(len(errors)), judged, metric="nrmse", seed=seed).as_dict(),
    }


def _last(errors: np.ndarray) -> float:
    """Returns the mean, for a minimum that NaN never is."""
    return float(errors.mean()) if np.isfinite(errors).all() else np.inf


def _scores(errors: np.ndarray, tasks: Sequence[str], seed: int) -> dict[str, Score]:
    columns = [*errors.T, errors.mean(1)]  # of one task its mean has no name of its own
    found = {name: values for name, values in zip(score_names(tasks), columns) if np.isfinite(values).all()}
    return {name: score_mean(values, seed=seed) for name, values in found.items()}


def score_names(tasks: Sequence[str]) -> list[str]:
    """Names of the scores that a run of these tasks ends with."""
    return [*(f"{task}_nrmse" for task in tasks), *(["nrmse"] if len(tasks) > 1 else [])]


def format_scores(found: Mapping[str, Any]) -> str:
    """Formats the verdict, a table of `score_split`, and how far the model is below the best trivial prediction."""
    scores = found["scores"]
    metrics = [*scores[MODEL]]
    rows = [
        [name, *(f"{each[m]['value']:.4f}" if m in each else "-" for m in metrics)] for name, each in scores.items()
    ]
    factors = ", ".join(f"{task} {factor:.1f} times" for task, factor in found["factors"].items())
    return f"{found['verdict']['text']}\n\n{format_table(rows, ['', *metrics])}\n\nBelow the best of these: {factors}."
