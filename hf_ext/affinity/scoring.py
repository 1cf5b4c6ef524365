"""Scores that can be believed: intervals, trivial baselines beside them, alarms for collapsed predictions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import EvalPrediction

from ..data.columns import read_columns
from ..embeddings.dataset import join_parts
from ..evaluation import collapse_report, score_predictions
from ..evaluation.baselines import ConstantBaseline, RidgeBaseline
from ..evaluation.metrics import mae, pearson, r2, rmse, spearman
from ..reporting.tables import format_table

RIDGE_ROWS = 50_000  # training rows that the ridge baseline sees at most
_SHOWN = ("spearman", "pearson", "rmse", "mae", "r2")


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """For `Trainer`: metrics over all rows at once, undefined ones as nan, and the number of distinct predictions."""
    values, labels = np.asarray(prediction.predictions).reshape(-1), np.asarray(_labels(prediction)).reshape(-1)
    functions = {"spearman": spearman, "pearson": pearson, "rmse": rmse, "mae": mae, "r2": r2}
    metrics = {name: float(function(values, labels).value) for name, function in functions.items()}
    return {**metrics, "num_distinct": float(len(np.unique(values)))}


def _labels(prediction: EvalPrediction) -> Any:
    labels = prediction.label_ids
    return labels[0] if isinstance(labels, tuple) else labels


@dataclass
class SplitScores:
    """A split's predictions, and the scores of the model and of its baselines on it."""

    predictions: np.ndarray
    labels: np.ndarray
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    collapse: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"num_rows": len(self.labels), "scores": self.scores, "collapse": self.collapse}

    def table(self) -> str:
        """Scores as text: a row per predictor, value and interval per metric."""
        rows = [[name, *(_cell(scores.get(metric)) for metric in self._shown)] for name, scores in self.scores.items()]
        return format_table(rows, ["", *self._shown])

    @property
    def _shown(self) -> list[str]:
        extra = [name for name in ("recall", "precision", "per_group_spearman") if name in self.scores["model"]]
        return [*_SHOWN, *extra]


def _cell(score: dict[str, Any] | None) -> str:
    if not score or score["value"] is None:
        return "undefined"
    if score["low"] is None:
        return f"{score['value']:.3f}"
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


def score_split(trainer: Any, splits: Any, name: str, threshold: float | None, group_column: str | None) -> SplitScores:
    """Predicts split `name` and scores the model, the training mean, and, of frozen encoders, ridge on the embeddings.

    Args:
        trainer: a `FastTrainer` whose model is trained.
        splits: train, validation and test; the baselines are fitted on train, ridge's penalty on validation.
        threshold: label units; None leaves recall, precision and F1 out.
        group_column: column for per-group Spearman, or None; streams go without.

    Cost: predictions; ridge on up to 50,000 rows; 1,000 bootstrap resamples.
    """
    output = trainer.predict(splits[name])
    predictions, labels = (
        np.asarray(output.predictions, np.float64).reshape(-1),
        np.asarray(_labels(output), np.float64),
    )
    sized = hasattr(splits[name], "__len__")
    groups = [row[0] for row in read_columns(splits[name], [group_column])] if group_column and sized else None
    predictors = {"model": predictions}
    if hasattr(splits["train"], "__len__"):
        predictors.update(_baseline_predictions(trainer, splits, name))
    result = SplitScores(predictions, labels, collapse=collapse_report(predictions, labels))
    for predictor, values in predictors.items():
        scores = score_predictions(values, labels, groups=groups, threshold=threshold or 0.0, seed=trainer.args.seed)
        hidden = () if threshold is not None else ("recall", "precision", "f1")
        result.scores[predictor] = {metric: score for metric, score in scores.items() if metric not in hidden}
    return result


def _baseline_predictions(trainer: Any, splits: Any, name: str) -> dict[str, np.ndarray]:
    train = splits["train"]
    constant = ConstantBaseline().fit(_label_array(train))
    baselines = {"training mean": constant.predict(len(splits[name]))}
    if len(trainer.model.frozen_inputs) < len(trainer.model.embedding_sizes):
        return baselines  # embeddings of an encoder that trained are the model's own work
    if len(train) > RIDGE_ROWS:
        chosen = np.random.default_rng(trainer.args.seed).permutation(len(train))[:RIDGE_ROWS]
        train = train.select(np.sort(chosen))
    ridge = RidgeBaseline().fit(
        pooled_features(trainer, train),
        _label_array(train),
        pooled_features(trainer, splits["validation"]),
        _label_array(splits["validation"]),
    )
    return {**baselines, "ridge on embeddings": ridge.predict(pooled_features(trainer, splits[name]))}


def _label_array(split: Any) -> np.ndarray:
    return np.asarray(split["label"][:], np.float64)


def pooled_features(trainer: Any, dataset: Any) -> np.ndarray:
    """The embeddings that the head sees, one row per row of `dataset`: (n, sum of widths), float32.

    Cost: with the embedding cache a look-up; otherwise each distinct sequence is encoded once.
    """
    blocks = []
    for name in trainer.model.embedding_sizes:
        rows = [join_parts(parts) for parts in read_columns(dataset, trainer.data_collator.columns[name])]
        distinct = sorted(set(rows), key=lambda sequence: (len(sequence), sequence))
        values = trainer.encode_distinct(name, distinct)
        position = {sequence: i for i, sequence in enumerate(distinct)}
        blocks.append(values[[position[row] for row in rows]].numpy())
    return np.concatenate(blocks, axis=1)
