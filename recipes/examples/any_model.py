"""Runs of any model that a Trainer can train: a held-out score beside a trivial baseline.

What the scripts of `recipes/examples` share. Nothing here knows what the model is: a classifier of text or images is
judged by `ClassifierTask`, a causal language model by `judge_next_tokens`.

This is no program. Run one of the scripts beside it: text_classifier.py, image_classifier.py or causal_lm.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from torch.nn import functional
from transformers import EvalPrediction

from hf_ext import Run, Task
from hf_ext.arguments import check_metric_name
from hf_ext.errors import ArgumentError
from hf_ext.evaluation import MODEL, judge
from hf_ext.masked_lm import compute_metrics, sum_rows
from hf_ext.models import require_base
from hf_ext.tasks import check_scored
from hf_ext.text import format_table

CLASS_METRICS = ("loss", "accuracy")  # what an evaluation with `compute_accuracy` computes
TOKEN_METRICS = ("loss", "perplexity", "accuracy")  # with `compute_next_tokens`
DEFAULTS: dict[str, Any] = {
    "preset": "max_speed",
    "warmup_steps": 0.1,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 128,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "resume": "auto",
    "logging_steps": 20,
    "report_to": "none",
}


@dataclass
class AnyModelArguments:
    """How much data an example generates, and which Trainer it uses.

    Raises:
        ArgumentError: fewer than two rows to train on, or none to score.
    """

    _argument_group_name = "data"  # in --help
    _first_flags = (
        *("num_rows", "num_test_rows", "stock_trainer", "preset", "without", "max_steps", "max_tokens_per_batch"),
        *("eval_strategy", "metric_for_best_model"),
        *("output_dir", "num_train_epochs", "learning_rate", "per_device_train_batch_size", "seed", "report_to"),
        *("resume", "max_hours", "push_to_hub", "hub_model_id"),
    )

    num_rows: int = field(default=4000, metadata={"help": "Rows to generate for training."})
    num_test_rows: int = field(default=1000, metadata={"help": "Rows to generate for the held-out score."})
    stock_trainer: bool = field(
        default=False,
        metadata={"help": "Train with transformers.Trainer itself, the control that comparisons measure against."},
    )

    def __post_init__(self) -> None:
        for name, least in (("num_rows", 2), ("num_test_rows", 1)):
            if getattr(self, name) < least:
                raise ArgumentError(f"{name}={getattr(self, name)}: must be at least {least}.")


def data_seed(args: Any) -> int:
    """Of generated rows: `args.data_seed`, or `args.seed` where it is None."""
    return int(args.seed if args.data_seed is None else args.data_seed)


class AnyModelTask(Task):
    """A run on generated rows; what it trains is `load`, `build` and `judge` of an example.

    Attributes:
        metrics: what an evaluation computes.
    """

    name = "any_model"
    arguments = (AnyModelArguments,)
    metrics: ClassVar[tuple[str, ...]]
    has_card = False  # those of hf_ext are of protein models

    def check(self, run: Run) -> None:
        """Refuses a metric that no evaluation computes, and adapters beside weights that are kept nowhere."""
        check_metric_name(run.args.metric_for_best_model, self.metrics)
        if run.args.use_peft:
            require_base(None)

    def judge(self, run: Run, trainer: Any, data: Any) -> dict[str, Any]:
        """Scores held-out rows."""
        raise NotImplementedError

    def score(self, run: Run, trainer: Any, trained: Any, data: Any) -> dict[str, Any]:
        """What `judge` finds, said in the log."""
        found = self.judge(run, trainer, data)
        sizes = run.model_args
        run.log.info("\n%s\n\n%s\n", found["verdict"]["text"], format_scores(found["test"]["scores"]))
        return {"data": {"sizes": {"train": sizes.num_rows, "test": sizes.num_test_rows}}, **found}


class ClassifierTask(AnyModelTask):
    """Of a classifier, whose `load` gives all rows with `labels`, those of training first."""

    metrics = CLASS_METRICS

    def split(self, run: Run, rows: Dataset) -> dict[str, Any]:
        """What Trainer takes of the rows, and how evaluations score them."""
        num_rows = run.model_args.num_rows
        return {
            "train_dataset": rows.select(range(num_rows)),
            "eval_dataset": rows.select(range(num_rows, len(rows))),
            "preprocess_logits_for_metrics": sum_classes,  # 12 bytes a row
            "compute_metrics": compute_accuracy,
        }

    def judge(self, run: Run, trainer: Any, data: Dataset) -> dict[str, Any]:
        """Accuracy on held-out rows, beside that of always naming the class that is most frequent in training.

        Raises:
            NotFiniteError: a loss is NaN or infinite.
        """
        output = trainer.predict(trainer.eval_dataset)
        check_scored(output.predictions, "held-out")
        right = np.asarray(output.predictions)[:, 1]
        frequent = output.label_ids == np.bincount(data["labels"][: run.model_args.num_rows]).argmax()
        judged = {MODEL: right, "the most frequent class": frequent}
        verdict = judge(np.ones(len(right)), judged, metric="accuracy", seed=run.args.seed).as_dict()
        scores = {"model": {"accuracy": right.mean()}, "most frequent class": {"accuracy": frequent.mean()}}
        return {"verdict": verdict, "test": _as_test(len(right), scores)}


def sum_classes(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """As `preprocess_logits_for_metrics` of a classifier: cross-entropy, whether right, and 1 per row: (n, 3), float32.

    Early stopping compares evaluations by these, row by row.
    """
    logits = (logits[0] if isinstance(logits, tuple) else logits).float()
    losses = functional.cross_entropy(logits, labels, reduction="none")
    return torch.stack([losses, (logits.argmax(-1) == labels).float(), torch.ones_like(losses)], dim=1)


def compute_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """For Trainer, from `sum_classes`: the share of rows whose largest logit is that of their label."""
    return {"accuracy": float(np.asarray(prediction.predictions)[:, 1].mean())}


def compute_next_tokens(prediction: EvalPrediction) -> dict[str, float]:
    """For Trainer, from `sum_next_tokens`: perplexity and accuracy over all tokens but the first of each row."""
    scores = compute_metrics(prediction)
    return {name: scores[name] for name in ("perplexity", "accuracy")}


def sum_next_tokens(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """As `preprocess_logits_for_metrics` of a causal language model: `sum_rows` of next tokens, (n, 3), float32."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    return sum_rows(logits[:, :-1], labels[:, 1:])


