"""Launch files of a comparison: read before anything runs, part of names and commands, told in the report."""

import sys
from pathlib import Path

import pytest
import torch

from hf_ext.comparing.running import ChildFailed, SideRun, run_child
from hf_ext.comparing.sides import CompareArguments, Launch, Side, make_ablations, make_command, make_sides, read_launch
from hf_ext.errors import ArgumentError

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
CPU, DDP = str(CONFIGS / "cpu.yaml"), str(CONFIGS / "2cpu_ddp.yaml")


def test_the_files_of_the_project_say_their_processes_and_need_their_gpus(monkeypatch):
    assert read_launch(CPU, "optimized_launch") == Launch(CPU, 1)
    assert read_launch(DDP, "optimized_launch") == Launch(DDP, 2)
    gpus = [path for path in sorted(CONFIGS.glob("*.yaml")) if "gpu" in path.stem and "node" not in path.stem]
    assert len(gpus) == 16
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    assert {read_launch(str(path), "x").num_processes for path in gpus} == {1, 2, 4, 8}
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    for path in gpus:
        with pytest.raises(ArgumentError, match=r"GPU\(s\), and this machine has 0.*2cpu_ddp.yaml"):
            read_launch(str(path), "baseline_launch")


def test_a_file_that_cannot_be_launched_here_is_refused_by_name(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("learning_rate: 1e-3\n")
    with pytest.raises(ArgumentError, match=r"--optimized_launch .*mine.yaml: no Accelerate config"):
        read_launch(str(recipe), "optimized_launch")
    with pytest.raises(ArgumentError, match=r"--baseline_launch absent.yaml: cannot be read: .*No such file"):
        read_launch("absent.yaml", "baseline_launch")
    with pytest.raises(ArgumentError, match="for 2 machines"):
        read_launch(str(CONFIGS / "2node_8gpu_fsdp2.yaml"), "baseline_launch")


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
    assert [side.name for side in sides] == ["stock on cpu", "max_speed on cpu", "max_speed on 2cpu_ddp"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    assert make_command(args, [], sides[0], Path("f"), 0)[:6] == [*launcher, CPU, "r.py"]
    assert make_command(args, [], sides[2], Path("f"), 0)[:6] == [*launcher, DDP, "r.py"]
    plan = {"decisions": [{"name": "tf32", "status": "applied"}]}
    assert [side.launch for side in make_ablations(sides[2], plan)] == [Launch(DDP, 2)] * 2


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
    with pytest.raises(ChildFailed, match=r"2cpu_ddp.yaml is for 2 processes, and 1 trained together"):
        run(Launch(DDP, 2), tmp_path / "two")
