"""One sentence that says whether a model is worth more than what stands beside it, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ..errors import ArgumentError
from ..labels import KINDS, LabelKind, Number
from ..text import metric_name
from ._arrays import FloatArray, as_pair
from .kinds import metrics_of, rows_for
from .metrics import ERRORS, Regression, at_limits, is_ratio
from .resampling import ResamplingGroups, check_groups, percentile_interval, resample
from .scores import PairedComparison, check_comparison, compare_rows

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
    comparison: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns a JSON-able dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class _Case:
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

    @cached_property
    def _within_limits(self) -> dict[str, Regression]:
        """The same rows within limits."""
        return {name: at_limits(rows, self.sides) for name, rows in self.rows.items()}

    def compare(self, baseline: str, metric: str, model: str = "the model") -> PairedComparison:
        rows = self._within_limits if metric == "rmse" and self.sides.any() else self.rows
        names = baseline, model
        return compare_rows(rows[baseline], rows[MODEL], metric, names=names, groups=self.groups, **self.options)

    def name_groups(self, verdict: Verdict) -> Verdict:
        """Names what intervals resample, and says whether that is enough."""
        if self.groups is None:
            return verdict
        basis = self.groups.why_not_enough() or f"Intervals resample {self.groups.describe()}."
        return replace(verdict, text=f"{verdict.text} {basis}")

    def decide(self, result: PairedComparison, baseline: str, than: str, also: str = "", several: str = "") -> Verdict:
        """Writes the sentence about a comparison: better, no better, or not shown to be; `also` is said after it."""
        if result.undefined:
            return _undefined(result.n, f"{metric_name(result.metric)} is undefined ({result.undefined})")
        rival = f"the {baseline}" if baseline in CONSTANTS else baseline
        limits = " (limits counted from their wrong side only)" if result.metric == "rmse" and self.sides.any() else ""
        what = "difference of the loss" if result.metric == "token_loss" else "difference"
        numbers = f"({what} {_difference(result)}, {result.n:,} rows)"
        text = f"{than}: {_scores(result)} of {rival}{several if result.is_better else ''}{limits} {numbers}"
        if result.is_better:
            return Verdict(f"Better than {text}.{also}", True, "better", result.n, baseline, result.as_dict())
        if (result.improvement or 0) <= 0:
            return Verdict(f"No better than {text}.{also}", False, "no better", result.n, baseline, result.as_dict())
        more = "rows" if result.interval_by is None else f"values of {result.interval_by}"
        text = f"Not shown to be better than {text}, which may be 0: more {more} decide.{also}"
        return Verdict(text, None, "undecided", result.n, baseline, result.as_dict())


def _make_case(labels: Any, predictions: Mapping[str, Any], metric: str, kind: LabelKind | None, options: Any) -> _Case:
    check_comparison(metric, kind)
    given = {"bounds": None, "groups": None, "threshold": None, **OPTIONS, **options}
    bounds, groups, threshold = (given.pop(name) for name in ("bounds", "groups", "threshold"))
    rows = {name: rows_for(kind, values, labels, threshold, metric) for name, values in predictions.items()}
    sides = np.zeros(len(labels)) if bounds is None else as_pair(bounds, labels)[0]
    return _Case(rows, sides, kind, metric, check_groups(groups, len(labels)), given)


def judge(
    labels: Any,
    predictions: Mapping[str, Any],
    *,
    is_scale_free: bool = False,
    metric: str | None = None,
    kind: LabelKind | None = None,
    **options: Any,
) -> Verdict:
    """Decides, on the same rows, whether a model beats the baselines beside it.

    Of a regression, in this order: its RMSE must be below that of the training mean, whatever its Spearman; its
    Spearman must be above 0; in `metric` it must be better than every other baseline. Each time the whole paired
    bootstrap interval must be. Where a value is not even better, the model is no better; where only the interval is
    not, these rows do not decide. Where the metric says better and the order of rows is worse than some baseline's,
    beyond the noise, that is said too. In token_loss, nrmse and accuracy the comparison with the baselines is all.
    Of another kind, in this order: predictions must not all be one class; a Matthews correlation must be above 0; in
    `metric` the model must be better than every baseline that has a value in it. Probabilities whose log loss is not
    shown to be below that of the frequencies in training are named.
    Rows are resampled one by one, so this speaks about further rows of the same kind; with `groups`
    about further groups, and fewer than 10 effective ones show nothing.

    Args:
        labels: (n,) numbers; for token_loss how many predictions each row holds, for nrmse and accuracy 1; of another
            `kind` as `rows_for` takes them.
        predictions: predictor -> (n,) numbers, row by row as `labels`, or as `rows_for` takes them; "model" is
            compared, one of `CONSTANTS` is the constant, all others are baselines. For token_loss each row's summed
            loss in nats, for nrmse its error, for accuracy whether it is right.
        is_scale_free: the model predicts an order only (a ranking loss): RMSE is not asked for.
        metric: that decides among baselines, as of `compare_paired`: the one by which the checkpoint was chosen. None:
            rmse, or spearman of an order; of another kind that of `metrics_of`. A baseline without a value in it
            is not compared.
        kind: of label; None: numbers.
        options: `confidence`, `num_resamples`, `seed` and `threshold`, as in `compare_paired`; `groups`, rows that were
            held out together, and are resampled together, None: each by itself; `bounds`, (n,) of -1 (the truth is at
            or below the label), 1 (at or above), 0 (exact), or None: in the RMSE a prediction beyond such a limit is no
            error then.

    Raises:
        ArgumentError: no "model" in `predictions`, or an unknown metric.
        DataError: shapes or lengths do not fit, or a value is not a number.

    Cost: 0.1 s per baseline for 1,300 rows, 1.6 s for 26,000.
    """
    if MODEL not in predictions:
        raise ArgumentError(f"predictions of {[*predictions]}: {MODEL!r} is needed, beside its baselines.")
    metric = metric or ("spearman" if is_scale_free else metrics_of(kind).decides)
    case = _make_case(labels, predictions, metric, kind, options)
    has_many = metrics_of(kind).more_compared and is_ratio(metric)
    verdict = _judge_baselines(case, "") if has_many else _judge(case, is_scale_free)
    return case.name_groups(verdict or _undefined(case.num_rows, "there is no baseline to compare with"))


def judge_pair(
    labels: Any,
    before: Any,
    after: Any,
    *,
    names: tuple[str, str] = ("the first", "the later"),
    metric: str = "rmse",
    kind: LabelKind | None = None,
    **options: Any,
) -> Verdict:
    """Decides by a paired bootstrap whether the later of two models, of which neither is trivial, is better.

    Args:
        labels, before, after: (n,) numbers, row by row; of another `kind` as `rows_for` takes them.
        names: what to call both.
        metric, kind: as in `compare_paired`.
        options: as in `judge`.

    Raises:
        ArgumentError: an unknown metric.
        DataError: shapes or lengths do not fit, or a value is not a number.

    Cost: that of `compare_paired`.
    """
    first, second = names
    case = _make_case(labels, {first: before, MODEL: after}, metric, kind, options)
    compared = case.compare(first, metric, second)
    if compared.undefined:
        reason = f"{metric_name(metric)} is undefined ({compared.undefined})"
        return replace(_undefined(compared.n, reason), baseline=first, comparison=compared.as_dict())
    outcome: Outcome = "no difference"
    if compared.is_better:
        outcome = "better"
    elif compared.is_worse:
        outcome = "worse"
    numbers = f"{_scores(compared)} (improvement {_difference(compared)}, {compared.n:,} rows)."
    if all(map(np.array_equal, before, after)):
        text = f"No difference: {second} predicts what {first} predicts, on all {compared.n:,} rows."
    elif outcome == "no difference":
        text = f"No difference between {second} and {first} is shown: {numbers}"
    else:
        text = f"{second} is {outcome} than {first}: {numbers}"
    is_better = {"better": True, "worse": False}.get(outcome)
    return case.name_groups(Verdict(text, is_better, outcome, compared.n, first, compared.as_dict()))


def find_hardest(compared: Mapping[str, PairedComparison]) -> str:
    """Finds the baseline that is beaten least surely: one as high first, then whose interval reaches lowest."""
    return min(compared, key=lambda name: ((compared[name].improvement or 0) > 0, compared[name].low or 0))


def _judge(case: _Case, is_scale_free: bool) -> Verdict | None:
    """Applies the first rule that says something: a constant, a score at all, training mean, chance, baselines."""
    model = case.rows[MODEL]
    num_rows = case.num_rows
    metrics = metrics_of(case.kind)
    if problem := model.why_constant():
        return Verdict(f"No better than a constant: {problem}.", False, "no better", num_rows, case.constant)
    metric = metrics.orders or case.metric
    value = model.value(metric)
    if value.undefined:
        return _undefined(num_rows, f"{metric_name(metric)} is undefined ({value.undefined})")
    score = f"{metric_name(metric)} {value.value:.3f}"
    chance = f"than chance{metrics.chance}"
    first = "" if is_scale_free else metrics.beats_constant
    constant = case.compare(CONSTANT, first) if first and CONSTANT in case.rows else None
    if constant and not constant.is_better:
        return case.decide(constant, CONSTANT, "a constant", f" {score}.")
    if metric in ZERO_BY_CHANCE and (verdict := _judge_chance(case, metric, value.value, chance)):
        return verdict
    also = _describe_probabilities(case)
    if verdict := _judge_baselines(case, also):
        return verdict
    if constant:
        return case.decide(constant, CONSTANT, "a constant", f" {score}. No other baseline was fitted.")
    if metric in ZERO_BY_CHANCE and not first:
        text = f"Better {chance}: {score}, {num_rows:,} rows; no other baseline.{also}"
        return Verdict(text, True, "better", num_rows, case.constant)
    return None


def _describe_probabilities(case: _Case) -> str:
    """Says, in a sentence, that log loss does not beat class frequencies; "" where it does."""
    if case.metric == "log_loss" or case.constant is None or "log_loss" not in metrics_of(case.kind).names:
        return ""
    loss = case.compare(case.constant, "log_loss")
    how = "no" if (loss.improvement or 0) <= 0 else "not shown to be"
    better = "" if loss.is_better else f" Its probabilities are {how} better than the {case.constant}: {_scores(loss)}."
    return "" if loss.undefined else better


def _judge_chance(case: _Case, metric: str, value: float, chance: str) -> Verdict | None:
    """Judges a metric that is 0 by chance and not above it; None where it is."""
    groups = case.groups
    options = case.options
    num_rows = case.num_rows
    samples = resample(case.rows[MODEL].metric(metric), num_rows, options["num_resamples"], options["seed"], groups)
    low, high = percentile_interval(samples, options["confidence"], groups)
    if low is not None and low > 0 and (groups is None or groups.are_enough):
        return None
    interval = "" if low is None else f" [{low:.3f}, {high:.3f}]"
    text = f"{chance}: {metric_name(metric)} {value:.3f}{interval}, {num_rows:,} rows."
    if value <= 0:
        return Verdict(f"No better {text}", False, "no better", num_rows)
    return Verdict(f"Not shown to be better {text}", None, "undecided", num_rows)


def _judge_baselines(case: _Case, also: str) -> Verdict | None:
    """Judges against the baseline that the model beats least surely; None where none has a score."""
    names = [name for name in case.rows if name != MODEL]
    ordered = {}
    order = "" if is_ratio(case.metric) else metrics_of(case.kind).orders
    if order:
        ordered = {name: case.compare(name, order) for name in names if name != CONSTANT}
        ordered = {name: result for name, result in ordered.items() if result.low is not None}
        names = [*ordered]
    is_order = case.metric == order
    compared = ordered if is_order else {name: case.compare(name, case.metric) for name in names}
    if names and all(result.after is None for result in compared.values()):
        return case.decide(compared[names[0]], names[0], names[0])
    known = {name: result for name, result in compared.items() if not result.undefined} or ordered
    if not known:
        return None
    hardest = find_hardest(known)
    result = known[hardest]
    num = len(known)
    also = _describe_order(ordered) if ordered and result.metric != order else also
    is_every = result.is_better and (order or (num > 1 and not is_ratio(case.metric)))
    than = f"the {hardest}" if hardest in CONSTANTS else hardest
    if is_every:
        than = "every baseline"
    return case.decide(result, hardest, than, also, f", the hardest of {num} to beat" if is_every and num > 1 else "")


def _describe_order(ordered: Mapping[str, PairedComparison]) -> str:
    """Describes Spearman beside a verdict in another metric: the model's, and a baseline's that orders rows better."""
    name = max(ordered, key=lambda name: ordered[name].before or 0)
    highest = ordered[name]
    if highest.is_worse:
        return f" {name} orders these rows better: Spearman {highest.before:.3f} against {highest.after:.3f}."
    return f" Spearman {highest.after:.3f}."


def _undefined(num_rows: int, reason: str) -> Verdict:
    return Verdict(f"No verdict: {reason}.", None, "undefined", num_rows)


def _difference(compared: PairedComparison) -> str:
    """Formats by how much the later one is better, with its interval where there is one: 0.12 [0.10, 0.14]."""
    digits = ".3g" if compared.metric in ERRORS else ".3f"
    ends = (compared.improvement, compared.low, compared.high)
    value, *interval = [f"{each + 0.0:{digits}}" for each in ends if each is not None]
    return f"{value} [{', '.join(interval)}]" if interval else value


def _scores(compared: PairedComparison) -> str:
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
