"""Comparisons of hand-made runs: sides, order, commands, statistics, criteria, what each speed-up brings."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from hf_ext.comparing.comparison import analyze, write_result
from hf_ext.comparing.measures import (
    compare_losses,
    find_metric,
    rate_interval,
    ratio_interval,
    resample_rates,
    smooth,
)
from hf_ext.comparing.report import format_comparison, plot_comparison
from hf_ext.comparing.running import ChildFailed, SideRun, run_all, run_child
from hf_ext.comparing.sides import CompareArguments, Side, make_ablations, make_command, make_sides, merge_yaml
from hf_ext.errors import ArgumentError

BASE, FAST = Side("stock", "baseline", ()), Side("max_speed", "optimized", ())


def make_run(side: Side, round_: int, seconds: float, losses=(3.0, 2.0), unit="residues", **changes) -> SideRun:
    """A run of 20 equal steps of `seconds` each, 100 residues and 4 sequences per step."""
    throughput = {
        "unit": unit,
        "device": "T4",
        "measured_steps": 20,
        "warmup_steps": 3,
        "warmup_seconds": 5.0,
        "peak_memory_gib": 1.5,
        "rates": {
            f"{unit}_per_s": 100 / seconds,
            "sequences_per_s": 4 / seconds,
            "padded_tokens_per_s": 150 / seconds,
            "data_wait_share": 0.1,
        },
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


# --- sides, order, commands -------------------------------------------------------------------------------------------


def test_sides_are_presets_yaml_files_and_stock(tmp_path) -> None:
    path = tmp_path / "best.yaml"
    path.write_text("learning_rate: 1e-3\n")
    args = CompareArguments(
        baseline=["stock", str(path), "stock"], baseline_args=["", "--bf16 true", ""], optimized="max_speed+low_disk"
    )
    assert make_sides(args) == [
        Side("stock", "baseline", ("--preset", "baseline", "--stock_trainer", "true")),
        Side("best", "baseline", ("--bf16", "true"), config=str(path)),
        Side("stock#2", "baseline", ("--preset", "baseline", "--stock_trainer", "true")),
        Side("max_speed+low_disk", "optimized", ("--preset", "max_speed+low_disk")),
    ]


def test_one_text_of_arguments_serves_all_baselines() -> None:
    args = CompareArguments(baseline=["baseline", "reproducible"], baseline_args=["--max_steps 5"])
    assert [side.arguments[-2:] for side in make_sides(args)[:2]] == [("--max_steps", "5")] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimized": "max_sped"}, r"--optimized 'max_sped': \['max_sped'\] is no preset.*max_speed"),
        ({"baseline": ["absent.yaml"]}, "--baseline absent.yaml: no such file"),
    ],
)
def test_unknown_sides_are_refused_by_name(settings, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_sides(CompareArguments(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 0}, "--rounds 0: must be at least 1"),
        ({"baseline": ["a", "b", "c"], "baseline_args": ["x", "y"]}, "2 texts for 3 baselines"),
    ],
)
def test_impossible_arguments_are_refused(settings, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        CompareArguments(**settings)


def test_sides_take_turns() -> None:
    order = []

    def run_one(side: Side, round_: int) -> SideRun:
        order.append((round_, side.name))
        return SideRun(side, round_)

    run_all([BASE, Side("best", "baseline", ()), FAST], 2, run_one)
    assert order == [(0, "stock"), (0, "best"), (0, "max_speed"), (1, "stock"), (1, "best"), (1, "max_speed")]


def test_ablations_join_every_round_and_may_fail() -> None:
    alone = Side("only x", "only", (), speedup="x")

    def run_one(side: Side, round_: int) -> SideRun:
        if side is alone:
            raise ChildFailed("only x: out of memory")
        return SideRun(side, round_)

    runs = run_all([BASE, FAST], 2, run_one, lambda run: [alone])
    assert [(run.round, run.side.name) for run in runs] == [
        (0, "stock"),
        (0, "max_speed"),
        (0, "only x"),
        (1, "stock"),
        (1, "max_speed"),
        (1, "only x"),
    ]
    assert runs[2].error == "only x: out of memory"


def test_the_command_of_a_side_lets_later_arguments_win() -> None:
    args = CompareArguments(recipe="r.py", config="shared.yaml", seed=7)
    side = Side("max_speed", "optimized", ("--preset", "max_speed"))
    assert make_command(args, ["--max_steps", "9"], side, Path("out/max_speed/round_1"), 1) == [
        *(sys.executable, "r.py", "--config", "shared.yaml"),
        *("--logging_strategy", "steps", "--logging_steps", "10", "--seed", "8"),
        *("--report_to", "none", "--disable_tqdm", "true", "--embedding_cache_dir", "out/max_speed/round_1/embeddings"),
        *("--max_steps", "9", "--preset", "max_speed", "--output_dir", "out/max_speed/round_1"),
    ]


def test_the_stock_trainer_gets_no_embedding_cache() -> None:
    stock, preset, _ = make_sides(CompareArguments(baseline=["stock", "baseline"]))
    commands = [make_command(CompareArguments(), [], side, Path("f"), 0) for side in (stock, preset)]
    assert ["--embedding_cache_dir" in command for command in commands] == [False, True]
    assert commands[0][-6:] == ["--preset", "baseline", "--stock_trainer", "true", "--output_dir", "f"]


def test_a_sides_yaml_goes_on_top_of_the_shared_one_as_it_is_written(tmp_path) -> None:
    (tmp_path / "shared.yaml").write_text("eval_strategy: no\nlearning-rate: 1e-3\nspeedups: [all]\n")
    (tmp_path / "own.yaml").write_text("learning_rate: 5e-4\n")
    merged = merge_yaml(str(tmp_path / "shared.yaml"), str(tmp_path / "own.yaml"))
    assert merged.splitlines() == ["eval_strategy: no", "speedups: [all]", "learning_rate: 5e-4"]
    args = CompareArguments(recipe="r.py", config=str(tmp_path / "shared.yaml"))
    side = Side("own", "optimized", (), config=str(tmp_path / "own.yaml"))
    command = make_command(args, [], side, tmp_path / "out" / "round_0", 0)
    assert Path(command[command.index("--config") + 1]).read_text() == merged
    (tmp_path / "own.yaml").write_text("- 1\n")
    with pytest.raises(ArgumentError, match="top level must be lines"):
        merge_yaml(str(tmp_path / "shared.yaml"), str(tmp_path / "own.yaml"))


def test_every_applied_speedup_is_left_out_and_run_alone() -> None:
    plan = {
        "decisions": [
            {"name": "a", "status": "applied"},
            {"name": "b", "status": "skipped"},
            {"name": "c", "status": "off"},
        ]
    }
    assert make_ablations(Side("fast", "optimized", ("--preset", "p")), plan) == [
        Side("without a", "without", ("--preset", "p", "--without", "a", "c"), speedup="a"),
        Side("only a", "only", ("--preset", "p", "--speedups", "a"), speedup="a"),
    ]


# --- children ---------------------------------------------------------------------------------------------------------


def test_a_child_that_fails_shows_the_end_of_its_log(tmp_path) -> None:
    command = [sys.executable, "-c", "print('line 1'); raise MemoryError('no more')"]
    with pytest.raises(ChildFailed, match=r"stock, round 2: exit status 1.\n(.|\n)*line 1(.|\n)*MemoryError: no more"):
        run_child(command, BASE, 2, tmp_path / "run")


def test_a_child_without_throughput_or_without_measured_steps_is_an_error(tmp_path) -> None:
    with pytest.raises(ChildFailed, match=r"wrote no throughput.json.*add_callback\(ThroughputCallback"):
        run_child([sys.executable, "-c", "pass"], BASE, 0, tmp_path / "a")
    text = json.dumps({"measured_steps": 0, "warmup_steps": 3})
    code = f"open({str(tmp_path / 'b' / 'throughput.json')!r}, 'w').write({text!r})"
    with pytest.raises(ChildFailed, match="all 3 steps were warm-up"):
        run_child([sys.executable, "-c", code], BASE, 0, tmp_path / "b")


RANK = """
import os, subprocess, sys, time
if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, *sys.argv, "rank"], start_new_session=True).wait()
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""


