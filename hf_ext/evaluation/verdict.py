"""One sentence that says whether a model is worth more than what stands beside it, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from ..errors import ArgumentError
from ..reporting.units import metric_name
from ._arrays import FloatArray, as_column, as_pair, count_not_finite
from .metrics import ERRORS, GROUP_METRIC, Regression, at_limits, is_ratio
from .paired import PAIRED_METRICS, PairedComparison, compare_paired
from .resampling import ResamplingUnits, check_units, percentile_interval, resample, unit_facts

MODEL = "model"
CONSTANT = "training mean"

Outcome = Literal["better", "no better", "undecided", "undefined", "worse", "no difference"]


@dataclass(frozen=True)
class Words:
    """How a verdict in one metric of `Summed` rows is put; in those of a regression it is `REGRESSION`.

    Attributes:
        numbers: both scores; `{scores}`, `{baseline}` and `{several}` are filled in.
        gain: what the interval is of; `{unit}` is filled in.
        undefined: what has no value; `{unit}` and `{metric}` are filled in.
    """

    numbers: str
    gain: str
    undefined: str


REGRESSION = Words("{scores} of {baseline}{several}", "difference", "{metric}")
WORDS = {
    "token_loss": Words("{scores} of {baseline}", "improvement of the loss per {unit}", "the loss per {unit}"),
    "nrmse": Words("{scores}", "improvement", "the error"),
    "accuracy": Words("{scores} of {baseline}", "difference", "the accuracy"),
}


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
        interval_by: the column whose values were resampled for the intervals; None where rows were.
        num_units: how many values, or rows, that are; num_effective_units: of like size.
    """

    text: str
    is_better: bool | None
    outcome: Outcome
    num_rows: int
    baseline: str | None = None
    comparison: dict[str, Any] | None = None
    interval_by: str | None = None
    num_units: int | None = None
    num_effective_units: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class _Case:
    """What the rules below look at."""

    predictions: dict[str, FloatArray]
    labels: FloatArray
    sides: FloatArray
    metric: str
    unit: str
    options: dict[str, Any]

    @property
    def model(self) -> FloatArray:
        return self.predictions[MODEL]

    @property
    def spearman(self) -> float:
        return Regression(self.model, self.labels).value("spearman").value

    def compare(self, baseline: str, metric: str) -> PairedComparison:
        before, after = self.predictions[baseline], self.model
        if metric == "rmse":
            before, after = (at_limits(each, self.labels, self.sides) for each in (before, after))
        return compare_paired(self.labels, before, after, metric, **self.options)


