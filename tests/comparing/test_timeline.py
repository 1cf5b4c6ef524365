"""When which epoch is done: one-off costs and epochs by hand, in the table and in what comparison.json holds."""

from __future__ import annotations

from typing import Any

import pytest
from test_comparing import BASE, FAST, make_run

from hf_ext.comparing.comparison import analyze
from hf_ext.comparing.measures import make_timeline
from hf_ext.comparing.report import format_comparison
from hf_ext.comparing.running import SideRun
from hf_ext.comparing.sides import CompareArguments, Side


def timed_run(side: Side, round_: int, seconds: float, before: float, epoch_steps: float, **changes: Any) -> SideRun:
    """20 measured steps of 4 rows; 3 warm-up steps that took 5 s together."""
    totals = {"seconds": 20 * seconds, "sequences": 80.0}
    known = {"totals": totals, "rows_per_epoch": 7200, "steps_per_epoch": epoch_steps}
    return make_run(side, round_, seconds, seconds_before_training=before, **{**known, **changes})


def two_sides() -> list[SideRun]:
    """Slow: steps of 1 s, 10,800 an epoch. Fast: 0.5 s, 1,800 an epoch, after 900 s."""
    runs = []
    for round_ in range(2):
        runs += [timed_run(BASE, round_, 1.0, 10.0, 10_800), timed_run(FAST, round_, 0.5, 900.0, 1_800)]
    return runs


def analyzed(runs: list[SideRun]) -> dict[str, Any]:
    return {"recipe": "r.py", "rounds": 2, **analyze(CompareArguments(rounds=2), runs)}


def test_epochs_come_after_what_is_paid_once() -> None:
    timeline = analyzed(two_sides())["timeline"]
    slow, fast = timeline["sides"]["stock"], timeline["sides"]["max_speed"]
    assert (timeline["epochs"], timeline["baseline"]) == ([1, 10, 25, 50], "stock")
    # 5 s of warm-up are 2 s more than three steps of 1 s, and 3.5 s more than three of 0.5 s.
    assert (slow["one_off_seconds"], slow["epoch_seconds"]) == (12.0, 10_800.0)
    assert (fast["one_off_seconds"], fast["epoch_seconds"]) == (903.5, 900.0)
    assert slow["seconds"] == [10_812.0, 108_012.0, 270_012.0, 540_012.0]
    assert fast["seconds"] == [1_803.5, 9_903.5, 23_403.5, 45_903.5]
    assert fast["saved_seconds"] == [9_008.5, 98_108.5, 246_608.5, 494_108.5]
    assert (slow["rows_measured"], slow["rows_per_epoch"]) == (160, 7200)


def test_a_side_that_pays_more_once_than_it_gains_has_saved_nothing_yet() -> None:
    runs = [timed_run(BASE, 0, 1.0, 0.0, 100), timed_run(FAST, 0, 0.5, 500.0, 100)]
    result = {"recipe": "r.py", "rounds": 1, **analyze(CompareArguments(rounds=1), runs)}
    saved = result["timeline"]["sides"]["max_speed"]["saved_seconds"]
    assert (saved[0], saved[-1]) == (-451.5, 1998.5)
    assert "| -7 min 31 s |" in format_comparison(result)


def test_the_report_says_hours_days_and_what_they_rest_on() -> None:
    runs = two_sides()
    for run in runs[1::2]:
        run.plan = {"decisions": [{"name": "embedding_cache", "evidence": {"encoding_seconds": 840.0}}]}
    lines = format_comparison(analyzed(runs)).splitlines()
    table = [line for line in lines[lines.index("## Timeline") :] if line.startswith("|")]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in (table[0], table[2], table[5])] == [
        ["after epoch", "stock", "max_speed", "saved"],
        ["1", "3 h", "30 min 3 s", "2 h 30 min"],
        ["50", "6 d 6 h", "12 h 45 min", "5 d 17 h"],
    ]
    assert "- stock: measured on 160 rows, projected to epochs of 7,200; before the first step 12 s." in lines
    assert any(line.endswith("before the first step 15 min 3 s, of these 14 min embedding once.") for line in lines)


@pytest.mark.parametrize("lacking", ["rows_per_epoch", "steps_per_epoch"])
def test_a_stream_has_no_epochs_and_so_no_timeline(lacking) -> None:
    runs = [timed_run(BASE, 0, 1.0, 1.0, 10), timed_run(FAST, 0, 0.5, 1.0, 10, **{lacking: None})]
    groups = {"stock": runs[:1], "max_speed": runs[1:]}
    assert make_timeline(groups, "stock") is None
    runs[1].throughput[lacking] = 10
    assert make_timeline(groups, "stock") is not None
