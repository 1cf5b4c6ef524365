"""What a comparison concludes from hand-made runs: ratios, criteria, noise, and what the report says."""

import json
import math
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from inside import CompareArguments, Side, SideRun

from hf_ext.comparing.comparison import analyze
from hf_ext.comparing.measures import find_metric, paired_ratio
from hf_ext.comparing.report import format_comparison
from hf_ext.errors import ArgumentError
from hf_ext.reporting import Throughput
from hf_ext.text import write_json

pytestmark = pytest.mark.internals
BASE, FAST = Side("stock", "baseline", ()), Side("max_speed", "optimized", ())


def make_run(side: Side, round_: int, seconds: float, losses=(3.0, 2.0), unit="residues", **changes) -> SideRun:
    """A run of 20 steps of `seconds` each, 100 residues and 4 sequences per step."""
    log = [{"loss": loss, "step": 10 * (i + 1)} for i, loss in enumerate(losses)]
    throughput = Throughput(
        unit=unit,
        device="T4",
        measured_steps=20,
        warmup_steps=3,
        warmup_seconds=5.0,
        seconds_before_training=10.0,
        steps_per_epoch=100,
        peak_memory_gib=1.5,
        rates={"data_wait_share": 0.1},
        totals={"seconds": 20 * seconds, "residues": 2000.0, "sequences": 80.0},
        log_history=[*log, {"eval_loss": losses[-1], "step": 20}],
    )
    return SideRun(side, round_, 60.0, replace(throughput, **changes))


LEAST = 1.17  # the interval of ratios 2, 4, 4 begins at exp(mean - 4.303 * deviation / sqrt(3)) of logarithms: 1.1748


def three_rounds(fast_losses=(3.0, 2.0)) -> list[SideRun]:
    """Baseline steps of 1, 2, 1 s; optimized ones of 0.5, 0.5, 0.25 s: ratios 2, 4, 4."""
    runs = []
    for round_, (slow, fast) in enumerate([(1.0, 0.5), (2.0, 0.5), (1.0, 0.25)]):
        runs += [make_run(BASE, round_, slow), make_run(FAST, round_, fast, fast_losses)]
    return runs


def analyzed(runs: list[SideRun], **given: Any) -> dict[str, Any]:
    return {"recipe": "r.py", "rounds": 3, **analyze(CompareArguments(**given), runs)}


def test_the_interval_of_a_ratio_by_hand() -> None:
    # Logarithms ln 2, ln 4, ln 4: mean 1.1552, deviation 0.4002; Student's 97.5 % point is 4.3027.
    found = paired_ratio(np.array([2.0, 4.0, 4.0]), np.ones(3))
    assert (round(found.value, 3), round(found.low, 3), round(found.high, 3)) == (3.175, 1.175, 8.579)
    one = paired_ratio(np.array([2.0]), np.ones(1))
    assert (one.value, one.low, one.high) == (2.0, 0.0, math.inf)


def test_of_three_rounds_the_interval_holds_the_true_ratio() -> None:
    generator = np.random.default_rng(0)
    found = [paired_ratio(np.exp(generator.normal(0, 0.1, 3)), np.ones(3)) for _ in range(400)]
    assert 0.92 < np.mean([one.low <= 1 <= one.high for one in found]) < 0.98


def test_losses_are_compared_at_their_ends_and_one_that_is_no_number_is_not_small() -> None:
    result = analyzed(three_rounds((3.0, 2.5)))
    assert result["against"]["stock"]["loss"] == {"value": 0.5, "low": 0.5, "high": 0.5}
    assert not analyzed(three_rounds((3.0, math.nan)), max_loss_delta=9.0)["passed"]
    runs = three_rounds()
    runs[0].throughput = replace(runs[0].throughput, log_history=[])
    assert analyzed(runs)["against"]["stock"]["loss"] is None
    assert not analyzed(runs, max_loss_delta=9.0)["passed"]