COMPARE = """
import sys
from pathlib import Path
from hf_ext.comparing.running import run_child
from hf_ext.comparing.sides import Side
run_child([sys.executable, *sys.argv[1:3]], Side("stock", "baseline", ()), 0, Path(sys.argv[3]))
"""


@pytest.mark.nightly
def test_interrupted_nothing_that_a_side_started_goes_on(tmp_path) -> None:
    script, started = tmp_path / "side.py", tmp_path / "pid"
    script.write_text(RANK)
    words = [sys.executable, "-c", COMPARE, str(script), str(started), str(tmp_path / "run")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        ends = time.monotonic() + 60
        while not (started.exists() and started.read_text()) and time.monotonic() < ends:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)  # to it alone: a terminal's Ctrl-C would reach the whole group
        try:
            assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert not psutil.pid_exists(int(started.read_text()))


def test_a_folder_of_another_run_is_not_reused(tmp_path) -> None:
    with pytest.raises(ArgumentError, match="is there already"):
        run_child([sys.executable, "-c", "pass"], BASE, 0, tmp_path)


# --- statistics -------------------------------------------------------------------------------------------------------


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


def test_the_interval_of_noisy_steps_holds_the_true_ratio_and_narrows_with_steps() -> None:
    generator = np.random.default_rng(1)

    def interval(num_steps: int):
        sides = [
            resample_rates(
                [np.full(num_steps, 1.0)] * 3, [mean * generator.uniform(0.5, 1.5, num_steps) for _ in range(3)], seed=0
            )
            for mean in (1.0, 2.0)
        ]
        return ratio_interval(*sides)

    short, long = interval(20), interval(500)
    assert short.low < 2.0 < short.high
    assert long.low < 2.0 < long.high
    assert long.high - long.low < 0.5 * (short.high - short.low)