def judge(
    labels: Any,
    predictions: Mapping[str, Any],
    *,
    bounds: Sequence[int] | Any | None = None,
    is_scale_free: bool = False,
    metric: str | None = None,
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
    units: ResamplingUnits | None = None,
    threshold: float | None = None,
    groups: Sequence[Any] | None = None,
    unit: str = "masked residue",
) -> Verdict:
    """Decide, on the same rows, whether a model beats the baselines beside it.

    Of a regression, in this order: its RMSE must be below that of the training mean, whatever its Spearman; its
    Spearman must be above 0; in `metric` it must be better than every other baseline. Each time the whole paired
    bootstrap interval must be. Where a value is not even better, the model is no better; where only the interval is
    not, these rows do not decide. Where the metric says better and the order of rows is worse than some baseline's,
    beyond the noise, that is said too. In token_loss, nrmse and accuracy the comparison with the baselines is all.
    Rows are resampled one by one, so this speaks about further rows of the same kind; with `units`
    about further units, and fewer than 10 effective ones show nothing.

    Args:
        labels: (n,) numbers; for token_loss how many predictions each row holds, for nrmse and accuracy 1.
        predictions: predictor -> (n,) numbers, row by row as `labels`; "model" is judged, "training mean" is the
            constant, all others are baselines. For token_loss each row's summed loss in nats, for nrmse its error, for
            accuracy whether it is right.
        bounds: (n,) of -1 (the truth is at or below the label), 1 (at or above), 0 (exact), or None. In the RMSE a
            prediction beyond such a limit is no error then.
        is_scale_free: the model predicts an order only (a ranking loss): RMSE is not asked for.
        metric: that decides among baselines, as of `compare_paired`: the one by which the checkpoint was chosen. None:
            rmse, or spearman of an order. A baseline without a value in it is not compared.
        confidence, num_resamples, seed: of the intervals.
        units: rows that were held out together, and are resampled together; None: each by itself.
        threshold, groups: of `metric`, see `compare_paired`.
        unit: what one of the predictions that token_loss counts is called.

    Raises:
        ArgumentError: no "model" in `predictions`, or an option is out of range.
        DataError: shapes or lengths do not fit, or a value is not a number.

    Cost: 0.1 s per baseline for 1,300 rows, 1.6 s for 26,000.
    """
    if MODEL not in predictions:
        raise ArgumentError(f"predictions of {[*predictions]}: {MODEL!r} is needed, beside its baselines.")
    known = (*PAIRED_METRICS, GROUP_METRIC, *WORDS)
    if metric not in (None, *known):
        raise ArgumentError(f"metric={metric!r}: use one of {', '.join(known)}.")
    measured = as_column(labels, "labels")
    columns = {name: as_pair(values, measured)[0] for name, values in predictions.items()}
    sides = np.zeros(len(measured)) if bounds is None else as_pair(bounds, measured)[0]
    units = check_units(units, len(measured))
    options: dict[str, Any] = {"confidence": confidence, "num_resamples": num_resamples, "seed": seed, "units": units}
    options |= {"threshold": threshold, "groups": groups}
    case = _Case(columns, measured, sides, metric or ("spearman" if is_scale_free else "rmse"), unit, options)
    rules: tuple[Callable[[_Case], Verdict | None], ...] = (_judge_baselines,)
    if not is_ratio(case.metric):
        last = _sum_up_order if is_scale_free else _sum_up
        rules = (_judge_scores, *(() if is_scale_free else (_judge_constant,)), _judge_order, _judge_baselines, last)
    nothing = _undefined(len(measured), "there is no baseline to compare with")
    verdict = next(filter(None, (rule(case) for rule in rules)), nothing)
    if units is None:
        return replace(verdict, **unit_facts(None, verdict.num_rows))
    return replace(verdict, text=f"{verdict.text} {_describe_basis(units)}", **units.facts())


def judge_pair(
    labels: Any,
    before: Any,
    after: Any,
    *,
    names: tuple[str, str] = ("the first", "the later"),
    metric: str = "rmse",
    bounds: Sequence[int] | Any | None = None,
    units: ResamplingUnits | None = None,
    **options: Any,
) -> Verdict:
    """Decides by a paired bootstrap whether the later of two models, of which neither is trivial, is better.

    Args:
        labels, before, after: (n,) numbers, row by row.
        names: what to call both.
        metric: as in `compare_paired`.
        bounds: (n,) of -1, 0, 1, or None; in the RMSE a prediction beyond such a limit is no error then.
        units, options: `threshold`, `seed` and `groups`, as in `compare_paired`.

    Raises:
        ArgumentError: an unknown metric, or a number out of range.
        DataError: shapes or lengths do not fit, or a value is not a number.

    Cost: that of `compare_paired`.
    """
    earlier, measured = as_pair(before, labels)
    later = as_pair(after, labels)[0]
    if bounds is not None and metric == "rmse":
        sides = as_pair(bounds, measured)[0]
        earlier, later = (at_limits(predicted, measured, sides) for predicted in (earlier, later))
    compared = compare_paired(measured, earlier, later, metric, units=units, **options)
    units = check_units(units, len(measured))
    first, second = names
    outcome: Outcome = "better" if compared.is_better else "worse" if compared.is_worse else "no difference"
    if compared.undefined:
        text, outcome = f"No verdict on {second}: {compared.undefined}.", "undefined"
    elif np.array_equal(earlier, later):
        text = f"No difference: {second} predicts what {first} predicts, on all {compared.n:,} rows."
    else:
        basis = "" if units is None or metric == GROUP_METRIC else f" {_describe_basis(units)}"
        numbers = f": {describe_scores(compared)} (improvement {describe_difference(compared)}, {compared.n:,} rows)."
        said = f"No difference between {second} and {first} is shown"
        text = (said if outcome == "no difference" else f"{second} is {outcome} than {first}") + numbers + basis
    is_better = {"better": True, "worse": False}.get(outcome)
    return Verdict(text, is_better, outcome, compared.n, first, compared.as_dict(), **unit_facts(units, compared.n))


