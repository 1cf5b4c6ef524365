"""Intervals by group: by hand, against copied rows, rows as before, and no claim from too few groups."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside import Regression

from hf_ext.evaluation import ResamplingGroups, judge, score_predictions
from hf_ext.evaluation.resampling import resample

pytestmark = pytest.mark.internals
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def rows_of(num_groups: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group, label and prediction of rows of groups of 1 to 6, whose labels and errors are mostly the group's."""
    generator = np.random.default_rng(seed)
    group = np.repeat(np.arange(num_groups), generator.integers(1, 7, num_groups))
    of_group = generator.normal(size=(2, num_groups))[:, group]
    labels = np.round(8 + of_group[0] + generator.normal(0, 0.3, len(group)), 1)
    return group, labels, labels + of_group[1] + generator.normal(0, 0.3, len(group))


def test_two_units_of_one_and_three_rows_by_hand() -> None:
    # The single row is off by 2, the three are right. Twice the first group: two rows, 2. Both: sqrt(4 / 4). Else 0.
    groups = ResamplingGroups.of("antibody", ["a", "b", "b", "b"])
    labels, predicted = np.array([1.0, 2.0, 3.0, 4.0]), np.array([3.0, 2.0, 3.0, 4.0])
    drawn = resample(Regression(predicted, labels).metric("rmse"), 4, 400, 0, groups)
    assert sorted(set(drawn)) == [0.0, 1.0, 2.0]
    assert np.mean(drawn == 1.0) == pytest.approx(0.5, abs=0.08)


def test_units_of_one_row_each_are_rows_to_the_bit_and_others_are_not() -> None:
    group, labels, predicted = rows_of(30)
    alone = ResamplingGroups.of("antibody", [f"ab{i}" for i in range(len(labels))])
    together = ResamplingGroups.of("antibody", group)
    by_row = score_predictions(predicted, labels)
    assert score_predictions(predicted, labels, groups=alone) == by_row
    assert score_predictions(predicted, labels, groups=together)["rmse"]["low"] != by_row["rmse"]["low"]
    given = {"model": predicted, "training mean": np.full(len(labels), 8.0), "ridge": labels[::-1].copy()}
    assert judge(labels, given, groups=alone) == judge(labels, given)
    assert judge(labels, given, groups=together) != judge(labels, given)


def test_rows_of_strong_units_have_wider_intervals_and_say_of_how_many() -> None:
    group, labels, predicted = rows_of(40)
    groups = ResamplingGroups.of("antibody", group)
    by_row, by_group = score_predictions(predicted, labels), score_predictions(predicted, labels, groups=groups)
    for name in ("spearman", "rmse"):
        width = [one[name]["high"] - one[name]["low"] for one in (by_row, by_group)]
        assert width[1] > 1.4 * width[0]
        assert by_row[name]["value"] == by_group[name]["value"]
        assert (by_group[name]["interval_by"], by_group[name]["num_units"]) == ("antibody", 40)
        assert (by_row[name]["interval_by"], by_row[name]["num_units"]) == (None, len(labels))
    assert json.loads(json.dumps(by_group)) == by_group


def clear_win(num_groups: int) -> dict[str, Any]:
    """A model that beats the ridge in every one of the groups."""
    generator = np.random.default_rng(0)
    group = np.repeat(np.arange(num_groups), 30)
    labels = generator.normal(8, 1, len(group))
    columns = {
        "model": labels + generator.normal(0, 0.2, len(group)),
        "training mean": np.full(len(group), 8.0),
        "ridge": labels + generator.normal(0, 2, len(group)),
    }
    return {"labels": labels, "predictions": columns, "groups": ResamplingGroups.of("antibody", group)}


def test_a_verdict_rests_on_ten_units_and_claims_nothing_on_six() -> None:
    enough, few = judge(**clear_win(10)), judge(**clear_win(6))
    assert (enough.is_better, enough.outcome) == (True, "better")
    assert enough.text.endswith("Intervals resample 10 values of antibody.")
    assert (few.is_better, few.outcome) == (None, "undecided")
    assert few.text.startswith("Not shown to be better than a constant: RMSE ")
    assert few.text.endswith(
        "An interval from only 6 values of antibody is not to be trusted: 10 of like size are the least."
    )
    rows = {name: value for name, value in clear_win(6).items() if name != "groups"}
    assert judge(**rows).is_better  # the innocent case: rows of many antibodies


def test_scores_of_too_few_units_are_marked_and_of_one_have_no_interval() -> None:
    for num_groups, is_trusted in ((10, True), (9, False), (1, False)):
        given = clear_win(num_groups)
        score = score_predictions(given["predictions"]["model"], given["labels"], groups=given["groups"])["rmse"]
        assert (score["is_trusted"], score["num_units"]) == (is_trusted, num_groups)
        assert (score["low"] is None) is (num_groups == 1)
    assert judge(**clear_win(1)).text.endswith("All rows have the same antibody: no interval can be had from one.")


def test_simulated_clusters_are_held_by_cluster_and_not_by_row(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import interval_coverage

    settings = {"num_draws": 40, "num_twin_draws": 40, "num_resamples": 100, "seed": 0}
    (row,) = interval_coverage.run(Namespace(sizes=["geometric"], num_clusters=[20], **settings))
    held = {way: interval_coverage.mean_held([row], way) for way in ("by_cluster", "by_row")}
    assert min(held["by_cluster"].values()) >= 0.85
    assert max(held["by_row"].values()) <= 0.80
    assert row["by_cluster"]["rmse"]["mean_width"] > 1.5 * row["by_row"]["rmse"]["mean_width"]


def test_units_of_uneven_size_count_as_fewer() -> None:
    # 9 groups of 10 rows and one of 90: 180^2 / (9 * 100 + 8100) = 3.6
    uneven = ResamplingGroups.of("antibody", np.repeat(np.arange(10), [10] * 9 + [90]))
    assert uneven.num_effective == pytest.approx(3.6)
    assert not uneven.are_enough
    assert uneven.describe() == "10 values of antibody (as uneven as 4)"
    even = ResamplingGroups.of("antibody", np.repeat(np.arange(10), 10))
    assert (even.num_effective, even.are_enough, even.describe()) == (10.0, True, "10 values of antibody")
