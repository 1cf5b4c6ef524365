"""Where memory fails one of two processes, both take the rung, and learn what they learn where it fails both."""

import json
from pathlib import Path

import pytest
from equal_cases import differences, load_numbers
from locations import HELPERS
from ranks import run_on_ranks

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ladder")
    run_on_ranks(HELPERS / "ladder_on_ranks.py", folder, limit_s=500)
    return folder


def reports(folder, name):
    return [json.loads((folder / f"report-{rank}.json").read_text())[name] for rank in range(2)]


def is_equal(folder, name, twin):
    ours, theirs = load_numbers(folder, name), load_numbers(folder, twin)
    assert len(ours[0]) == 3
    return ours[0] == theirs[0] and all(ours[1][weight].equal(theirs[1][weight]) for weight in theirs[1])


def test_gradients_averaged_after_the_backward_pass_are_those_averaged_in_it(folder):
    assert is_equal(folder, "idle", "plain")


@pytest.mark.parametrize("name", ["second on 1", "backward on 1", "first on 0"])
def test_one_process_that_fails_in_the_first_step_takes_the_other_along(folder, name):
    assert [rung for _, rung, _ in reports(folder, name)] == ["2 rows at a time"] * 2
    assert sum(failed for failed, _, _ in reports(folder, name)) == 1
    assert is_equal(folder, name, "first on both")
    assert not is_equal(folder, name, "plain")  # by rounding: the broken twin


@pytest.mark.parametrize("name", ["later on 0", "all"])
def test_whatever_fails_learns_what_the_plain_run_learns(folder, name):
    assert [bool(rung) for _, rung, _ in reports(folder, name)] == [True, True]
    loss, weight = differences(load_numbers(folder, name), load_numbers(folder, "plain"), 3)
    assert loss < 1e-5
    assert weight < 1e-4


def test_both_take_the_deeper_rung(folder):
    assert [rung for _, rung, _ in reports(folder, "all")] == ["1 row at a time"] * 2


def test_at_the_end_of_the_ladder_both_end(folder):
    errors = [error for _, _, error in reports(folder, "nothing left")]
    assert "on the last rung" in errors[1]
    assert "Another process is out of memory" in errors[0]


def test_an_evaluation_that_does_not_fit_one_process_is_that_of_both(folder):
    (ours, *_), (theirs, failed) = reports(folder, "evaluated")
    whole = reports(folder, "evaluated whole")
    assert failed == 2  # 4 rows, then 2
    assert ours == theirs == pytest.approx(whole[0][0], rel=1e-6)
    assert len(ours) == 2


def test_the_finder_takes_what_fits_on_every_process(folder):
    for rows, passes, tried in reports(folder, "found"):
        assert (rows, passes) == (2, 4)
        assert [(t["size"], t["fits"]) for t in tried] == [(1, True), (2, True), (4, False)]
    loss, weight = differences(load_numbers(folder, "found"), load_numbers(folder, "plain"), 3)
    assert loss < 1e-5
    assert weight < 1e-4
