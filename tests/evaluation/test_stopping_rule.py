"""Early stopping by intervals: what improves, what does not, what cannot be told, and that a resumed run agrees."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation import StoppingDecision, StoppingRule

LABELS = np.random.default_rng(0).normal(8, 1.5, 200)
NOISE = np.random.default_rng(1).normal(0, 1.5, (30, 200))


def model(error: float, number: int = 0) -> np.ndarray:
    """Predictions with `error` times the label's own spread of noise; another `number` makes other errors."""
    return LABELS + error * NOISE[number]


def feed(rule: StoppingRule, *evaluations: np.ndarray, start: int = 1) -> list[StoppingDecision]:
    return [rule.update(predictions, step=start + i) for i, predictions in enumerate(evaluations)]


def verdicts(decisions: list[StoppingDecision]) -> list[str]:
    return [decision.verdict for decision in decisions]


def test_a_higher_score_that_may_be_luck_is_undecided_and_replaces_nothing() -> None:
    scored = [(float(np.corrcoef(LABELS, model(1.0, i))[0, 1]), i) for i in range(8)]
    lower, higher = sorted(scored)[3][1], sorted(scored)[5][1]
    decision = feed(StoppingRule(LABELS, metric="pearson"), model(1.0, lower), model(1.0, higher))[1]
    assert decision.against_best.improvement > 0
    assert (decision.verdict, decision.best_step) == ("undecided", 1)


def test_it_stops_at_exactly_patience_evaluations_that_exclude_an_improvement() -> None:
    decisions = feed(StoppingRule(LABELS, patience=3), model(0.3), model(1.0), model(1.0, 1), model(1.0, 2))
    assert verdicts(decisions) == ["improved", "no improvement", "no improvement", "no improvement"]
    assert [decision.num_without_improvement for decision in decisions] == [0, 1, 2, 3]
    assert [decision.should_stop for decision in decisions] == [False, False, False, True]


def test_it_stops_where_the_predictions_have_settled_below_a_lucky_best() -> None:
    scored = sorted((float(np.corrcoef(LABELS, model(1.0, i))[0, 1]), i) for i in range(8))
    best, settled = model(1.0, scored[5][1]), model(1.0, scored[3][1])
    rule = StoppingRule(LABELS, metric="pearson", patience=2)
    decisions = feed(rule, best, *(settled + 1e-4 * NOISE[10 + i] for i in range(5)))
    assert not decisions[-1].against_best.excludes_improvement(0.01)
    assert abs(decisions[-1].against_recent.high) < 0.001
    assert [decision.should_stop for decision in decisions] == [False, False, False, False, True, True]


def test_warmup_never_stops_and_counts_nothing() -> None:
    evaluations = [model(0.3), *(model(1.0, i) for i in range(6))]
    decisions = feed(StoppingRule(LABELS, patience=2, warmup_steps=5), *evaluations)
    assert [decision.is_warmup for decision in decisions] == [True] * 5 + [False] * 2
    assert [decision.num_without_improvement for decision in decisions] == [0] * 5 + [1, 2]
    assert [decision.should_stop for decision in decisions] == [False] * 6 + [True]


def test_min_delta_is_the_improvement_that_must_be_excluded() -> None:
    evaluations = [model(0.5), model(0.5, 1)]
    assert verdicts(feed(StoppingRule(LABELS, min_delta=0.0), *evaluations))[1] == "undecided"
    assert verdicts(feed(StoppingRule(LABELS, min_delta=0.5), *evaluations))[1] == "no improvement"


def test_predictions_without_a_score_are_undecided_and_never_the_best() -> None:
    for broken in (np.full(200, 7.0), np.where(np.arange(200) == 3, np.nan, LABELS)):
        rule = StoppingRule(LABELS, patience=1)
        decisions = feed(rule, broken, model(1.0), broken, model(0.3))
        assert verdicts(decisions) == ["undecided", "improved", "undecided", "improved"]
        assert [decision.best_step for decision in decisions] == [None, 2, 2, 4]
        assert decisions[0].against_best.undefined
        assert np.isfinite(rule.state_dict()["best_predictions"]).all()


def noisy_run() -> Iterator[np.ndarray]:
    """Improves, wavers, settles: every verdict comes up and the rule stops."""
    yield from (model(1.5), model(0.6, 1), model(0.6, 2), model(0.65, 3))
    yield from (model(0.6, 4) + 1e-4 * NOISE[10 + i] for i in range(8))


def small_rule() -> StoppingRule:
    return StoppingRule(LABELS, patience=2, num_resamples=100)


def logged(decisions: list[StoppingDecision]) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(decision.as_dict(), allow_nan=False)) for decision in decisions]


def resumed_after(num_evaluations: int, **lost: Any) -> list[dict[str, Any]]:
    """The log of a run that is stopped and resumed, its state kept as a checkpoint does; `lost` overwrites parts."""
    evaluations = list(noisy_run())
    first, second = small_rule(), small_rule()
    before = feed(first, *evaluations[:num_evaluations])
    kept = json.loads(json.dumps(first.state_dict(), default=lambda array: array.tolist()))
    assert second.load_state_dict({**kept, **lost})
    return logged(before + feed(second, *evaluations[num_evaluations:], start=num_evaluations + 1))


def test_a_resumed_run_decides_as_one_that_was_never_stopped_and_the_check_notices_lost_state() -> None:
    whole = logged(feed(small_rule(), *noisy_run()))
    assert {decision["verdict"] for decision in whole} == {"improved", "undecided", "no improvement"}
    assert whole[-1]["should_stop"]
    for num_evaluations in range(len(whole) + 1):
        assert resumed_after(num_evaluations) == whole
    assert resumed_after(8, num_without_improvement=0) != whole
    assert resumed_after(6, recent_predictions=[]) != whole
    assert resumed_after(6, best_predictions=None, best_step=None) != whole


def test_a_state_of_other_rows_or_another_metric_is_refused_and_changes_nothing() -> None:
    rule = StoppingRule(LABELS)
    feed(rule, model(1.0))
    state = rule.state_dict()
    untouched = repr(state)
    for other in (StoppingRule(LABELS[::-1]), StoppingRule(LABELS, metric="rmse")):
        assert not other.load_state_dict(state)
        assert other.state_dict()["best_predictions"] is None
    assert repr(rule.state_dict()) == untouched


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="metric='spearmann'"):
        StoppingRule(LABELS, metric="spearmann")
    rule = StoppingRule(LABELS)
    with pytest.raises(DataError, match="199 predictions for 200 references"):
        rule.update(model(1.0)[:-1], step=1)