def test_the_metric_is_found_by_path_and_in_the_log() -> None:
    run = make_run(BASE, 0, 1.0)
    run.results = {"test": {"spearman": {"value": 0.5}}, "eval_accuracy": 0.25, "note": "text"}
    names = ("test.spearman.value", "eval_accuracy", "eval_loss", "absent")
    assert [find_metric(run, name) for name in names] == [0.5, 0.25, 2.0, None]
    with pytest.raises(ArgumentError, match="--metric note: stock has str 'text', not a number"):
        find_metric(run, "note")


def test_criteria_that_hold_pass_and_each_can_fail_alone() -> None:
    limits = {"min_speedup": LEAST, "max_loss_delta": 0.0, "max_memory_gib": 1.5, "max_metric_drop": 0.0}
    result = analyzed(three_rounds(), **limits)
    assert result["passed"]
    assert [line["line"].split(":")[0] for line in result["criteria"]] == [
        f"PASS  speed against stock at least {LEAST:g}x",
        "PASS  final training loss above that of stock by at most 0",
        "PASS  eval_loss worse than that of stock by at most 0",
        "PASS  peak memory at most 1.5 GiB",
    ]
    for name, limit in {"min_speedup": 2.1, "max_loss_delta": 0.4, "max_memory_gib": 1.4}.items():
        assert not analyzed(three_rounds((3.0, 2.5)), **{name: limit})["passed"]
    worse = analyzed(three_rounds((3.0, 1.5)), greater_is_better=True, max_metric_drop=0.4)
    assert (worse["against"]["stock"]["metric_drop"]["value"], worse["passed"]) == (0.5, False)
    result = analyzed(three_rounds(), metric="absent", max_metric_drop=9.0)
    assert ("not measured" in result["criteria"][0]["line"], result["passed"]) == (True, False)


def test_a_drop_within_a_share_of_the_baselines_metric_is_judged_by_its_interval() -> None:
    def judged(limit: str, rounds: int = 3, **given: Any) -> str:
        runs = []
        # Drops of 0.04, 0.06, 0.02 from 2.0: mean 0.04, half 4.3027 * 0.02 / sqrt(3) = 0.0497: [-0.0097, 0.0897].
        for round_, last in enumerate([2.04, 2.06, 2.02][:rounds]):
            runs += [make_run(BASE, round_, 1.0), make_run(FAST, round_, 0.5, (3.0, last))]
        (found,) = analyzed(runs, max_metric_drop=limit, **given)["criteria"]
        assert found["line"].startswith(found["verdict"])
        return found["verdict"]

    assert judged("5%") == "PASS"  # of 2.0: 0.1
    assert judged("3%") == "TOO NOISY TO TELL"  # 0.06
    assert judged("-1%") == "FAIL"  # more than 0.02 better
    assert judged("3%", greater_is_better=True) == "PASS"
    assert judged("3%", rounds=1) == "TOO NOISY TO TELL"  # which says nothing of how rounds vary
    assert (judged("0.05", rounds=1), judged("0.03", rounds=1)) == ("PASS", "FAIL")
    assert judged("3%", metric="absent") == "FAIL"


def test_a_limit_that_is_no_number_is_refused_before_the_first_run(tmp_path) -> None:
    for limit in ("three", "3%%", "%", "nan", "inf%"):
        with pytest.raises(ArgumentError, match="max_metric_drop"):
            commands.compare(["--output_dir", str(tmp_path / "x"), "--max_metric_drop", limit])
    assert not (tmp_path / "x").exists()


def test_what_fails_anyway_is_not_too_noisy() -> None:
    for limit, is_noisy in ((1.5, True), (0.5, False)):
        assert analyzed(three_rounds(), min_speedup=2.0, max_memory_gib=limit)["too_noisy"] == is_noisy


RECIPE = """
import pathlib, shutil, sys
folder = pathlib.Path(sys.argv[-1])  # SIDE/round_N
shutil.copy(pathlib.Path(__file__).parent / f"{folder.parent.name}-{folder.name}.json", folder / "throughput.json")
"""