def test_loss_differences_by_hand() -> None:
    runs = [make_run(FAST, 0, 1.0, (3.0, 2.5)), make_run(FAST, 1, 1.0, (3.5, 2.0))]
    other = [make_run(BASE, 0, 1.0, (3.0, 2.0)), make_run(BASE, 1, 1.0, (3.0, 2.0))]
    assert compare_losses(runs, other) == {"final": 0.25, "mean": 0.25, "largest_gap": 0.5}


@pytest.mark.parametrize("losses", [(3.0, 2.0, math.nan), (3.0, math.nan, 2.0), (math.nan, 3.0, 2.0)])
def test_a_loss_that_is_no_number_is_not_a_small_gap(losses) -> None:
    other = [make_run(BASE, i, 1.0, (3.0, 2.0, 1.0)) for i in range(2)]
    for runs in (
        [make_run(FAST, 0, 1.0, losses), make_run(FAST, 1, 1.0)],
        [make_run(FAST, i, 1.0, losses) for i in (0, 1)],
    ):
        assert math.isnan(compare_losses(runs, other)["largest_gap"])
    assert compare_losses(runs, [_without_losses()]) is None


def _without_losses() -> SideRun:
    run = make_run(BASE, 0, 1.0)
    run.throughput["log_history"] = []
    return run


def test_smoothing_is_a_trailing_mean_over_a_tenth() -> None:
    assert smooth([1.0, 3.0]) == [1.0, 3.0]
    assert smooth([float(i) for i in range(20)])[:4] == [0.0, 0.5, 1.5, 2.5]


def test_the_metric_is_found_by_path_and_in_the_log() -> None:
    run = make_run(BASE, 0, 1.0)
    run.results = {"test": {"spearman": {"value": 0.5}}, "eval_accuracy": 0.25, "note": "text"}
    assert find_metric(run, "test.spearman.value") == 0.5
    assert find_metric(run, "eval_accuracy") == 0.25
    assert find_metric(run, "eval_loss") == 2.0
    assert find_metric(run, "absent") is None
    with pytest.raises(ArgumentError, match="--metric note: stock has str 'text', not a number"):
        find_metric(run, "note")


# --- the whole analysis -----------------------------------------------------------------------------------------------


def test_criteria_that_hold_pass() -> None:
    args = CompareArguments(
        min_speedup=LEAST, max_rounds=3, max_loss_delta=0.0, max_memory_gib=1.5, max_metric_drop=0.0
    )
    result = analyze(args, three_rounds())
    assert result["passed"]
    assert result["against"]["stock"]["ratio"]["value"] == 4.0
    assert [line["line"].split(":")[0] for line in result["criteria"]] == [
        f"PASS  speed against stock at least {LEAST:g}x",
        "PASS  final training loss above that of stock by at most 0",
        "PASS  eval_loss worse than that of stock by at most 0",
        "PASS  peak memory at most 1.5 GiB",
    ]


@pytest.mark.parametrize(
    "limit", [{"min_speedup": 2.1}, {"max_loss_delta": 0.4}, {"max_memory_gib": 1.4}, {"max_metric_drop": 0.4}]
)
def test_each_criterion_can_fail_alone(limit) -> None:
    result = analyze(CompareArguments(**limit), three_rounds(fast_losses=(3.0, 2.5)))
    assert not result["passed"]
    assert [criterion["passed"] for criterion in result["criteria"]] == [False]


