"""One sentence that says whether a model is worth more than the trivial predictors beside it, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from ..errors import ArgumentError
from ..reporting.units import metric_name
from ._arrays import FloatArray, as_column, as_pair, count_not_finite
from .bootstrap import affordable_resamples, bootstrap_metrics, percentile_interval
from .limits import at_limits
from .metrics import DEFAULT_THRESHOLD, spearman
from .paired import PAIRED_METRICS, PairedComparison, compare_paired
from .resampling import ResamplingUnits, check_units, unit_facts
from .scores import GROUP_METRIC

MODEL = "model"
CONSTANT = "training mean"
ERRORS = ("rmse", "mae")  # in the unit of the labels, whatever that is

Outcome = Literal["better", "no better", "undecided", "undefined"]


@dataclass(frozen=True)
class Verdict:
    """What a score table, a report and a model card say first.

    Attributes:
        text: one sentence (or two), with the numbers it rests on.
        is_better: than everything it was compared with, beyond the noise; None where these rows cannot tell.
        outcome: "better", "no better", "undecided" (too few rows), "undefined" (no score, or nothing to compare with).
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
    one_sided: dict[str, FloatArray]
    has_limits: bool
    metric: str
    options: dict[str, Any]

    @property
    def model(self) -> FloatArray:
        return self.predictions[MODEL]

    def compare(self, baseline: str, metric: str) -> PairedComparison:
        columns = self.one_sided if metric == "rmse" else self.predictions
        return compare_paired(self.labels, columns[baseline], columns[MODEL], metric, **self.options)


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
    threshold: float = DEFAULT_THRESHOLD,
    groups: Sequence[Any] | None = None,
) -> Verdict:
    """Decide, on the same rows, whether a regression model beats the baselines beside it.

    In this order: its RMSE must be below that of the training mean, whatever its Spearman; its Spearman must be above
    0; in `metric` it must be better than every other baseline. Each time the whole paired bootstrap interval must be.
    Where a value is not even better, the model is no better; where only the interval is not, these rows do not decide.
    Where the metric says better and the order of rows is worse than some baseline's, beyond the noise, that is said
    too. Rows are resampled one by one, so this speaks about further rows of the same kind; with `units`
    about further units, and fewer than 10 effective ones show nothing.

    Args:
        labels: (n,) numbers.
        predictions: predictor -> (n,) numbers, row by row as `labels`; "model" is judged, "training mean" is the
            constant, all others are baselines.
        bounds: (n,) of -1 (the truth is at or below the label), 1 (at or above), 0 (exact), or None. In the RMSE a
            prediction beyond such a limit is no error then.
        is_scale_free: the model predicts an order only (a ranking loss): RMSE is not asked for.
        metric: that decides among baselines, as of `compare_paired`: the one by which the checkpoint was chosen. None:
            rmse, or spearman of an order. A baseline without a value in it is not compared.
        confidence, num_resamples, seed: of the intervals.
        units: rows that were held out together, and are resampled together; None: each by itself.
        threshold, groups: of `metric`, see `compare_paired`.

    Raises:
        ArgumentError: no "model" in `predictions`, or an option is out of range.
        DataError: shapes or lengths do not fit, or a value is not a number.

    Cost: 0.1 s per baseline for 1,300 rows, 1.6 s for 26,000.
    """
    if MODEL not in predictions:
        raise ArgumentError(f"predictions of {[*predictions]}: {MODEL!r} is needed, beside its baselines.")
    known = (*PAIRED_METRICS, GROUP_METRIC)
    if metric not in (None, *known):
        raise ArgumentError(f"metric={metric!r}: use one of {', '.join(known)}.")
    measured = as_column(labels, "labels")
    columns = {name: as_pair(values, measured)[0] for name, values in predictions.items()}
    sides = np.zeros(len(measured)) if bounds is None else as_pair(bounds, measured)[0]
    units = check_units(units, len(measured))
    options: dict[str, Any] = {"confidence": confidence, "num_resamples": num_resamples, "seed": seed, "units": units}
    options |= {"threshold": threshold, "groups": groups}
    one_sided = {name: at_limits(values, measured, sides) for name, values in columns.items()}
    decisive = metric or ("spearman" if is_scale_free else "rmse")
    case = _Case(columns, measured, one_sided, bool(sides.any()), decisive, options)
    rules = (_judge_scores, *(() if is_scale_free else (_judge_constant,)), _judge_order, _judge_baselines)
    for rule in rules:
        if verdict := rule(case):
            return _name_units(verdict, units)
    return _name_units(_summarize(case, is_scale_free), units)


def _name_units(verdict: Verdict, units: ResamplingUnits | None) -> Verdict:
    """With what its intervals resample, and whether that is enough."""
    if units is None:
        return replace(verdict, **unit_facts(None, verdict.num_rows))
    basis = units.why_not_enough() or f"Intervals resample {units.describe()}."
    return replace(verdict, text=f"{verdict.text} {basis}", **units.facts())


