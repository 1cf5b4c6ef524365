"""What a verdict is, and what it rests on: rows of a model and of what stands beside it, compared, in words."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ..files import Facts, Json
from ..labels import KINDS, LabelKind, Number
from ..text import metric_name
from .comparison import PairedComparison, check_comparison, compare_rows
from .kinds import rows_for
from .metrics.arrays import FloatArray, as_pair
from .metrics.regression import Regression, at_limits
from .metrics.rows import ERRORS
from .resampling import ResamplingGroups, check_groups

MODEL = "model"
CONSTANT = Number.constant_name
CONSTANTS = {kind.constant_name for kind in KINDS}  # what predicts the same for all rows

OPTIONS = {"confidence": 0.95, "num_resamples": 1000, "seed": 0}
ZERO_BY_CHANCE = ("spearman", "mcc")

Outcome = Literal["better", "no better", "undecided", "undefined", "worse", "no difference"]


@dataclass(frozen=True)
class Verdict:
    """What a score table, a report and a model card say first.

    Attributes:
        text: one sentence (or two), with the numbers it rests on.
        is_better: than everything it was compared with, beyond the noise; None where these rows cannot tell.
        outcome: of `judge` "better", "no better", "undecided" (too few rows), "undefined" (no score, or nothing to
            compare with); of `judge_pair` "better", "worse", "no difference" (none that these rows show), "undefined".
        baseline: what the model was decided against: of several the one that it beats least surely.
        comparison: with that baseline, as `PairedComparison.as_dict`; None where there is none.
        num_rows: rows scored.
    """

    text: str
    is_better: bool | None
    outcome: Outcome
    num_rows: int
    baseline: str | None = None
    comparison: Json | None = None

    def as_dict(self) -> Json:
        """Returns a JSON-able dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class Case:
    """What the rules below look at."""

    rows: dict[str, Any]  # of each predictor, `Rows`
    sides: FloatArray
    kind: LabelKind | None
    metric: str
    groups: ResamplingGroups | None
    options: dict[str, Any]

    @property
    def num_rows(self) -> int:
        return self.rows[MODEL].num_rows

    @property
    def constant(self) -> str | None:
        """The baseline that predicts the same for all rows, where there is one."""
        return next((name for name in CONSTANTS if name in self.rows), None)

    def counts_limits(self, metric: str) -> bool:
        """Returns whether a prediction beyond a label that is a limit is no error in this metric."""
        return metric == "rmse" and bool(self.sides.any())

    @cached_property
    def _within_limits(self) -> dict[str, Regression]:
        """The same rows within limits."""
        return {name: at_limits(rows, self.sides) for name, rows in self.rows.items()}

    def compare(self, baseline: str, metric: str, model: str = "the model") -> PairedComparison:
        rows = self._within_limits if self.counts_limits(metric) else self.rows
        names = baseline, model
        return compare_rows(
            rows[baseline],
            rows[MODEL],
            metric,
            names=names,
            groups=self.groups,
            **self.options,
        )

    def name_groups(self, verdict: Verdict) -> Verdict:
        """Names what intervals resample, and says whether that is enough."""
        if self.groups is None:
            return verdict
        basis = self.groups.why_not_enough() or f"Intervals resample {self.groups.describe()}."
        return replace(verdict, text=f"{verdict.text} {basis}")

    def decide(
        self,
        result: PairedComparison,
        baseline: str,
        than: str,
        also: str = "",
        several: str = "",
    ) -> Verdict:
        """Writes the sentence about a comparison: better, no better, or not shown to be; `also` is said after it."""
        if result.undefined:
            return undefined(
                result.n,
                f"{metric_name(result.metric)} is undefined ({result.undefined})",
            )
        rival = f"the {baseline}" if baseline in CONSTANTS else baseline
        limits = " (limits counted from their wrong side only)" if self.counts_limits(result.metric) else ""
        what = "difference of the loss" if result.metric == "token_loss" else "difference"
        numbers = f"({what} {format_difference(result)}, {result.n:,} rows)"
        text = f"{than}: {format_scores(result)} of {rival}{several if result.is_better else ''}{limits} {numbers}"
        if result.is_better:
            return Verdict(
                f"Better than {text}.{also}",
                True,
                "better",
                result.n,
                baseline,
                result.as_dict(),
            )
        if (result.improvement or 0) <= 0:
            return Verdict(
                f"No better than {text}.{also}",
                False,
                "no better",
                result.n,
                baseline,
                result.as_dict(),
            )
        more = "rows" if result.interval_by is None else f"values of {result.interval_by}"
        text = f"Not shown to be better than {text}, which may be 0: more {more} decide.{also}"
        return Verdict(text, None, "undecided", result.n, baseline, result.as_dict())


def make_case(
    labels: Any,
    predictions: Facts,
    metric: str,
    kind: LabelKind | None,
    options: Any,
) -> Case:
    check_comparison(metric, kind)
    given = {**OPTIONS, **options}
    bounds = given.pop("bounds", None)
    groups = given.pop("groups", None)
    threshold = given.pop("threshold", None)
    rows = {name: rows_for(kind, values, labels, threshold, metric) for name, values in predictions.items()}
    sides = np.zeros(len(labels)) if bounds is None else as_pair(bounds, labels)[0]
    return Case(rows, sides, kind, metric, check_groups(groups, len(labels)), given)


def undefined(num_rows: int, reason: str) -> Verdict:
    return Verdict(f"No verdict: {reason}.", None, "undefined", num_rows)


def format_difference(compared: PairedComparison) -> str:
    """Formats by how much the later one is better, with its interval where there is one: 0.12 [0.10, 0.14]."""
    digits = ".3g" if compared.metric in ERRORS else ".3f"
    ends = (compared.improvement, compared.low, compared.high)
    value, *interval = [f"{each + 0.0:{digits}}" for each in ends if each is not None]
    return f"{value} [{', '.join(interval)}]" if interval else value


def format_scores(compared: PairedComparison) -> str:
    """Formats RMSE 0.361 against 0.482: the later one first, with as many digits as tell them apart, at most six."""
    name = metric_name(compared.metric)
    pair = (compared.after or 0.0, compared.before or 0.0)
    styles = [".3f"]
    if compared.metric in (*ERRORS, "nrmse"):
        styles = [f"#.{digits}g" for digits in (3, 4, 5, 6)]
    elif compared.metric == "token_loss":  # the interval is of the loss in nats; perplexities are what people compare
        name = "perplexity"
        pair = (math.exp(pair[0]), math.exp(pair[1]))
        styles = [".2f"]
    texts = [(f"{pair[0]:{style}}", f"{pair[1]:{style}}") for style in styles]
    after, before = next((text for text in texts if text[0] != text[1]), texts[-1])
    return f"{name} {after} against {before}"
