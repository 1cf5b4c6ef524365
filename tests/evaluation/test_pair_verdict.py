"""Of two models on the same rows: which one is better, or that these rows do not show it."""

from __future__ import annotations

import numpy as np
import pytest

from hf_ext.errors import ArgumentError
from hf_ext.evaluation.pair_verdict import judge_pair
from hf_ext.evaluation.resampling import ResamplingUnits

GENERATOR = np.random.default_rng(0)
LABELS = GENERATOR.normal(7, 1, 300)
NOISE, OTHER = GENERATOR.normal(0, 1, (2, 300))
WORSE, BETTER = LABELS + 0.6 * NOISE, LABELS + 0.3 * NOISE  # twice the error in every row


@pytest.mark.parametrize("metric", ["rmse", "spearman", "r2"])
def test_a_model_with_half_the_error_is_better_and_the_other_way_round_worse(metric):
    there = judge_pair(LABELS, WORSE, BETTER, names=("old", "new"), metric=metric)
    back = judge_pair(LABELS, BETTER, WORSE, names=("old", "new"), metric=metric)
    assert (there.outcome, back.outcome) == ("better", "worse")
    assert there.text.startswith("new is better than old: ")
    assert back.text.startswith("new is worse than old: ")


def test_equal_models_show_no_difference_and_one_that_is_off_by_a_constant_does():
    same = judge_pair(LABELS, WORSE, WORSE.copy(), names=("old", "new"))
    assert (same.outcome, same.text) == (
        "no difference",
        "No difference: new predicts what old predicts, on all 300 rows.",
    )
    assert judge_pair(LABELS, WORSE, WORSE + 0.5).outcome == "worse"


def test_equally_good_models_with_other_errors_show_no_difference():
    found = judge_pair(LABELS, LABELS + 0.5 * NOISE, LABELS + 0.5 * OTHER, names=("old", "new"))
    assert found.outcome == "no difference"
    assert found.text.startswith("No difference between new and old is shown: RMSE ")


def test_few_units_show_nothing():
    units = ResamplingUnits.of("antibody", [i % 4 for i in range(300)])
    found = judge_pair(LABELS, WORSE, BETTER, units=units)
    assert found.outcome == "no difference"
    assert "only 4 values of antibody" in found.text
    many = ResamplingUnits.of("antibody", [i % 40 for i in range(300)])
    assert judge_pair(LABELS, WORSE, BETTER, units=many).outcome == "better"


def test_beyond_a_limit_nothing_is_an_error_in_the_rmse():
    labels, bounds = np.full(40, 7.0), np.ones(40)  # at or above 7
    labels[:20], bounds[:20] = 5.0, 0
    before = np.where(bounds == 1, 7.0, 5.5)
    after = np.where(bounds == 1, 9.0, 5.5)  # above the limit, which may well be true
    assert judge_pair(labels, before, after, bounds=bounds).outcome == "no difference"
    assert judge_pair(labels, before, after).outcome == "worse"


def test_a_score_without_a_value_is_no_verdict():
    constant = np.full(300, 7.0)
    assert judge_pair(LABELS, constant, BETTER, metric="spearman").outcome == "undefined"
    assert judge_pair(LABELS, constant, BETTER, metric="rmse").outcome == "better"
    with pytest.raises(ArgumentError, match="use one of"):
        judge_pair(LABELS, WORSE, BETTER, metric="sperman")
