"""What a comparison runs: sides, launch files, commands, the processes that it starts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from hf_ext.comparing.running import ChildFailed, SideRun, run_all, run_child
from hf_ext.comparing.sides import (
    CompareArguments,
    Launch,
    Side,
    make_ablations,
    make_command,
    make_sides,
    merge_yaml,
    read_launch,
)
from hf_ext.errors import ArgumentError

BASE, FAST = Side("stock", "baseline", ()), Side("max_speed", "optimized", ())
CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
CPU = str(CONFIGS / "cpu.yaml")
DDP = f"{CPU} --multi_gpu --num_processes 2"
TWO = Launch(CPU, 2, ("--multi_gpu", "--num_processes", "2"))
STOCK = ("--preset", "baseline", "--stock_trainer", "true")


# --- sides ------------------------------------------------------------------------------------------------------------


def test_sides_are_presets_yaml_files_and_stock(tmp_path) -> None:
    path = tmp_path / "best.yaml"
    path.write_text("learning_rate: 1e-3\n")
    args = CompareArguments(
        baseline=["stock", str(path), "stock"], baseline_args=["", "--bf16 true", ""], optimized="max_speed+low_disk"
    )
    assert make_sides(args) == [
        Side("stock", "baseline", STOCK),
        Side("best", "baseline", ("--bf16", "true"), config=str(path)),
        Side("stock#2", "baseline", STOCK),
        Side("max_speed+low_disk", "optimized", ("--preset", "max_speed+low_disk")),
    ]
    args = CompareArguments(baseline=["baseline", "reproducible"], baseline_args=["--max_steps 5"])
    assert [side.arguments[-2:] for side in make_sides(args)[:2]] == [("--max_steps", "5")] * 2  # one text for all


def test_each_side_is_named_after_its_launch_file_and_started_with_it() -> None:
    given = {"baseline": ["stock", "max_speed", "max_speed"], "baseline_launch": [CPU], "optimized_launch": DDP}
    args = CompareArguments(recipe="r.py", **given)
    sides = make_sides(args)
    assert [(side.name, side.launch) for side in sides] == [
        ("stock on cpu", Launch(CPU, 1)),
        ("max_speed on cpu", Launch(CPU, 1)),
        ("max_speed on cpu#2", Launch(CPU, 1)),
        ("max_speed on cpu x2", TWO),
    ]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    assert make_command(args, [], sides[3], Path("f"), 0)[:9] == [*launcher, CPU, *TWO.flags, "r.py"]
    plan = {"decisions": [{"name": "tf32", "status": "applied"}]}
    assert [side.launch for side in make_ablations(sides[3], plan)] == [TWO] * 2


def test_every_applied_speedup_is_left_out_and_run_alone() -> None:
    statuses = {"a": "applied", "b": "skipped", "c": "off"}
    plan = {"decisions": [{"name": name, "status": status} for name, status in statuses.items()]}
    assert make_ablations(Side("fast", "optimized", ("--preset", "p")), plan) == [
        Side("without a", "without", ("--preset", "p", "--without", "a", "c"), speedup="a"),
        Side("only a", "only", ("--preset", "p", "--speedups", "a"), speedup="a"),
    ]


def test_a_launch_file_for_more_gpus_than_here_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert read_launch("ddp.yaml --num_processes 2", "x").num_processes == 2
    with pytest.raises(ArgumentError, match=r"for 4 GPU\(s\), and this machine has 2"):
        read_launch("ddp.yaml --num_processes 4", "baseline_launch")
    with pytest.raises(ArgumentError, match=r"says no number of processes.*--num_processes 2"):
        read_launch("ddp.yaml", "baseline_launch")


def test_what_cannot_be_run_is_refused_by_name(tmp_path) -> None:
    (tmp_path / "mine.yaml").write_text("learning_rate: 1e-3\n")
    three = {"baseline": ["stock"] * 3}
    for given, message in (
        ({"optimized": "max_sped"}, r"--optimized 'max_sped': \['max_sped'\] is no preset.*max_speed"),
        ({"baseline": ["absent.yaml"]}, "--baseline absent.yaml: no such file"),
        ({"rounds": 0}, "--rounds 0: must be at least 1"),
        ({"max_rounds": 2, "min_speedup": 2.0}, "--max_rounds 2: must be at least --rounds, 3"),
        ({"max_rounds": 9}, "--max_rounds 9 adds rounds until --min_speedup is decided: give one"),
        ({"max_loss_delta": float("nan")}, "--max_loss_delta nan: must be a number"),
        ({"min_speedup": float("inf")}, "--min_speedup inf: must be a number"),
        ({**three, "baseline_args": ["x", "y"]}, "2 texts for 3 baselines"),
        ({**three, "baseline_launch": [CPU, DDP], "optimized_launch": DDP}, "2 files for 3 baseline"),
        ({"optimized_launch": CPU}, "go together"),
        ({"baseline_launch": [CPU]}, "go together"),
        ({"baseline_launch": [CPU], "optimized_launch": str(tmp_path / "mine.yaml")}, "mine.yaml: no Accelerate"),
        ({"baseline_launch": ["absent.yaml"], "optimized_launch": CPU}, "absent.yaml: cannot be read: .*No such"),
        ({"baseline_launch": [str(CONFIGS / "2node.yaml")], "optimized_launch": CPU}, "for 2 machines"),
    ):
        with pytest.raises(ArgumentError, match=message):
            make_sides(CompareArguments(**given))


# --- commands ---------------------------------------------------------------------------------------------------------


def test_the_command_of_a_side_lets_later_arguments_win() -> None:
    args = CompareArguments(recipe="r.py", config="shared.yaml", seed=7)
    side = Side("max_speed", "optimized", ("--preset", "max_speed"))
    assert make_command(args, ["--max_steps", "9"], side, Path("out/max_speed/round_1"), 1) == [
        *(sys.executable, "r.py", "--config", "shared.yaml"),
        *("--logging_strategy", "steps", "--logging_steps", "10", "--seed", "8"),
        *("--report_to", "none", "--disable_tqdm", "true", "--embedding_cache_dir", "out/max_speed/round_1/embeddings"),
        *("--max_steps", "9", "--preset", "max_speed", "--output_dir", "out/max_speed/round_1"),
    ]
    stock = make_command(args, [], Side("stock", "baseline", STOCK), Path("f"), 0)
    assert "--embedding_cache_dir" not in stock  # the stock Trainer has none
    assert stock[-6:] == [*STOCK, "--output_dir", "f"]


def test_a_sides_yaml_goes_on_top_of_the_shared_one_as_it_is_written(tmp_path) -> None:
    shared, own = tmp_path / "shared.yaml", tmp_path / "own.yaml"
    shared.write_text("eval_strategy: no\nlearning-rate: 1e-3\nspeedups: [all]\n")
    own.write_text("learning_rate: 5e-4\n")
    side = Side("own", "optimized", (), config=str(own))
    command = make_command(CompareArguments(recipe="r.py", config=str(shared)), [], side, tmp_path / "out" / "r", 0)
    merged = Path(command[command.index("--config") + 1]).read_text()
    assert merged.splitlines() == ["eval_strategy: no", "speedups: [all]", "learning_rate: 5e-4"]
    assert yaml.load(merged, yaml.BaseLoader)["eval_strategy"] == "no"
    own.write_text("- 1\n")
    with pytest.raises(ArgumentError, match="top level must be lines"):
        merge_yaml(str(shared), str(own))


# --- processes --------------------------------------------------------------------------------------------------------


def test_ablations_join_every_round_and_may_fail() -> None:
    alone = Side("only x", "only", (), speedup="x")

    def run_one(side: Side, round_: int) -> SideRun:
        if side is alone:
            raise ChildFailed("only x: out of memory")
        return SideRun(side, round_)

    runs = run_all([BASE, FAST], 2, run_one, lambda run: [alone])
    each = ["stock", "max_speed", "only x"]
    assert [(run.round, run.side.name) for run in runs] == [(round_, name) for round_ in (0, 1) for name in each]
    assert runs[2].error == "only x: out of memory"


def test_a_child_that_fails_or_measured_nothing_ends_the_comparison(tmp_path) -> None:
    def start(code: str, name: str, side: Side = BASE) -> SideRun:
        return run_child([sys.executable, "-c", code, str(tmp_path / name)], side, 2, tmp_path / name)

    def write(**throughput: int) -> str:
        return f"import sys; open(sys.argv[1] + '/throughput.json', 'w').write({json.dumps(throughput)!r})"

    failing = "print('line 1'); raise MemoryError('no more')"
    with pytest.raises(ChildFailed, match=r"stock, round 2: exit status 1.\n(.|\n)*line 1(.|\n)*MemoryError: no more"):
        start(failing, "a")
    with pytest.raises(ChildFailed, match=r"wrote no throughput.json.*add_callback\(ThroughputCallback"):
        start("pass", "b")
    with pytest.raises(ChildFailed, match="all 3 steps were warm-up"):
        start(write(measured_steps=0, warmup_steps=3), "c")
    one = write(measured_steps=1, num_processes=1)
    assert start(one, "d", Side("a", "baseline", (), launch=Launch(CPU, 1))).throughput["num_processes"] == 1
    with pytest.raises(ChildFailed, match=r"--num_processes 2 is for 2 processes, and 1 trained together"):
        start(one, "e", Side("a", "baseline", (), launch=TWO))
    with pytest.raises(ArgumentError, match="is there already"):
        start("another command", "d")


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