@pytest.fixture
def run_ratios(tmp_path) -> Any:
    """Compares runs whose rounds have given ratios of speed; returns the exit status, and the folder of results."""

    def run(ratios: list[float]) -> tuple[int, Path]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        (folder / "recipe.py").write_text(RECIPE)
        for round_, ratio in enumerate(ratios):
            for side, seconds in ((BASE, 1.0), (FAST, 1 / ratio)):
                write_json(
                    folder / f"{side.name}-round_{round_}.json", asdict(make_run(side, round_, seconds).throughput)
                )
        given = ["--recipe", str(folder / "recipe.py"), "--output_dir", str(folder / "out"), "--baseline", "stock"]
        rounds = ["--rounds", str(len(ratios)), "--min_speedup", "2"]
        return commands.compare([*given, *rounds]), folder / "out"

    return run


def test_sides_take_turns_and_noise_is_said(run_ratios) -> None:
    status, folder = run_ratios([1.0, 4.0] * 2)
    written = sorted(folder.glob("*/*/throughput.json"), key=lambda path: path.stat().st_mtime_ns)
    assert [f"{path.parts[-3]} {path.parts[-2]}" for path in written] == [
        f"{side} round_{round_}" for round_ in range(4) for side in ("stock", "max_speed")
    ]
    result = json.loads((folder / "comparison.json").read_text())
    assert (status, result["passed"], result["too_noisy"], result["rounds"]) == (4, False, True, 4)
    assert "TOO NOISY TO TELL  speed against stock at least 2x" in (folder / "comparison.md").read_text()


def test_the_exit_status_says_which_and_one_round_is_strict_json(run_ratios) -> None:
    assert [run_ratios(ratios)[0] for ratios in ([3.0] * 3, [1.0] * 3)] == [0, 3]
    status, folder = run_ratios([1.0])
    written = json.loads((folder / "comparison.json").read_text(), parse_constant=pytest.fail)
    assert (status, written["against"]["stock"]["ratio"]) == (4, {"value": 1.0, "low": 0.0, "high": None})


def test_the_report_shows_every_side_its_ratio_and_other_batches() -> None:
    runs = three_rounds()
    report = format_comparison(analyzed(runs))
    assert "**max_speed / stock: 3.17x [1.17, 8.58]** in residues per second. Final training loss: +0 [+0" in report
    # 5 s of warm-up are 2 s more than three steps of 1 s; an epoch has 100 steps.
    assert "| stock | 100 (50 to 100) | 1.500 | 10 % | 12 s | 1 min 40 s | 1 min |" in " ".join(report.split())
    assert "Sequences per optimizer step are the same." in report
    for run in runs[1::2]:
        run.throughput = replace(run.throughput, totals={**run.throughput.totals, "sequences": 160.0})
    assert "Sequences per optimizer step DIFFER (8 against 4)" in format_comparison(analyzed(runs))
    result = analyzed([make_run(BASE, 0, 1.0), make_run(FAST, 0, 0.5, unit="sequences")], rounds=1)
    assert (result["unit"], result["sides"]["stock"]["rate"]["value"]) == ("sequences", 4.0)  # the unit of both


def test_speedups_that_do_not_pay_are_named() -> None:
    runs = three_rounds()
    for name, seconds in (("slow", 0.4), ("useful", 1.0)):
        side = Side(f"without {name}", "without", (), speedup=name)
        runs += [make_run(side, round_, seconds * fast) for round_, fast in enumerate((1.0, 1.0, 0.5))]
    runs += [SideRun(Side("without big", "without", (), speedup="big"), 0, error="exit status 1\nCUDA out of memory")]
    report = format_comparison(analyzed(runs))
    for line in (
        "- slow: 0.80x [0.80, 0.80], does not pay here",
        "- useful: 2.00x [2.00, 2.00], pays here",
        "- big: failed: CUDA out of memory",
    ):
        assert line in report
