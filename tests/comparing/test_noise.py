"""Verdicts on noisy machines: rounds are added until they decide, and what stays undecided is called so."""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_comparing import BASE, FAST, make_run

from hf_ext.comparing import comparison
from hf_ext.comparing.arguments import CompareArguments
from hf_ext.comparing.comparison import check_criteria, is_too_noisy
from hf_ext.comparing.measures import RoundRates, decision_interval, ratio_interval
from hf_ext.comparing.running import start_costs
from hf_ext.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[2]


def rates_of(ratios) -> tuple[RoundRates, RoundRates]:
    measured = np.array(ratios, dtype=float)
    return RoundRates(measured, measured[None]), RoundRates(np.ones_like(measured), np.ones_like(measured)[None])


def test_the_interval_that_decides_by_hand() -> None:
    # Logarithms ln 2, ln 4, ln 4: mean 1.1552, deviation 0.4002; Student's 97.5 % point is 4.3027.
    low, high = decision_interval(*rates_of([2, 4, 4]))
    assert (round(low, 3), round(high, 3)) == (1.175, 8.579)
    wider = decision_interval(*rates_of([2, 4, 4]), num_looks=7)
    assert wider[0] < low < high < wider[1]
    assert decision_interval(*rates_of([2])) == (0.0, float("inf"))


def test_of_three_rounds_students_interval_holds_the_true_ratio_and_medians_drawn_again_do_not() -> None:
    generator = np.random.default_rng(0)
    held = {"drawn again": 0, "Student": 0}
    for _ in range(num := 400):
        ratios = np.exp(generator.normal(0, 0.1, 3))
        steps = ratios * np.exp(generator.normal(0, 0.01, (1000, 3)))  # each round's rate on steps drawn again
        sides = RoundRates(ratios, steps), RoundRates(np.ones(3), np.ones((1000, 3)))
        low, high = decision_interval(*sides)
        held["Student"] += low <= 1 <= high
        held["drawn again"] += ratio_interval(*sides).low <= 1 <= ratio_interval(*sides).high
    assert 0.92 < held["Student"] / num < 0.98
    assert 0.75 < held["drawn again"] / num < 0.86


@pytest.mark.parametrize("limit", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["min_speedup", "max_loss_delta", "max_memory_gib", "max_metric_drop"])
def test_a_limit_that_nothing_could_meet_or_miss_is_refused(name, limit) -> None:
    with pytest.raises(ArgumentError, match=f"--{name} {limit}: must be a number"):
        CompareArguments(**{name: float(limit)})


@pytest.mark.parametrize(
    ("interval", "verdict"), [((2.0, 3.0), "PASS"), ((1.0, 1.99), "FAIL"), ((1.99, 2.0), "TOO NOISY TO TELL")]
)
def test_a_speed_passes_fails_or_is_too_noisy(interval, verdict) -> None:
    pairs = {"stock": {"ratio": {"value": 2.0}, "decided_by": interval, "loss": None, "metric_drop": None}}
    criteria = check_criteria(CompareArguments(min_speedup=2.0), pairs, 1.0)
    assert [one.verdict for one in criteria] == [verdict]
    assert is_too_noisy(criteria) == (verdict == "TOO NOISY TO TELL")
    also = check_criteria(CompareArguments(min_speedup=2.0, max_memory_gib=0.5), pairs, 1.0)
    assert not is_too_noisy(also)  # it fails, whatever more rounds would say


def verdict_of(noise, num_looks, least: int = 3) -> str:
    """What rounds decide that are added one at a time; the true ratio is the one that is asked for."""
    for num in range(least, len(noise) + 1):
        low, high = decision_interval(*rates_of(np.exp(noise[:num])), num_looks=num_looks)
        if low >= 1 or high < 1:
            return "PASS" if low >= 1 else "FAIL"
    return "TOO NOISY TO TELL"