def judge_tokens(
    num_tokens: Any,
    model_losses: Any,
    baseline_losses: Any,
    *,
    baseline: str = "unigram frequencies",
    unit: str = "masked residue",
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Verdict:
    """Decide whether a language model beats predictions that do not look at the sequence, or at less of it.

    Args:
        num_tokens: (n,) masked residues of each row, or whatever else is predicted.
        model_losses, baseline_losses: (n,) each row's summed cross-entropy in nats, on the same masked residues.
        baseline, unit: what to call the baseline, and one of what is predicted.
        confidence, num_resamples, seed: of the paired bootstrap over rows.

    Raises:
        DataError: shapes or lengths do not fit.

    Cost: 0.1 s for 10,000 rows.
    """
    options: dict[str, Any] = {"confidence": confidence, "num_resamples": num_resamples, "seed": seed}
    compared = compare_paired(num_tokens, baseline_losses, model_losses, "token_loss", **options)
    if compared.undefined:
        return _undefined(compared.n, f"the loss per {unit} is undefined ({compared.undefined})")
    # The interval is of the loss in nats; perplexities stand beside it because they are what people compare.
    assert compared.before is not None
    assert compared.after is not None
    perplexities = f"perplexity {np.exp(compared.after):.2f} against {np.exp(compared.before):.2f} of {baseline}"
    basis = f"improvement of the loss per {unit} {describe_difference(compared)}, {compared.n:,} rows"
    return _from_comparison(compared, baseline, f"{perplexities} ({basis})")


def judge_errors(model_errors: Any, baseline_errors: Any, *, baseline: str, seed: int = 0) -> Verdict:
    """Decide whether a model of fields beats a trivial prediction of them.

    Args:
        model_errors, baseline_errors: (n,) each row's relative L2 error.
        baseline: what to call the baseline.
        seed: of the paired bootstrap over rows.

    Raises:
        DataError: shapes or lengths do not fit.
    """
    compared = compare_paired(np.ones(len(model_errors)), baseline_errors, model_errors, "nrmse", seed=seed)
    if compared.undefined:
        return _undefined(compared.n, f"the error is undefined ({compared.undefined})")
    basis = f"improvement {describe_difference(compared)}, {compared.n:,} rows"
    return _from_comparison(compared, baseline, f"nRMSE {_errors(compared)} ({basis})")


def judge_accuracy(model_right: Any, baseline_right: Any, *, baseline: str, seed: int = 0) -> Verdict:
    """Decide whether a classifier is right about more rows than a baseline that sees less of them.

    Args:
        model_right, baseline_right: (n,) whether each row's class was named.
        baseline: what to call the baseline.
        seed: of the paired bootstrap over rows.

    Raises:
        DataError: shapes or lengths do not fit.
    """
    before, after = (np.asarray(each, np.float64) for each in (baseline_right, model_right))
    compared = compare_paired(np.ones(len(before)), before, after, "accuracy", seed=seed)
    if compared.undefined:
        return _undefined(compared.n, f"the accuracy is undefined ({compared.undefined})")
    basis = f"difference {describe_difference(compared)}, {compared.n:,} rows"
    return _from_comparison(compared, baseline, f"{describe_scores(compared)} of {baseline} ({basis})")


def _judge_scores(case: _Case) -> Verdict | None:
    """No score, or constant predictions."""
    num_rows = len(case.labels)
    if problem := count_not_finite(case.model, "predictions"):
        return Verdict(f"No better than a constant: {problem}.", False, "no better", num_rows, CONSTANT)
    if num_rows > 1 and case.model.min() == case.model.max():
        text = f"No better than a constant: all {num_rows:,} predictions are {case.model[0]:g}; Spearman is undefined."
        return Verdict(text, False, "no better", num_rows, CONSTANT)
    reason = spearman(case.model, case.labels).undefined
    return _undefined(num_rows, f"Spearman is undefined ({reason})") if reason else None


def _judge_constant(case: _Case) -> Verdict | None:
    """RMSE not below the training mean's; None where it is, or where there is no training mean."""
    if CONSTANT not in case.predictions:
        return None
    compared = case.compare(CONSTANT, "rmse")
    if compared.is_better:
        return None
    assert compared.improvement is not None
    limits = " (limits counted from their wrong side only)" if case.has_limits else ""
    text = f"RMSE {_errors(compared)} of predicting the training mean everywhere{limits}, {compared.n:,} rows"
    order = f"Spearman {spearman(case.model, case.labels).value:.3f} does not change that."
    if compared.improvement <= 0:
        return _decided(False, f"No better than a constant: {text}. {order}", compared, CONSTANT)
    by = describe_difference(compared)
    text = f"Not shown to be better than a constant: {text}; the difference may be 0 (lower by {by})."
    return _decided(None, text, compared, CONSTANT)


def _judge_order(case: _Case) -> Verdict | None:
    """Spearman not above 0; None where it is."""
    num_rows, units = len(case.labels), case.options["units"]
    options = {"num_resamples": affordable_resamples(num_rows, case.options["num_resamples"]), "units": units}
    samples = bootstrap_metrics(case.model, case.labels, threshold=None, seed=case.options["seed"], **options)
    low, high = percentile_interval(samples["spearman"], case.options["confidence"], units)
    if low is not None and low > 0 and (units is None or units.are_enough):
        return None
    value = spearman(case.model, case.labels).value
    interval = "" if low is None else f" [{low:.3f}, {high:.3f}]"
    text = f"than chance at ordering rows: Spearman {value:.3f}{interval}, {num_rows:,} rows."
    if value <= 0:
        return Verdict(f"No better {text}", False, "no better", num_rows)
    return Verdict(f"Not shown to be better {text}", None, "undecided", num_rows)


def _judge_baselines(case: _Case) -> Verdict | None:
    """Against the baseline that the model beats least surely; None where every one of them is constant."""
    names = [name for name in case.predictions if name not in (MODEL, CONSTANT)]
    ordered = {name: case.compare(name, "spearman") for name in names}
    ordered = {name: result for name, result in ordered.items() if result.low is not None}
    if not ordered:
        return None
    compared = ordered if case.metric == "spearman" else {name: case.compare(name, case.metric) for name in ordered}
    if all(result.after is None for result in compared.values()):
        reason = next(iter(compared.values())).undefined
        return _undefined(len(case.labels), f"{metric_name(case.metric)} is undefined ({reason})")
    compared = {name: result for name, result in compared.items() if not result.undefined} or ordered
    # One that scores as high as the model first, then the one whose interval reaches lowest.
    hardest = min(compared, key=lambda name: ((compared[name].improvement or 0) > 0, compared[name].low or 0))
    result = compared[hardest]
    several = f", the hardest of {len(compared)} to beat" if len(compared) > 1 and result.is_better else ""
    text = (
        f"{describe_scores(result)} of {hardest}{several} (difference {describe_difference(result)}, {result.n:,} rows)"
    )
    order = "" if result.metric == "spearman" else _say_order(ordered)
    return _from_comparison(result, "every baseline" if result.is_better else hardest, text, hardest, order)


def _say_order(ordered: dict[str, PairedComparison]) -> str:
    """Spearman beside a verdict in another metric: the model's, and the baseline that orders rows better, if any."""
    highest = max(ordered.values(), key=lambda result: result.before or 0)
    name = next(name for name, result in ordered.items() if result is highest)
    if highest.is_worse:
        return f" {name} orders these rows better: Spearman {highest.before:.3f} against {highest.after:.3f}."
    return f" Spearman {highest.after:.3f}."


def _summarize(case: _Case, is_scale_free: bool) -> Verdict:
    """Nothing speaks against the model, and there is no baseline but the constant."""
    num_rows, value = len(case.labels), spearman(case.model, case.labels).value
    if is_scale_free:
        text = f"Better than chance at ordering rows: Spearman {value:.3f}, {num_rows:,} rows; no other baseline."
        return Verdict(text, True, "better", num_rows)
    if CONSTANT not in case.predictions:
        return _undefined(num_rows, f"there is no baseline to compare Spearman {value:.3f} with")
    compared = case.compare(CONSTANT, "rmse")
    text = f"Better than a constant: RMSE {_errors(compared)} of predicting the training mean everywhere"
    return _decided(
        True, f"{text}, Spearman {value:.3f}, {num_rows:,} rows. No other baseline was fitted.", compared, CONSTANT
    )


def _from_comparison(
    compared: PairedComparison, than: str, numbers: str, baseline: str | None = None, order: str = ""
) -> Verdict:
    name = baseline or than
    assert compared.improvement is not None
    if compared.is_better:
        return _decided(True, f"Better than {than}: {numbers}.{order}", compared, name)
    if compared.improvement <= 0:
        return _decided(False, f"No better than {than}: {numbers}.{order}", compared, name)
    text = f"Not shown to be better than {than}: {numbers}, which may be 0: more {_more(compared)} decide.{order}"
    return _decided(None, text, compared, name)


def _more(compared: PairedComparison) -> str:
    return "rows" if compared.interval_by is None else f"values of {compared.interval_by}"


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
    if compared.metric in ERRORS:
        return f"{name} {_errors(compared)}"
    return f"{name} {compared.after:.3f} against {compared.before:.3f}"


def _errors(compared: PairedComparison) -> str:
    """Both errors with as many digits as it takes to tell them apart, six at most."""
    texts = [(f"{compared.after:#.{digits}g}", f"{compared.before:#.{digits}g}") for digits in (3, 4, 5, 6)]
    after, before = next((pair for pair in texts if pair[0] != pair[1]), texts[-1])
    return f"{after} against {before}"
