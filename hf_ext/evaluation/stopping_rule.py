"""Early stopping that noise cannot trigger: the best and the current model compared on the same rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from ..files import Facts, Json
from .comparison import PairedComparison, check_comparison, compare_rows
from .kinds import rows_for
from .metrics.arrays import FloatArray, as_column, as_pair
from .metrics.rows import DEFAULT_THRESHOLD, THRESHOLD_METRICS, Rows

Verdict = Literal["improved", "undecided", "no improvement"]


@dataclass(frozen=True)
class StoppingDecision:
    """What one evaluation showed, and the intervals that say so.

    `against_best` is None for the first model that has a score: it is the best so far. `against_recent` compares with
    the evaluation `patience` earlier and is None until there is one.
    """

    verdict: Verdict
    step: int
    best_step: int | None
    against_best: PairedComparison | None
    against_recent: PairedComparison | None
    num_without_improvement: int
    is_warmup: bool
    should_stop: bool

    def as_dict(self) -> Json:
        """Returns the decision with its intervals, JSON-able."""
        both = {name: getattr(self, name) for name in ("against_best", "against_recent")}
        return {
            **vars(self),
            **{name: one and one.as_dict() for name, one in both.items()},
        }


class StoppingRule:
    """Decides after each evaluation whether the model improved, did not, or whether the rows are too few to say.

    The current predictions are compared with those of the best model so far, and with those of `patience` evaluations
    ago, each by a paired bootstrap on the same rows:

    * "improved": the interval of the improvement over the best lies above 0. The current model is the new best, and
      counting restarts.
    * "no improvement": one of the two intervals lies at or below `min_delta`, so that an improvement worth having is
      excluded: the model is worse than the best, or its predictions have converged.
    * "undecided": neither, or a score has no value (constant predictions, a NaN), or recall or F1 is 0: a model that
      calls nothing a binder yet has not converged. Counting restarts: training goes on.

    After `patience` evaluations in a row without improvement `should_stop` is set, in warm-up never. The best is
    replaced only by a model that is certainly better, because the highest of many noisy scores is mostly luck, and
    every later model would be measured against that luck.

    What it costs to be safe: where the score stays and the predictions keep moving, by more than these rows can
    resolve to within `min_delta`, the rule waits until the run ends.

    Args:
        labels: (n,) or (n, 1) numbers of the rows that every evaluation scores, for example a fixed subset;
            what they are for token_loss, perplexity and accuracy, see `compare_paired`.
        metric: see `compare_paired`.
        patience: how many evaluations in a row must exclude an improvement, 1 or more.
        warmup_steps: evaluations at this step or earlier neither count nor stop.
        min_delta: the smallest improvement worth training for, in the unit of the metric, 0 or more. With 0 only
            models that are certainly worse count.
        rows: makes the rows that are compared, of predictions and labels; None: those of the metric.
        confidence, threshold, options: `num_resamples` and `seed` too, see `compare_paired`.

    Raises:
        ArgumentError: an unknown metric.

    Cost: two comparisons per evaluation (0.2 s for 1,300 rows); keeps `patience` + 1 sets of predictions.
    """

    def __init__(
        self,
        labels: Any,
        *,
        metric: str = "spearman",
        patience: int = 3,
        warmup_steps: int = 0,
        min_delta: float = 0.01,
        rows: Callable[[FloatArray, FloatArray], Rows] | None = None,
        confidence: float = 0.99,
        threshold: float | None = None,
        **options: Any,
    ):
        if rows is None:
            check_comparison(metric)
        self._rows = rows or partial(rows_for, None, threshold=threshold, metric=metric)
        self._options: dict[str, Any] = {"confidence": confidence, **options}
        self.metric = metric
        self.patience = patience
        self.warmup_steps = warmup_steps
        self.min_delta = float(min_delta)
        self.labels = np.array(as_column(labels, "labels"))
        cut = ""
        if metric in THRESHOLD_METRICS:
            cut = repr(float(DEFAULT_THRESHOLD if threshold is None else threshold))
        # Metric, labels, and what else decides a score.
        scored = self.labels.astype("<f8").tobytes() + f"{metric} {cut}".encode()
        self._scored = hashlib.sha256(scored).hexdigest()
        self.best_predictions: FloatArray | None = None
        self.best_step: int | None = None
        self.num_without_improvement = 0
        self._recent: list[FloatArray] = []

    def update(self, predictions: Any, *, step: int) -> StoppingDecision:
        """Compares the predictions of the evaluation at `step` with the best and the recent ones, and keeps them.

        Args:
            predictions: (n,) or (n, 1), row by row as the labels.
            step: optimizer steps so far.

        Raises:
            DataError: another number of predictions than labels, or a value that is not a number.
        """
        predicted = np.array(as_pair(predictions, self.labels)[0])
        # Against itself where there is no best yet: says whether these predictions have a score at all.
        is_first = self.best_predictions is None
        recent = None
        best = self._compare(predicted if is_first else self.best_predictions, predicted)
        if not best.undefined:
            if len(self._recent) == self.patience:
                recent = self._compare(self._recent[0], predicted)
            self._recent = [*self._recent, predicted][-self.patience :]
        has_converged = not best.undefined and not (self.metric in ("recall", "f1") and best.after == 0)
        verdict: Verdict = "undecided"
        if not best.undefined and (is_first or best.is_better):
            verdict = "improved"
            self.best_predictions = predicted
            self.best_step = step
        elif has_converged and any(one and one.excludes_improvement(self.min_delta) for one in (best, recent)):
            verdict = "no improvement"
        is_warmup = step <= self.warmup_steps
        is_counted = verdict == "no improvement" and not is_warmup
        self.num_without_improvement = self.num_without_improvement + 1 if is_counted else 0
        return StoppingDecision(
            verdict=verdict,
            step=step,
            best_step=self.best_step,
            against_best=None if is_first and verdict == "improved" else best,
            against_recent=recent,
            num_without_improvement=self.num_without_improvement,
            is_warmup=is_warmup,
            should_stop=self.num_without_improvement >= self.patience,
        )

    def _compare(self, earlier: Any, predicted: FloatArray) -> PairedComparison:
        first = self._rows(earlier, self.labels)
        second = self._rows(predicted, self.labels)
        return compare_rows(first, second, self.metric, **self._options)

    def state_dict(self) -> Json:
        """Returns what a resumed run needs: plain values, and (n,) float64 arrays of best and recent predictions."""
        return {
            "scored": self._scored,
            "best_predictions": self.best_predictions,
            "best_step": self.best_step,
            "recent_predictions": list(self._recent),
            "num_without_improvement": self.num_without_improvement,
        }

    def load_state_dict(self, state: Facts) -> bool:
        """Continues from `state_dict()`, and returns True; False, and nothing is changed, where it is of another metric
        or of other labels. Patience, warm-up and `min_delta` may differ."""
        if state.get("scored") != self._scored:
            return False
        best = state["best_predictions"]
        self.best_predictions = None if best is None else as_pair(best, self.labels)[0]
        self.best_step = state["best_step"]
        self._recent = [as_pair(one, self.labels)[0] for one in state["recent_predictions"]][-self.patience :]
        self.num_without_improvement = state["num_without_improvement"]
        return True
