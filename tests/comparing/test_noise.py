"""What a comparison concludes from hand-made runs: ratios, criteria, noise, the timeline, and what the report says."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_ext.comparing import comparison
from hf_ext.comparing.comparison import analyze, check_criteria, is_too_noisy
from hf_ext.comparing.measures import (
    RoundRates,
    compare_losses,
    decision_interval,
    find_metric,
    rate_interval,
    ratio_interval,
    resample_rates,
    smooth,
)
from hf_ext.comparing.report import format_comparison
from hf_ext.comparing.running import SideRun
from hf_ext.comparing.sides import CompareArguments, Side
from hf_ext.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[2]
BASE, FAST = Side("stock", "baseline", ()), Side("max_speed", "optimized", ())


def make_run(side: Side, round_: int, seconds: float, losses=(3.0, 2.0), unit="residues", **changes) -> SideRun:
    """A run of 20 equal steps of `seconds` each, 100 residues and 4 sequences per step."""
    rates = {f"{unit}_per_s": 100 / seconds, "sequences_per_s": 4 / seconds, "data_wait_share": 0.1}
    throughput = {
        "unit": unit,
        "device": "T4",
        "measured_steps": 20,
        "warmup_steps": 3,
        "warmup_seconds": 5.0,
        "peak_memory_gib": 1.5,
        "rates": {**rates, "padded_tokens_per_s": 150 / seconds},
        "step_seconds": {"q1": seconds, "median": seconds, "q3": seconds},
        "steps": {"seconds": [seconds] * 20, "residues": [100.0] * 20, "sequences": [4.0] * 20},
        "log_history": [{"loss": loss, "step": 10 * (i + 1)} for i, loss in enumerate(losses)],
        **changes,
    }
    throughput["log_history"].append({"eval_loss": losses[-1], "step": 20})
    return SideRun(side, round_, 60.0, throughput)


LEAST = 1.17  # the interval of ratios 2, 4, 4 begins at exp(mean - 4.303 * deviation / sqrt(3)) of logarithms: 1.1748


def three_rounds(fast_losses=(3.0, 2.0)) -> list[SideRun]:
    """Baseline steps of 1, 2, 1 s; optimized ones of 0.5, 0.5, 0.25 s: ratios 2, 4, 4."""
    runs = []
    for round_, (slow, fast) in enumerate([(1.0, 0.5), (2.0, 0.5), (1.0, 0.25)]):
        runs += [make_run(BASE, round_, slow), make_run(FAST, round_, fast, fast_losses)]
    return runs


def analyzed(runs: list[SideRun], **given: Any) -> dict[str, Any]:
    return {"recipe": "r.py", "rounds": 3, **analyze(CompareArguments(**given), runs)}


# --- measures ---------------------------------------------------------------------------------------------------------


def test_ratios_are_paired_by_round() -> None:
    steps = [np.full(20, 100.0)] * 3
    slow = resample_rates(steps, [np.full(20, s) for s in (1.0, 2.0, 1.0)], seed=0)
    fast = resample_rates(steps, [np.full(20, s) for s in (0.5, 0.5, 0.25)], seed=0)
    assert rate_interval(slow).value == 100.0
    ratio = ratio_interval(fast, slow)
    assert (ratio.value, ratio.smallest, ratio.largest) == (4.0, 2.0, 4.0)
    assert (ratio.low, ratio.high) == (2.0, 4.0)  # medians of three rounds drawn again: 2 in 7 of 27 draws
    unpaired = ratio_interval(fast, resample_rates(steps, [np.full(20, s) for s in (1.0, 1.0, 2.0)], seed=0))
    assert unpaired.value == 2.0  # the same rates in another order pair otherwise


def test_loss_differences_by_hand_and_one_that_is_no_number_is_not_small() -> None:
    other = [make_run(BASE, i, 1.0, (3.0, 2.0)) for i in (0, 1)]
    runs = [make_run(FAST, 0, 1.0, (3.0, 2.5)), make_run(FAST, 1, 1.0, (3.5, 2.0))]
    assert compare_losses(runs, other) == {"final": 0.25, "mean": 0.25, "largest_gap": 0.5}
    for losses in ((3.0, math.nan), (math.nan, 3.0)):
        assert math.isnan(compare_losses([make_run(FAST, 0, 1.0, losses), runs[1]], other)["largest_gap"])
    other[0].throughput["log_history"] = []
    assert compare_losses(runs, other) is None
    assert smooth([float(i) for i in range(20)])[:4] == [0.0, 0.5, 1.5, 2.5]


def test_the_metric_is_found_by_path_and_in_the_log() -> None:
    run = make_run(BASE, 0, 1.0)
    run.results = {"test": {"spearman": {"value": 0.5}}, "eval_accuracy": 0.25, "note": "text"}
    names = ("test.spearman.value", "eval_accuracy", "eval_loss", "absent")
    assert [find_metric(run, name) for name in names] == [0.5, 0.25, 2.0, None]
    with pytest.raises(ArgumentError, match="--metric note: stock has str 'text', not a number"):
        find_metric(run, "note")


# --- criteria ---------------------------------------------------------------------------------------------------------


def test_criteria_that_hold_pass_and_each_can_fail_alone() -> None:
    limits = {"min_speedup": LEAST, "max_loss_delta": 0.0, "max_memory_gib": 1.5, "max_metric_drop": 0.0}
    result = analyzed(three_rounds(), max_rounds=3, **limits)
    assert (result["passed"], result["against"]["stock"]["ratio"]["value"]) == (True, 4.0)
    assert [line["line"].split(":")[0] for line in result["criteria"]] == [
        f"PASS  speed against stock at least {LEAST:g}x",
        "PASS  final training loss above that of stock by at most 0",
        "PASS  eval_loss worse than that of stock by at most 0",
        "PASS  peak memory at most 1.5 GiB",
    ]
    for name, limit in {"min_speedup": 2.1, "max_loss_delta": 0.4, "max_memory_gib": 1.4}.items():
        assert not analyzed(three_rounds((3.0, 2.5)), **{name: limit})["passed"]
    worse = analyzed(three_rounds((3.0, 1.5)), greater_is_better=True, max_metric_drop=0.4)
    assert (worse["against"]["stock"]["metric_drop"], worse["passed"]) == (0.5, False)
    assert not analyzed(three_rounds((3.0, math.nan)), max_loss_delta=9.0)["passed"]
    result = analyzed(three_rounds(), metric="absent", max_metric_drop=9.0)
    assert ("not measured" in result["criteria"][0]["line"], result["passed"]) == (True, False)


# --- noise ------------------------------------------------------------------------------------------------------------


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


def test_what_fails_anyway_is_not_too_noisy() -> None:
    noisy = {"ratio": {"value": 2.0}, "decided_by": (1.99, 2.0), "loss": None, "metric_drop": None}
    for limit, is_noisy in ((1.5, True), (0.5, False)):
        args = CompareArguments(min_speedup=2.0, max_memory_gib=limit)
        assert is_too_noisy(check_criteria(args, {"stock": noisy}, 1.0)) == is_noisy


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


@pytest.fixture
def scripted(monkeypatch) -> Any:
    """Makes runs whose rounds have given ratios of speed; returns the rounds and roles that ran, in order."""

    def script(ratios: list[float]) -> list[tuple[int, str]]:
        ran: list[tuple[int, str]] = []

        def run_side(args, shared, side, round_):
            ran.append((round_, side.role))
            is_base = side.role == "baseline"
            return make_run(BASE if is_base else FAST, round_, 1.0 if is_base else 1 / ratios[round_])

        monkeypatch.setattr(comparison, "run_side", run_side)
        return ran

    return script


def test_rounds_are_added_until_they_decide_and_sides_take_turns(scripted, tmp_path) -> None:
    def compare(ratios: list[float], **given: Any) -> tuple[dict[str, Any], list[tuple[int, str]]]:
        ran = scripted(ratios)
        return comparison.compare(CompareArguments(output_dir=str(tmp_path), baseline=["stock"], **given)), ran

    result, ran = compare([2.0, 2.6, 2.1, 2.3, 2.2, 2.2, 2.2, 2.2, 2.2], min_speedup=1.5)
    assert (result["passed"], result["too_noisy"], 3 < result["rounds"] < 9) == (True, False, True)
    assert ran == [(round_, role) for round_ in range(result["rounds"]) for role in ("baseline", "optimized")]
    assert compare([2.0, 2.01, 2.0], min_speedup=1.5)[0]["rounds"] == 3
    assert compare([1.0, 4.0] * 5, max_memory_gib=9.0)[0]["rounds"] == 3  # no speed to judge
    result, _ = compare([1.0, 4.0] * 5, min_speedup=2.0, max_rounds=5)
    assert (result["passed"], result["too_noisy"], result["rounds"]) == (False, True, 5)
    assert "TOO NOISY TO TELL  speed against stock at least 2x" in (tmp_path / "comparison.md").read_text()


def test_the_exit_status_says_which_and_one_round_is_strict_json(scripted, monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(ROOT / "recipes")
    main = importlib.import_module("hf_ext.comparing.command").main
    words = ["--output_dir", str(tmp_path), "--baseline", "stock", "--min_speedup", "2"]
    for ratios, status in (([3.0] * 3, 0), ([1.0] * 3, 3), ([1.0, 4.0, 1.0], 4)):
        scripted(ratios)
        assert main([*words, "--max_rounds", "3"]) == status
    assert main([*words, "--rounds", "1", "--max_rounds", "1"]) == 4
    written = json.loads((tmp_path / "comparison.json").read_text(), parse_constant=pytest.fail)
    assert written["against"]["stock"]["decided_by"] == [0.0, None]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_shows_every_side_its_ratio_and_other_batches() -> None:
    runs = three_rounds()
    report = format_comparison(analyzed(runs))
    assert "**max_speed / stock: 4.00x** [2.00, 4.00] in residues per second (rounds 2.00-4.00)" in report
    assert all(f"| {name} " in report for name in ("stock", "max_speed"))
    assert "Sequences per optimizer step are the same." in report
    for run in runs[1::2]:
        run.throughput["steps"]["sequences"] = [8.0] * 20
    assert "Sequences per optimizer step DIFFER (8 against 4)" in format_comparison(analyzed(runs))
    result = analyzed([make_run(BASE, 0, 1.0), make_run(FAST, 0, 0.5, unit="sequences")], rounds=1)
    assert (result["unit"], result["sides"]["stock"]["rate"]["value"]) == ("sequences", 4.0)  # the unit of both


def test_speedups_that_do_not_pay_are_named() -> None:
    runs = three_rounds()
    for name, seconds in (("slow", 0.4), ("useful", 1.0)):
        side = Side(f"without {name}", "without", (), speedup=name)
        runs += [make_run(side, round_, seconds * fast) for round_, fast in enumerate((1.0, 1.0, 0.5))]
    runs += [SideRun(Side("only big", "only", (), speedup="big"), 0, error="exit status 1\nCUDA out of memory")]
    report = format_comparison(analyzed(runs))
    for line in (
        "- slow (leaving it out): 0.80x [0.80, 0.80], does not pay here",
        "- useful (leaving it out): 2.00x [2.00, 2.00], pays here",
        "- big (alone): failed: CUDA out of memory",
    ):
        assert line in report


def two_sides(**changes: Any) -> list[SideRun]:
    """Slow: steps of 1 s, 10,800 an epoch, after 10 s. Fast: 0.5 s, 1,800 an epoch, after 900 s."""
    runs = []
    for round_ in range(2):
        for side, seconds, before, steps in ((BASE, 1.0, 10.0, 10_800), (FAST, 0.5, 900.0, 1_800)):
            known = {"totals": {"seconds": 20 * seconds, "sequences": 80.0}, "rows_per_epoch": 7200}
            known |= {"steps_per_epoch": steps, "seconds_before_training": before, **changes}
            runs.append(make_run(side, round_, seconds, **known))
    return runs


def test_epochs_come_after_what_is_paid_once() -> None:
    runs = two_sides()
    for run in runs[1::2]:
        run.plan = {"decisions": [{"name": "embedding_cache", "evidence": {"encoding_seconds": 840.0}}]}
    result = analyzed(runs, rounds=2)
    slow, fast = (result["timeline"]["sides"][name] for name in ("stock", "max_speed"))
    # 5 s of warm-up are 2 s more than three steps of 1 s, and 3.5 s more than three of 0.5 s.
    assert (slow["one_off_seconds"], slow["epoch_seconds"]) == (12.0, 10_800.0)
    assert (fast["one_off_seconds"], fast["epoch_seconds"]) == (903.5, 900.0)
    assert fast["saved_seconds"] == [9_008.5, 98_108.5, 246_608.5, 494_108.5]  # after 1, 10, 25, 50 epochs
    lines = format_comparison(result).splitlines()
    table = [line for line in lines[lines.index("## Timeline") :] if line.startswith("|")]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in (table[0], table[2], table[5])] == [
        ["after epoch", "stock", "max_speed", "saved"],
        ["1", "3 h", "30 min 3 s", "2 h 30 min"],
        ["50", "6 d 6 h", "12 h 45 min", "5 d 17 h"],
    ]
    assert "- stock: measured on 160 rows, projected to epochs of 7,200; before the first step 12 s." in lines
    assert any(line.endswith("before the first step 15 min 3 s, of these 14 min embedding once.") for line in lines)
    assert "| -14 min 1 s " in format_comparison(analyzed(two_sides(steps_per_epoch=100), rounds=2))
    for lacking in ("rows_per_epoch", "steps_per_epoch"):  # a stream has no epochs
        assert analyzed(two_sides(**{lacking: None}), rounds=2)["timeline"] is None