def test_a_diverged_loss_and_a_metric_that_was_not_measured_fail() -> None:
    assert not analyze(CompareArguments(max_loss_delta=9.0), three_rounds((3.0, math.nan)))["passed"]
    result = analyze(CompareArguments(metric="absent", max_metric_drop=9.0), three_rounds())
    assert "not measured" in result["criteria"][0]["line"]
    assert not result["passed"]


def test_a_lower_metric_is_worse_where_greater_is_better() -> None:
    args = CompareArguments(greater_is_better=True)
    assert analyze(args, three_rounds((3.0, 1.5)))["against"]["stock"]["metric_drop"] == 0.5


def test_sides_counted_in_different_units_are_compared_by_sequences() -> None:
    runs = [make_run(BASE, 0, 1.0), make_run(FAST, 0, 0.5, unit="sequences")]
    result = analyze(CompareArguments(rounds=1), runs)
    assert (result["unit"], result["sides"]["stock"]["rate"]["value"]) == ("sequences", 4.0)


def test_other_batches_are_pointed_out() -> None:
    runs = three_rounds()
    assert runs[0].throughput["steps"]["sequences"] == [4.0] * 20
    report = format_comparison({**analyze(CompareArguments(), runs), "recipe": "r.py", "rounds": 3})
    assert "Sequences per optimizer step are the same." in report
    for run in runs[1::2]:
        run.throughput["steps"]["sequences"] = [8.0] * 20
    report = format_comparison({**analyze(CompareArguments(), runs), "recipe": "r.py", "rounds": 3})
    assert "Sequences per optimizer step DIFFER (8 against 4)" in report


def test_speedups_that_do_not_pay_are_named() -> None:
    runs = three_rounds()
    for name, seconds in (("slow", 0.4), ("useful", 1.0)):
        side = Side(f"without {name}", "without", (), speedup=name)
        runs += [make_run(side, round_, seconds * fast) for round_, fast in enumerate((1.0, 1.0, 0.5))]
    runs += [SideRun(Side("only big", "only", (), speedup="big"), 0, error="exit status 1\nCUDA out of memory")]
    result = analyze(CompareArguments(), runs)
    rows = {row["speedup"]: row for row in result["ablation"]}
    assert rows["slow"]["ratio"]["value"] == pytest.approx(0.8)
    assert rows["slow"]["verdict"] == "does not pay here"
    assert (rows["useful"]["ratio"]["value"], rows["useful"]["verdict"]) == (2.0, "pays here")
    assert rows["big"] == {"speedup": "big", "how": "only", "ratio": None, "verdict": "failed: CUDA out of memory"}
    report = format_comparison({**result, "recipe": "r.py", "rounds": 3})
    assert "- slow (leaving it out): 0.80x [0.80, 0.80], does not pay here" in report
    assert "- big (alone): failed: CUDA out of memory" in report


def test_the_report_and_the_plot_show_every_side(tmp_path) -> None:
    runs = three_rounds()
    result = {**analyze(CompareArguments(), runs), "recipe": "r.py", "rounds": 3}
    report = format_comparison(result)
    assert "**max_speed / stock: 4.00x** [2.00, 4.00] in residues per second (rounds 2.00-4.00)" in report
    assert all(f"| {name} " in report for name in ("stock", "max_speed"))
    path = plot_comparison(result, runs, tmp_path / "comparison.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_merged_yaml_reads_back_as_yaml(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("a: [1, 2]\nb: {c: text}\n")
    (tmp_path / "b.yaml").write_text("a: 3\n")
    assert yaml.safe_load(merge_yaml(str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"))) == {
        "a": 3,
        "b": {"c": "text"},
    }


def test_one_round_says_no_interval_and_is_strict_json(tmp_path) -> None:
    runs = [make_run(BASE, 0, 1.0), make_run(FAST, 0, 0.5, (3.0, math.nan))]
    result = {"recipe": "r", "arguments": [], "rounds": 1, **analyze(CompareArguments(min_speedup=1.5, rounds=1), runs)}
    write_result(tmp_path, result, format_comparison(result), runs)

    def refuse(name):
        raise AssertionError(name)

    written = json.loads((tmp_path / "comparison.json").read_text(), parse_constant=refuse)
    assert written["against"]["stock"]["decided_by"] == [0.0, None]
    assert (written["criteria"][0]["verdict"], written["passed"]) == ("TOO NOISY TO TELL", False)
