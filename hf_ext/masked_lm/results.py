"""Scores over masked residues, and of the baseline beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import EvalPrediction

from ..data import RARE, STANDARD, UNKNOWN_RESIDUE, MaskedLMCollator, read_columns
from ..evaluation import MODEL, judge
from ..files import Json
from ..labels import UNKNOWN, Array
from ..tasks import check_scored
from ..text import format_table

if TYPE_CHECKING:
    from ..trainer import FastTrainer

SCORES = ("token_loss", "perplexity", "accuracy", "num_tokens")  # that a run ends with
EVALUATION_METRICS = ("loss", *SCORES)  # what an evaluation computes
STREAM_ROWS = 10_000  # of a training stream, for the unigram baseline


def sum_rows(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Sums per row the cross-entropy, the number of right predictions and of predictions: (n, 3), float32.

    As `preprocess_logits_for_metrics`, so that evaluation keeps 12 bytes a row and not all logits.
    """
    if isinstance(logits, tuple):
        logits = logits[0]
    logits = logits.float()
    losses = functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=UNKNOWN, reduction="none")
    chosen = labels != UNKNOWN
    right = (logits.argmax(-1) == labels) & chosen
    return torch.stack([losses.sum(1), right.sum(1).float(), chosen.sum(1).float()], dim=1)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Computes scores for `Trainer` from `sum_rows`: means over all masked residues; `token_loss` in nats, of which the
    perplexity is the exponential."""
    loss, right, num = np.asarray(prediction.predictions, np.float64).sum(0)
    return {
        "token_loss": float(loss / num),
        "perplexity": float(np.exp(loss / num)),
        "accuracy": float(right / num),
        "num_tokens": int(num),
    }


class UnigramBaseline:
    """Predicts every masked residue from how often residues occur in training, whatever stands around it.

    Args:
        counts: (vocabulary,), training residues per token id.
        residue_ids: the ids that residues can have; each counts once more, so that none is impossible.
    """

    def __init__(self, counts: Array, residue_ids: Array):
        smoothed = np.zeros(len(counts))
        smoothed[residue_ids] = counts[residue_ids] + 1
        self.most_frequent = int(smoothed.argmax())
        with np.errstate(divide="ignore"):
            self.log_probabilities = np.log(smoothed / smoothed.sum())

    @classmethod
    def fit(cls, dataset: Any, collator: MaskedLMCollator) -> UnigramBaseline:
        """Counts the residues of `dataset`, of a stream those of its first 10,000 rows. Cost: one pass over them."""
        ((name, columns),) = collator.columns.items()
        table = collator.tokenizers[name].table
        letters = np.zeros(256, np.int64)
        for row in read_columns(dataset, columns, STREAM_ROWS):
            text = "".join(row).encode("ascii")
            letters += np.bincount(np.frombuffer(text, np.uint8), minlength=256)
        counts = np.zeros(int(table.max()) + 1, np.int64)
        np.add.at(counts, table, letters)
        return cls(counts, np.unique(table[[*(STANDARD + UNKNOWN_RESIDUE + RARE).encode()]]))

    def sum_rows(self, labels: Array) -> Array:
        """Sums as the function of that name, (n, 3) float64; labels are (n, tokens), -100 where none is asked."""
        chosen = labels != UNKNOWN
        asked = np.where(chosen, labels, self.most_frequent)
        losses = np.where(chosen, -self.log_probabilities[asked], 0.0)
        return np.stack([losses.sum(1), (labels == self.most_frequent).sum(1), chosen.sum(1)], axis=1)


def score_split(trainer: FastTrainer, rows: Any, name: str, baseline: UnigramBaseline) -> Json:
    """Scores of model and baseline on a split, on the same masked residues.

    Returns:
        "verdict", and under the name of the split {"model": scores, "unigram": scores}.

    Raises:
        NotFiniteError: a loss is NaN or infinite.
    """
    output = trainer.predict(rows)
    check_scored(output.predictions, name)
    labels = np.asarray(output.label_ids)
    sums = np.asarray(output.predictions, np.float64)
    unigram = baseline.sum_rows(labels)
    losses = {MODEL: sums[:, 0], "unigram frequencies": unigram[:, 0]}
    verdict = judge(sums[:, 2], losses, metric="token_loss", seed=trainer.args.seed).as_dict()
    both = {"model": output.predictions, "unigram": unigram}
    scores = {who: compute_metrics(EvalPrediction(one, labels)) for who, one in both.items()}
    return {"verdict": verdict, name: scores}


def format_scores(verdict: Json, scores: Json) -> str:
    """Formats a verdict, and the scores of each predictor as a table."""
    rows = [[predictor, *(values[key] for key in SCORES)] for predictor, values in scores.items()]
    return f"{verdict['text']}\n\n{format_table(rows, ['', *SCORES])}"
