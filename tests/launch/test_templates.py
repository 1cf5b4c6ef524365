"""Templates of engines that are not here: what they start is run or parsed; and the page about them."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import types
from pathlib import Path

import pytest
from documented_commands import read_commands
from launch_templates import LAUNCH, kubeflow, skypilot
from locations import HELPERS, ROOT

from hf_ext import __version__
from hf_ext.errors import RunEnded

STOPPED = 75
NAMES = {"slurm.sbatch", "skypilot.yaml", "hf_jobs.py", "kubeflow_trainjob.yaml", "ray_train.py"}


def test_each_template_has_its_command_and_what_was_not_tried_in_its_head():
    assert {path.name for path in LAUNCH.iterdir() if path.is_file()} == NAMES
    for name in NAMES:
        head = " ".join((LAUNCH / name).read_text(encoding="ascii")[:1600].replace("\n#", " ").split())
        assert f"launch/{name}" in head
        assert re.search(r"not (run )?on (a cloud|a cluster|Jobs|several machines)", head), name


# --- commands --------------------------------------------------------------------------------------------------------


def as_the_engine_runs(command: list[str], folder: Path, words: str, stop: bool = False, **environment: str) -> int:
    """A `run:` of SkyPilot, or the words of a container, run with an `accelerate` and a `torchrun` without torch."""
    for name in ("accelerate", "torchrun"):
        program = folder / name
        program.write_text(
            f'#!/bin/bash\necho "{name} $@" >"{folder}/arguments"\n'
            f'exec {sys.executable} {HELPERS}/small_launcher.py "{folder}" {words}\n'
        )
        program.chmod(0o755)
    programs = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {**os.environ, "PATH": programs, "PYTHONPATH": str(ROOT), "HOME": str(folder), "TMPDIR": str(folder)}
    with subprocess.Popen(command, env={**given, **environment}, cwd=ROOT) as process:
        ends = time.monotonic() + 30
        while stop and not (folder / "ready-0").exists():
            assert time.monotonic() < ends
            time.sleep(0.02)
        if stop:
            process.terminate()
        return process.wait(60)


def test_what_skypilot_runs_ends_with_the_status_of_the_ranks(tmp_path):
    task = skypilot()
    nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "4"}
    given = {**task["envs"], **nodes, "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "FLAGS": "--seed 1 --epochs 2"}
    command = ["bash", "-c", task["run"]]
    assert as_the_engine_runs(command, tmp_path, "stopped,stopped", **given) == STOPPED
    assert (tmp_path / "arguments").read_text() == (
        "accelerate launch --config_file accelerate_configs/4gpu_ddp.yaml --num_machines 2 --machine_rank 1 "
        "--num_processes 8 --main_process_ip 10.0.0.1 --main_process_port 29500 -m hf_ext train "
        f"--output_dir /outputs/run --local_checkpoint_dir {tmp_path}/checkpoints --save_minutes 15 "
        "--seed 1 --epochs 2\n"
    )
    assert (ROOT / task["envs"]["ACCELERATE_CONFIG"]).exists()
    for words, status in {"done,done": 0, "killed,killed": 1, "0.3:stopped,nan": 65}.items():
        assert as_the_engine_runs(command, tmp_path, words, **given) == status


@pytest.mark.parametrize(("words", "stop", "status"), [("0.3:stopped,nan", False, 65), ("waits_long", True, 75)])
def test_what_the_pod_runs_passes_sigterm_on_and_ends_with_the_status_of_the_ranks(tmp_path, words, stop, status):
    trainer = kubeflow()["TrainJob"]["spec"]["trainer"]
    assert as_the_engine_runs([*trainer["command"], *trainer["args"]], tmp_path, words, stop) == status
    assert (tmp_path / "arguments").read_text() == "torchrun -m hf_ext train --output_dir /outputs/run\n"


# --- Hugging Face Jobs -----------------------------------------------------------------------------------------------


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, LAUNCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inline_metadata(text: str) -> str:
    """The `script` block of PEP 723, as its reference implementation finds it."""
    (found,) = re.finditer(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$", text)
    assert found["type"] == "script"
    lines = found["content"].splitlines(keepends=True)
    return "".join(line[2:] if line.startswith("# ") else line[1:] for line in lines)


def test_the_head_of_the_jobs_script_is_what_uv_reads():
    text = (LAUNCH / "hf_jobs.py").read_text()
    assert tomllib.loads(inline_metadata(text)) == {
        "requires-python": ">=3.11",
        "dependencies": ["hf_ext"],  # that which was built here, and no other of this name
        "tool": {"uv": {"sources": {"hf_ext": {"path": f"/wheels/hf_ext-{__version__}-py3-none-any.whl"}}}},
    }


def test_the_jobs_script_launches_one_process_per_gpu_into_the_bucket():
    command = load("hf_jobs").command(["--max_hours", "7.5"], 2)
    assert " ".join(command) == (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2 -m hf_ext train "
        "--output_dir /outputs/run "
        "--local_checkpoint_dir /tmp/checkpoints --max_hours 7.5"
    )


def test_hugging_face_reads_the_command_as_it_is_meant(tmp_path):
    """The client's own dry run, which sends nothing; its server is a port at which nobody listens."""
    head = ast.get_docstring(ast.parse((LAUNCH / "hf_jobs.py").read_text()))
    command = re.search(r"hf (jobs uv run .*gb1.yaml)", head.replace("\\\n", " "))[1].split()
    hf = [str(Path(sys.executable).with_name("hf")), *command[:3]]
    known = subprocess.run([*hf, "--help"], capture_output=True, text=True, check=True).stdout
    if "--dry-run" not in known or "--attempts" not in known:
        pytest.skip("a huggingface_hub before 2.4")
    given = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "", "HOME": str(tmp_path)}
    dry = [*hf, "--dry-run", "--namespace", "USER", *command[3:]]
    said = subprocess.run(dry, env=given, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    found = dict(re.findall(r"(?m)^  (\w+) +(.*)$", said))
    wanted = {
        "script": "launch/hf_jobs.py",
        "args": "--max_hours 7.5 --config gb1.yaml",
        "timeout": "8h",
        "attempts": "20",
    }
    assert {name: found[name] for name in wanted} == wanted, said
    assert found["volumes"] == "./dist:/wheels"
    assert "hf://buckets/USER/BUCKET:/outputs" in said
    assert float(command[-3]) < float(found["timeout"].removesuffix("h"))  # it stops itself before it is stopped


# --- Ray -------------------------------------------------------------------------------------------------------------

RAY = """
import dataclasses, json, sys, types

def module(name, **members):
    made = sys.modules[name] = types.ModuleType(name)
    vars(made).update(members)

def record(name, *fields):
    return dataclasses.make_dataclass(name, fields)

class TorchTrainer:
    def __init__(self, train_loop_per_worker, *, train_loop_config, scaling_config, run_config):
        self.loop, self.config = train_loop_per_worker, train_loop_config
        self.described = [dataclasses.asdict(scaling_config), dataclasses.asdict(run_config)]

REPORTS = []

module("ray")
module(
    "ray.train",
    FailureConfig=record("FailureConfig", "max_failures"),
    RunConfig=record("RunConfig", "storage_path", "failure_config"),
    ScalingConfig=record("ScalingConfig", "num_workers", "use_gpu"),
    report=REPORTS.append,
)
module("ray.train.torch", TorchTrainer=TorchTrainer)
sys.path.insert(0, sys.argv[1])
import ray_train

ray_train.OUTPUT_DIR, ray_train.USE_GPU = sys.argv[2], False
trainer = ray_train.make_trainer(sys.argv[3:])
trainer.loop(trainer.config)
print(json.dumps([*trainer.described, REPORTS]))
"""


@pytest.mark.nightly
def test_the_ray_script_trains_a_recipe_that_reports_its_saves(tmp_path):
    """Ray itself is a stub of its five names here: what a worker does is real."""
    flags = [
        "--logging_steps",
        "2",
        "--max_steps",
        "4",
        "--save_strategy",
        "steps",
        "--save_steps",
        "2",
        "--eval_strategy",
        "no",
    ]
    flags += ["--load_best_model_at_end", "false", "--disable_tqdm", "true"]
    command = [sys.executable, "-c", RAY, str(LAUNCH), str(tmp_path), *flags]
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    scaling, run, reports = json.loads(done.stdout.splitlines()[-1])
    assert scaling == {"num_workers": 4, "use_gpu": False}
    assert run["failure_config"] == {"max_failures": 3}
    assert len(reports) == 2
    assert reports[-1]["step"] == 4
    assert reports[-1]["loss"] > 0


def test_the_ray_script_names_what_ray_train_has():
    """Names and their modules in ray 2.60."""
    tree = ast.parse((LAUNCH / "ray_train.py").read_text())
    imports = {
        f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ray")
        for alias in node.names
    }
    assert imports == {
        "ray.train.FailureConfig",
        "ray.train.RunConfig",
        "ray.train.ScalingConfig",
        "ray.train.report",
        "ray.train.torch.TorchTrainer",
    }


# --- the page --------------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "distributed.md").read_text(encoding="ascii")


def test_the_page_has_every_status_of_a_run():
    rows = re.findall(r"(?m)^\| ([\d, ]+?) +\|", PAGE)
    named = {int(number) for row in rows for number in row.split(",")}
    ends = {kind.exit_code for kind in RunEnded.__subclasses__() if kind.__module__ == "hf_ext.errors"}
    assert named == ends | {0, 1, 137}


def test_the_commands_of_the_page_are_those_of_the_templates():
    commands = [command for command in read_commands(ROOT / "docs" / "distributed.md") if "launch/" in command]
    assert {re.findall(r"launch/([\w.]+)", command)[0] for command in commands} == {*NAMES}
    for command in commands:
        (name,) = re.findall(r"launch/([\w.]+)", command)
        head = (LAUNCH / name).read_text().replace("\\\n", " ")
        start = " ".join(command.split(" --config")[0].split(" --env")[0].split(" --max_hours")[0].split())
        assert start in " ".join(head.split()), command