def find_hardest(compared: Mapping[str, PairedComparison]) -> str:
    """The baseline that is beaten least surely: one that scores as high first, then whose interval reaches lowest."""
    return min(compared, key=lambda name: ((compared[name].improvement or 0) > 0, compared[name].low or 0))


def _describe_basis(units: ResamplingUnits) -> str:
    """What intervals resample, and whether that is enough."""
    return units.why_not_enough() or f"Intervals resample {units.describe()}."


def _judge_scores(case: _Case) -> Verdict | None:
    """No score, or constant predictions."""
    num_rows = len(case.labels)
    if problem := count_not_finite(case.model, "predictions"):
        return Verdict(f"No better than a constant: {problem}.", False, "no better", num_rows, CONSTANT)
    if num_rows > 1 and case.model.min() == case.model.max():
        text = f"No better than a constant: all {num_rows:,} predictions are {case.model[0]:g}; Spearman is undefined."
        return Verdict(text, False, "no better", num_rows, CONSTANT)
    reason = Regression(case.model, case.labels).why_undefined("spearman")
    return _undefined(num_rows, f"Spearman is undefined ({reason})") if reason else None


def _judge_constant(case: _Case) -> Verdict | None:
    """RMSE not below the training mean's; None where it is, or where there is no training mean."""
    if CONSTANT not in case.predictions:
        return None
    compared = case.compare(CONSTANT, "rmse")
    if compared.is_better:
        return None
    if compared.undefined:
        return _undefined(compared.n, f"RMSE is undefined ({compared.undefined})")
    limits = " (limits counted from their wrong side only)" if case.sides.any() else ""
    text = f"RMSE {_errors(compared)} of predicting the training mean everywhere{limits}, {compared.n:,} rows"
    if (compared.improvement or 0) <= 0:
        text = f"No better than a constant: {text}. Spearman {case.spearman:.3f} does not change that."
        return _decided(False, text, compared, CONSTANT)
    by = describe_difference(compared)
    text = f"Not shown to be better than a constant: {text}; the difference may be 0 (lower by {by})."
    return _decided(None, text, compared, CONSTANT)


def _judge_order(case: _Case) -> Verdict | None:
    """Spearman not above 0; None where it is."""
    num_rows, units, options = len(case.labels), case.options["units"], case.options
    measure = Regression(case.model, case.labels).metric("spearman")
    samples = resample(measure, num_rows, options["num_resamples"], options["seed"], units)
    low, high = percentile_interval(samples, options["confidence"], units)
    if low is not None and low > 0 and (units is None or units.are_enough):
        return None
    interval = "" if low is None else f" [{low:.3f}, {high:.3f}]"
    text = f"than chance at ordering rows: Spearman {case.spearman:.3f}{interval}, {num_rows:,} rows."
    if case.spearman <= 0:
        return Verdict(f"No better {text}", False, "no better", num_rows)
    return Verdict(f"Not shown to be better {text}", None, "undecided", num_rows)


def _judge_baselines(case: _Case) -> Verdict | None:
    """Against the baseline that the model beats least surely; None where every one of them is constant."""
    names = [name for name in case.predictions if name != MODEL]
    words, ordered = WORDS.get(case.metric), {}
    if words is None:
        words = REGRESSION
        ordered = {name: case.compare(name, "spearman") for name in names if name != CONSTANT}
        names = [name for name, result in ordered.items() if result.low is not None]
    if not names:
        return None
    ordered = {name: ordered[name] for name in names if ordered}
    compared = ordered if case.metric == "spearman" else {name: case.compare(name, case.metric) for name in names}
    if all(result.after is None for result in compared.values()) or (not ordered and compared[names[0]].undefined):
        what = words.undefined.format(metric=metric_name(case.metric), unit=case.unit)
        return _undefined(len(case.labels), f"{what} is undefined ({compared[names[0]].undefined})")
    compared = {name: result for name, result in compared.items() if not result.undefined} or ordered
    hardest = find_hardest(compared)
    result = compared[hardest]
    several = f", the hardest of {len(compared)} to beat" if len(compared) > 1 and result.is_better else ""
    basis = f"{words.gain.format(unit=case.unit)} {describe_difference(result)}, {result.n:,} rows"
    text = f"{words.numbers.format(scores=describe_scores(result), baseline=hardest, several=several)} ({basis})"
    order = "" if result.metric == "spearman" or not ordered else _say_order(ordered)
    if result.is_better:
        than = "every baseline" if ordered else hardest
        return _decided(True, f"Better than {than}: {text}.{order}", result, hardest)
    if (result.improvement or 0) <= 0:
        return _decided(False, f"No better than {hardest}: {text}.{order}", result, hardest)
    more = "rows" if result.interval_by is None else f"values of {result.interval_by}"
    text = f"Not shown to be better than {hardest}: {text}, which may be 0: more {more} decide.{order}"
    return _decided(None, text, result, hardest)


