"""One sentence that says whether a model is worth more than what stands beside it, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..labels import LabelKind
from ..text import metric_name
from .case import (
    CONSTANT,
    CONSTANTS,
    MODEL,
    ZERO_BY_CHANCE,
    Case,
    Outcome,
    Verdict,
    format_difference,
    format_scores,
    make_case,
    undefined,
)
from .comparison import PairedComparison
from .kinds import metrics_of
from .metrics.rows import is_ratio
from .resampling import percentile_interval, resample_metrics


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
    case = make_case(labels, predictions, metric, kind, options)
    has_many = metrics_of(kind).more_compared and is_ratio(metric)
    verdict = _judge_baselines(case, "") if has_many else _judge(case, is_scale_free)
    return case.name_groups(verdict or undefined(case.num_rows, "there is no baseline to compare with"))


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
        labels, before, after: (n,) numbers, row by row; of another `kind` as `rows_for` takes them, but not as rows.
        names: what to call both.
        metric, kind: as in `compare_paired`.
        options: as in `judge`.

    Raises:
        ArgumentError: an unknown metric.
        DataError: shapes or lengths do not fit, or a value is not a number.

    Cost: that of `compare_paired`.
    """
    first, second = names
    case = make_case(labels, {first: before, MODEL: after}, metric, kind, options)
    compared = case.compare(first, metric, second)
    if compared.undefined:
        reason = f"{metric_name(metric)} is undefined ({compared.undefined})"
        return replace(undefined(compared.n, reason), baseline=first, comparison=compared.as_dict())
    outcome: Outcome = "no difference"
    if compared.is_better:
        outcome = "better"
    elif compared.is_worse:
        outcome = "worse"
    numbers = f"{format_scores(compared)} (improvement {format_difference(compared)}, {compared.n:,} rows)."
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
    return min(
        compared,
        key=lambda name: (
            (compared[name].improvement or 0) > 0,
            compared[name].low or 0,
        ),
    )


def _judge(case: Case, is_scale_free: bool) -> Verdict | None:
    """Applies the first rule that says something: a constant, a score at all, training mean, chance, baselines."""
    model = case.rows[MODEL]
    num_rows = case.num_rows
    metrics = metrics_of(case.kind)
    if problem := model.why_constant():
        return Verdict(
            f"No better than a constant: {problem}.",
            False,
            "no better",
            num_rows,
            case.constant,
        )
    metric = metrics.orders or case.metric
    value = model.value(metric)
    if value.undefined:
        return undefined(num_rows, f"{metric_name(metric)} is undefined ({value.undefined})")
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


def _describe_probabilities(case: Case) -> str:
    """Says, in a sentence, that log loss does not beat class frequencies; "" where it does."""
    if case.metric == "log_loss" or case.constant is None or "log_loss" not in metrics_of(case.kind).names:
        return ""
    loss = case.compare(case.constant, "log_loss")
    if loss.undefined or loss.is_better:
        return ""
    how = "no" if (loss.improvement or 0) <= 0 else "not shown to be"
    return f" Its probabilities are {how} better than the {case.constant}: {format_scores(loss)}."


def _judge_chance(case: Case, metric: str, value: float, chance: str) -> Verdict | None:
    """Judges a metric that is 0 by chance and not above it; None where it is."""
    groups = case.groups
    options = case.options
    num_rows = case.num_rows
    how = (options["num_resamples"], options["seed"], groups)
    samples = resample_metrics([case.rows[MODEL]], [metric], *how)[0]
    low, high = percentile_interval(samples[metric], options["confidence"], groups)
    if low is not None and low > 0 and (groups is None or groups.are_enough):
        return None
    interval = "" if low is None else f" [{low:.3f}, {high:.3f}]"
    text = f"{chance}: {metric_name(metric)} {value:.3f}{interval}, {num_rows:,} rows."
    if value <= 0:
        return Verdict(f"No better {text}", False, "no better", num_rows)
    return Verdict(f"Not shown to be better {text}", None, "undecided", num_rows)


def _judge_baselines(case: Case, also: str) -> Verdict | None:
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
    return case.decide(
        result,
        hardest,
        than,
        also,
        f", the hardest of {num} to beat" if is_every and num > 1 else "",
    )


def _describe_order(ordered: Mapping[str, PairedComparison]) -> str:
    """Describes Spearman beside a verdict in another metric: the model's, and a baseline's that orders rows better."""
    name = max(ordered, key=lambda name: ordered[name].before or 0)
    highest = ordered[name]
    if highest.is_worse:
        return f" {name} orders these rows better: Spearman {highest.before:.3f} against {highest.after:.3f}."
    return f" Spearman {highest.after:.3f}."
