"""What a comparison runs: sides, launch files, commands, the processes that it starts."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from inside import ChildFailed, CompareArguments, Side, SideRun, make_command, make_sides

from hf_ext.comparing.running import run_all, run_child
from hf_ext.comparing.sides import make_ablations
from hf_ext.errors import ArgumentError
from hf_ext.reporting import PlanRecord
from hf_ext.reporting.record import DecisionRecord

pytestmark = pytest.mark.internals
BASE, FAST = Side("stock", "baseline", ()), Side("max_speed", "optimized", ())
CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
CPU = str(CONFIGS / "cpu.yaml")
DDP = f"{CPU} --multi_gpu --num_processes 2"
STOCK = ("--preset", "baseline", "--stock_trainer", "true")


def test_sides_are_presets_yaml_files_and_stock_with_flags_of_their_own(tmp_path) -> None:
    path = tmp_path / "best.yaml"
    path.write_text("learning_rate: 1e-3\n")
    args = CompareArguments(baseline=["stock", f"{path} --bf16 true", "stock"], optimized="max_speed+low_disk")
    assert make_sides(args) == [
        Side("stock", "baseline", STOCK),
        Side("best", "baseline", ("--config", str(path), "--bf16", "true")),
        Side("stock#2", "baseline", STOCK),
        Side("max_speed+low_disk", "optimized", ("--preset", "max_speed+low_disk")),
    ]


def test_a_side_is_started_with_its_launch_file() -> None:
    sides = make_sides(CompareArguments(baseline=["stock"], baseline_launch="cpu.yaml", optimized_launch=DDP))
    assert [side.launch for side in sides] == [(CPU,), (CPU, "--multi_gpu", "--num_processes", "2")]
    command = make_command(CompareArguments(recipe="r.py"), [], sides[1], Path("f"), 0)
    launcher = ["-m", "accelerate.commands.launch", "--config_file", CPU, "--multi_gpu", "--num_processes", "2"]
    assert command[:9] == [sys.executable, *launcher, "r.py"]


def test_every_applied_speedup_is_left_out() -> None:
    statuses = {"a": "applied", "b": "skipped", "c": "off"}
    plan = PlanRecord(decisions=[DecisionRecord(name, status) for name, status in statuses.items()])
    assert make_ablations(Side("fast", "optimized", ("--preset", "p"), launch=(CPU,)), plan) == [
        Side("without a", "without", ("--preset", "p", "--without", "a", "c"), speedup="a", launch=(CPU,))
    ]


def test_what_cannot_be_run_is_refused_by_name(tmp_path) -> None:
    (tmp_path / "mine.yaml").write_text("learning_rate: 1e-3\n")
    for given, message in (
        ({"optimized": "max_sped"}, r"--optimized 'max_sped': \['max_sped'\] is no preset.*max_speed"),
        ({"baseline": ["absent.yaml"]}, "--baseline absent.yaml: no such file"),
        ({"baseline": [str(tmp_path / "mine.yaml")]}, "mine: a YAML file, and --config after -- is another"),
        ({"rounds": 0}, "rounds=0: must be at least 1"),
        ({"max_loss_delta": float("nan")}, "max_loss_delta=nan: must be a finite number"),
        ({"min_speedup": float("inf")}, "min_speedup=inf: must be"),
        ({"min_speedup": -1.0}, "min_speedup=-1.0: must be above 0"),
        ({"max_memory_gib": 0.0}, "max_memory_gib=0.0: must be above 0"),
        ({"seed": -1}, "seed=-1: must be from 0"),
        ({"optimized_launch": str(tmp_path / "mine.yaml")}, "mine.yaml: no Accelerate"),
        ({"baseline_launch": "absent.yaml"}, "absent.yaml: cannot be read: .*No such"),
    ):
        with pytest.raises(ArgumentError, match=message):
            make_sides(CompareArguments(**given), ["--config", "shared.yaml"])


def test_the_command_of_a_side_lets_later_arguments_win() -> None:
    args = CompareArguments(recipe="r.py", seed=7)
    side = Side("max_speed", "optimized", ("--preset", "max_speed"))
    assert make_command(args, ["--max_steps", "9"], side, Path("out/max_speed/round_1"), 1) == [
        *(sys.executable, "r.py", "--logging_strategy", "steps", "--logging_steps", "10", "--seed", "8"),
        *("--report_to", "none", "--disable_tqdm", "true", "--embedding_cache_dir", "out/max_speed/round_1/embeddings"),
        *("--max_steps", "9", "--preset", "max_speed", "--output_dir", "out/max_speed/round_1"),
    ]
    stock = make_command(args, [], Side("stock", "baseline", STOCK), Path("f"), 0)
    assert "--embedding_cache_dir" not in stock  # the stock Trainer has none
    assert stock[-6:] == [*STOCK, "--output_dir", "f"]


def test_ablations_join_every_round_and_may_fail() -> None:
    alone = Side("without x", "without", (), speedup="x")

    def run_one(side: Side, round_: int) -> SideRun:
        if side is alone:
            raise ChildFailed("without x: out of memory")
        return SideRun(side, round_)

    runs = run_all([BASE, FAST], 2, run_one, lambda run: [alone])
    each = ["stock", "max_speed", "without x"]
    assert [(run.round, run.side.name) for run in runs] == [(round_, name) for round_ in (0, 1) for name in each]
    assert runs[2].error == "without x: out of memory"


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
    assert start(write(measured_steps=1), "d").throughput.measured_steps == 1
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