def _say_order(ordered: dict[str, PairedComparison]) -> str:
    """Spearman beside a verdict in another metric: the model's, and the baseline that orders rows better, if any."""
    name = max(ordered, key=lambda name: ordered[name].before or 0)
    highest = ordered[name]
    if highest.is_worse:
        return f" {name} orders these rows better: Spearman {highest.before:.3f} against {highest.after:.3f}."
    return f" Spearman {highest.after:.3f}."


def _sum_up_order(case: _Case) -> Verdict:
    """Nothing speaks against a model of an order, and there is no baseline."""
    num_rows = len(case.labels)
    text = f"Better than chance at ordering rows: Spearman {case.spearman:.3f}, {num_rows:,} rows; no other baseline."
    return Verdict(text, True, "better", num_rows)


def _sum_up(case: _Case) -> Verdict:
    """Nothing speaks against the model, and there is no baseline but the constant."""
    num_rows = len(case.labels)
    if CONSTANT not in case.predictions:
        return _undefined(num_rows, f"there is no baseline to compare Spearman {case.spearman:.3f} with")
    compared = case.compare(CONSTANT, "rmse")
    text = (
        f"Better than a constant: RMSE {_errors(compared)} of predicting the training mean everywhere, Spearman "
        f"{case.spearman:.3f}, {num_rows:,} rows. No other baseline was fitted."
    )
    return _decided(True, text, compared, CONSTANT)


def _decided(is_better: bool | None, text: str, compared: PairedComparison, baseline: str) -> Verdict:
    outcomes: dict[bool | None, Outcome] = {True: "better", False: "no better", None: "undecided"}
    return Verdict(text, is_better, outcomes[is_better], compared.n, baseline, compared.as_dict())


def _undefined(num_rows: int, reason: str) -> Verdict:
    return Verdict(f"No verdict: {reason}.", None, "undefined", num_rows)


def describe_difference(compared: PairedComparison) -> str:
    """0.12 [0.10, 0.14]: by how much the later one is better, with its interval where there is one."""
    digits = ".3g" if compared.metric in ERRORS else ".3f"
    numbers = [
        f"{each + 0.0:{digits}}" for each in (compared.improvement, compared.low, compared.high) if each is not None
    ]
    return numbers[0] if len(numbers) == 1 else f"{numbers[0]} [{numbers[1]}, {numbers[2]}]"


def describe_scores(compared: PairedComparison) -> str:
    """RMSE 0.361 against 0.482: of the later one first."""
    name = metric_name(compared.metric)
    if compared.metric in (*ERRORS, "nrmse"):
        return f"{name} {_errors(compared)}"
    if compared.metric == "token_loss":  # the interval is of the loss in nats; perplexities are what people compare
        return f"perplexity {np.exp(compared.after or 0):.2f} against {np.exp(compared.before or 0):.2f}"
    return f"{name} {compared.after:.3f} against {compared.before:.3f}"


def _errors(compared: PairedComparison) -> str:
    """Both errors with as many digits as it takes to tell them apart, six at most."""
    texts = [(f"{compared.after:#.{digits}g}", f"{compared.before:#.{digits}g}") for digits in (3, 4, 5, 6)]
    after, before = next((pair for pair in texts if pair[0] != pair[1]), texts[-1])
    return f"{after} against {before}"