@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_looking_again_and_again_seldom_decides_what_is_not_so(tails) -> None:
    generator = np.random.default_rng(0)
    noise = generator.normal(size=(1500, 9)) if tails == "normal" else generator.standard_t(2, size=(1500, 9))
    found = [verdict_of(0.1 * row, num_looks=7) for row in noise]
    assert max(found.count("PASS"), found.count("FAIL")) <= 0.03 * len(found)
    greedy = [verdict_of(0.1 * row, num_looks=1) for row in noise]
    if tails == "normal":  # the twin that takes each look for the only one
        assert len(greedy) - greedy.count("TOO NOISY TO TELL") > 0.08 * len(greedy)


def run_scripted(monkeypatch, folder, ratios, **given):
    """A comparison whose rounds have these ratios; returns the result and the sides that ran, in order."""
    ran: list[tuple[str, int]] = []

    def run_side(args, shared, side, round_):
        ran.append((side.role, round_))
        return make_run(
            BASE if side.role == "baseline" else FAST, round_, 1.0 if side.role == "baseline" else 1 / ratios[round_]
        )

    monkeypatch.setattr(comparison, "run_side", run_side)
    args = CompareArguments(output_dir=str(folder), baseline=["stock"], **given)
    return comparison.compare(args), ran


def test_rounds_are_added_until_they_decide(monkeypatch, tmp_path) -> None:
    ratios = [2.0, 2.6, 2.1, 2.3, 2.2, 2.2, 2.2, 2.2, 2.2]
    result, ran = run_scripted(monkeypatch, tmp_path / "a", ratios, min_speedup=1.5)
    assert (result["passed"], result["too_noisy"]) == (True, False)
    assert 3 < result["rounds"] < 9
    assert ran == [(role, round_) for round_ in range(result["rounds"]) for role in ("baseline", "optimized")]
    quiet, _ = run_scripted(monkeypatch, tmp_path / "b", [2.0, 2.01, 2.0], min_speedup=1.5)
    assert (quiet["passed"], quiet["rounds"]) == (True, 3)


def test_what_stays_undecided_is_neither_passed_nor_failed(monkeypatch, tmp_path) -> None:
    result, _ = run_scripted(monkeypatch, tmp_path, [1.0, 4.0] * 5, min_speedup=2.0, max_rounds=5)
    assert (result["passed"], result["too_noisy"], result["rounds"]) == (False, True, 5)
    assert "TOO NOISY TO TELL  speed against stock at least 2x" in (tmp_path / "comparison.md").read_text()


def test_without_a_speed_to_judge_no_round_is_added(monkeypatch, tmp_path) -> None:
    result, _ = run_scripted(monkeypatch, tmp_path, [1.0, 4.0] * 5, max_memory_gib=9.0)
    assert (result["passed"], result["rounds"]) == (True, 3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("ratios", "status"), [([3.0] * 3, 0), ([1.0] * 3, 3), ([1.0, 4.0, 1.0], 4)])
def test_the_exit_status_says_which(monkeypatch, tmp_path, ratios, status) -> None:
    def run_side(args, shared, side, round_):
        return make_run(
            BASE if side.role == "baseline" else FAST, round_, 1.0 if side.role == "baseline" else 1 / ratios[round_]
        )

    monkeypatch.syspath_prepend(ROOT / "recipes")
    monkeypatch.setattr(comparison, "run_side", run_side)
    words = ["--output_dir", str(tmp_path), "--baseline", "stock", "--min_speedup", "2", "--max_rounds", "3"]
    assert importlib.import_module("hf_ext.comparing.command").main(words) == status


def test_rounds_at_most_that_say_nothing_are_refused() -> None:
    with pytest.raises(ArgumentError, match="--max_rounds 2: must be at least --rounds, 3"):
        CompareArguments(max_rounds=2, min_speedup=2.0)
    with pytest.raises(ArgumentError, match="--max_rounds 9 adds rounds until --min_speedup is decided: give one"):
        CompareArguments(max_rounds=9)


def test_costs_are_of_the_child() -> None:
    end = start_costs()
    loop = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ntime.sleep(0.3)"
    subprocess.run([sys.executable, "-c", loop], check=True)
    cost = end()
    assert 0.3 <= cost.cpu_seconds < cost.seconds - 0.25
    assert cost.stolen_share is None or 0 <= cost.stolen_share <= 1
