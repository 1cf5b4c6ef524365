"""Launch files of a comparison: read before anything runs, part of names and commands, told in the report."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_ext.comparing.arguments import CompareArguments
from hf_ext.comparing.comparison import analyze
from hf_ext.comparing.report import format_comparison
from hf_ext.comparing.running import ChildFailed, SideRun, run_child
from hf_ext.comparing.sides import Launch, Side, make_ablations, make_command, make_sides, read_launch
from hf_ext.errors import ArgumentError

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
CPU = str(CONFIGS / "cpu.yaml")
FLAGS = ("--multi_gpu", "--num_processes", "2")
DDP = f"{CPU} {' '.join(FLAGS)}"


def test_the_files_of_the_project_say_their_processes_and_need_their_gpus(monkeypatch):
    assert read_launch(CPU, "optimized_launch") == Launch(CPU, 1)
    assert read_launch(DDP, "optimized_launch") == Launch(CPU, 2, FLAGS)
    gpus = {"1gpu_fp16.yaml": 1, "ddp.yaml --num_processes=4 --mixed_precision fp16": 4, "hsdp.yaml": 8}
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    assert {text: read_launch(text, "x").num_processes for text in gpus} == gpus
    with pytest.raises(
        ArgumentError, match=r'--x .*ddp.yaml: says no number of processes.*"ddp.yaml --num_processes 2"'
    ):
        read_launch("ddp.yaml", "x")
    with pytest.raises(ArgumentError, match="invalid int value: 'two'"):
        read_launch("ddp.yaml --num_processes two", "x")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    for text in gpus:
        with pytest.raises(ArgumentError, match=r"GPU\(s\), and this machine has 0.*cpu.yaml --multi_gpu"):
            read_launch(text, "baseline_launch")


def test_a_file_that_cannot_be_launched_here_is_refused_by_name(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("learning_rate: 1e-3\n")
    with pytest.raises(ArgumentError, match=r"--optimized_launch .*mine.yaml: no Accelerate config"):
        read_launch(str(recipe), "optimized_launch")
    with pytest.raises(ArgumentError, match=r"--baseline_launch absent.yaml: cannot be read: .*No such file"):
        read_launch("absent.yaml", "baseline_launch")
    with pytest.raises(ArgumentError, match="for 2 machines"):
        read_launch(str(CONFIGS / "2node.yaml"), "baseline_launch")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"optimized_launch": CPU}, "go together"),
        ({"baseline_launch": [CPU]}, "go together"),
        (
            {"baseline": ["a", "b", "c"], "baseline_launch": [CPU, DDP], "optimized_launch": DDP},
            "2 files for 3 baseline",
        ),
    ],
)
def test_files_that_contradict_each_other_are_refused(given, says):
    with pytest.raises(ArgumentError, match=says):
        CompareArguments(**given)


def test_each_side_is_named_after_its_file_and_started_with_it():
    args = CompareArguments(
        recipe="r.py",
        baseline=["stock", "max_speed"],
        baseline_launch=[CPU],
        optimized="max_speed",
        optimized_launch=DDP,
    )
    sides = make_sides(args)
    assert [side.name for side in sides] == ["stock on cpu", "max_speed on cpu", "max_speed on cpu x2"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    assert make_command(args, [], sides[0], Path("f"), 0)[:6] == [*launcher, CPU, "r.py"]
    assert make_command(args, [], sides[2], Path("f"), 0)[:9] == [*launcher, CPU, *FLAGS, "r.py"]
    plan = {"decisions": [{"name": "tf32", "status": "applied"}]}
    assert [side.launch for side in make_ablations(sides[2], plan)] == [Launch(CPU, 2, FLAGS)] * 2


def test_the_same_preset_on_the_same_file_is_numbered_and_keeps_its_file():
    sides = make_sides(
        CompareArguments(baseline=["baseline"], baseline_launch=[CPU], optimized="baseline", optimized_launch=CPU)
    )
    assert [(side.name, side.launch) for side in sides] == [
        ("baseline on cpu", Launch(CPU, 1)),
        ("baseline on cpu#2", Launch(CPU, 1)),
    ]


# A recipe that says how many processes trained; the folder is its last argument.
RECIPE = """
import json, sys
from pathlib import Path
text = {"measured_steps": 1, "num_processes": 1}
(Path(sys.argv[-1]) / "throughput.json").write_text(json.dumps(text))
"""


def test_fewer_processes_than_the_file_says_end_the_comparison(tmp_path):
    def run(launch: Launch, folder: Path) -> SideRun:
        return run_child(
            [sys.executable, "-c", RECIPE, str(folder)], Side("a", "baseline", (), launch=launch), 0, folder
        )

    assert run(Launch(CPU, 1), tmp_path / "one").throughput["num_processes"] == 1
    with pytest.raises(
        ChildFailed, match=r"cpu.yaml --multi_gpu --num_processes 2 is for 2 processes, and 1 trained together"
    ):
        run(Launch(CPU, 2, FLAGS), tmp_path / "two")


def make_run(side: Side) -> SideRun:
    throughput = {
        "unit": "residues",
        "device": "cpu",
        "num_processes": side.launch.num_processes if side.launch else 1,
        "warmup_seconds": 1.0,
        "peak_memory_gib": 1.0,
        "rates": {"residues_per_s": 100.0, "padded_tokens_per_s": 150.0, "data_wait_share": 0.1},
        "step_seconds": {"q1": 1.0, "median": 1.0, "q3": 1.0},
        "steps": {"seconds": [1.0] * 5, "residues": [100.0] * 5, "sequences": [4.0] * 5},
        "log_history": [{"loss": 1.0, "step": 1}],
    }
    return SideRun(side, 0, 9.0, throughput)


def test_the_report_says_processes_and_files_of_each_side():
    slow = Side("a", "baseline", (), launch=Launch("cpu.yaml", 1))
    fast = Side("b", "optimized", (), launch=Launch("cpu.yaml", 2, FLAGS))
    result = analyze(CompareArguments(rounds=1), [make_run(slow), make_run(fast)])
    sides = json.loads(json.dumps(result))["sides"]
    assert {name: (side["launch"], side["num_processes"]) for name, side in sides.items()} == {
        "a": ("cpu.yaml", 1),
        "b": ("cpu.yaml --multi_gpu --num_processes 2", 2),
    }
    rows = [
        line
        for line in format_comparison({"recipe": "r.py", "arguments": [], "rounds": 1, **result}).splitlines()
        if line.startswith("| ")
    ]
    assert [[cell.strip() for cell in row.split("|")[-3:-1]] for row in (rows[0], *rows[2:])] == [
        ["processes", "launched with"],
        ["1", "cpu.yaml"],
        ["2", "cpu.yaml --multi_gpu --num_processes 2"],
    ]
    plain = [make_run(replace(side, launch=None)) for side in (slow, fast)]
    report = format_comparison(
        {"recipe": "r.py", "arguments": [], "rounds": 1, **analyze(CompareArguments(rounds=1), plain)}
    )
    assert "launched with" not in report