class BigramTable:
    """Predicts each token from the one before it, as often as the two followed each other in training.

    Args:
        counts: (vocabulary, vocabulary), how often the second token followed the first.
    """

    def __init__(self, counts: np.ndarray):
        smoothed = counts + 1.0
        self.log_probabilities = np.log(smoothed / smoothed.sum(1, keepdims=True))

    @classmethod
    def fit(cls, rows: Sequence[Sequence[int]], num_tokens: int) -> BigramTable:
        """Counts pairs in rows of token ids below `num_tokens`."""
        counts = np.zeros((num_tokens, num_tokens))
        for row in rows:
            np.add.at(counts, (row[:-1], row[1:]), 1)
        return cls(counts)

    def score(self, labels: np.ndarray) -> np.ndarray:
        """`sum_next_tokens` of the table: (n, 3), float64; `labels` (n, tokens), -100 at the end of shorter rows."""
        before = labels[:, :-1]
        after = labels[:, 1:]
        chosen = after >= 0
        found = self.log_probabilities[np.where(chosen, before, 0)]  # (n, tokens - 1, vocabulary)
        likely = np.take_along_axis(found, np.where(chosen, after, 0)[..., None], -1)[..., 0]
        right = (found.argmax(-1) == after) & chosen
        return np.stack([-(likely * chosen).sum(1), right.sum(1), chosen.sum(1)], 1)


def judge_next_tokens(output: Any, table: BigramTable, seed: int) -> dict[str, Any]:
    """Loss per token on held-out rows, beside that of a table of which token follows which.

    Args:
        output: what `trainer.predict` returned with `sum_next_tokens`: sums (n, 3) and labels (n, tokens).

    Returns:
        {"verdict": ..., "test": scores by predictor}, as reports read them.
    """
    check_scored(output.predictions, "held-out")
    both = {"model": np.asarray(output.predictions, np.float64), "bigram table": table.score(output.label_ids)}
    losses = {MODEL: both["model"][:, 0], "the bigram table": both["bigram table"][:, 0]}
    verdict = judge(both["model"][:, 2], losses, metric="token_loss", seed=seed).as_dict()
    scores = {name: compute_next_tokens(EvalPrediction(sums, output.label_ids)) for name, sums in both.items()}
    return {"verdict": verdict, "test": _as_test(len(output.label_ids), scores)}


def _as_test(num_rows: int, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    entries = {name: {m: {"value": float(v)} for m, v in both.items()} for name, both in scores.items()}
    return {"num_rows": num_rows, "scores": entries, "baselines": {name: {} for name in entries if name != "model"}}


def format_scores(scores: Mapping[str, Any]) -> str:
    """A table: predictors, and their scores."""
    metrics = list(scores["model"])
    rows = [[name, *(entry[metric]["value"] for metric in metrics)] for name, entry in scores.items()]
    return format_table(rows, ["held-out rows", *metrics])


if __name__ == "__main__":
    raise SystemExit(__doc__)  # with status 1: it has done nothing
