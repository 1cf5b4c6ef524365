"""What the launcher files give a script: devices, precision, threads, processes. The files for CPUs really launch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from launcher_files import FOLDER, launcher_environment
from transformers import TrainingArguments


@pytest.mark.parametrize(
    ("name", "precision", "gpus"),
    [
        ("cpu", "no", ""),
        ("2cpu_ddp", "no", "-1,-1"),
        ("1gpu_t4_fp16", "fp16", "0"),
        ("1gpu_a100_bf16", "bf16", "0"),
        ("1gpu_h100_bf16", "bf16", "0"),
        ("2gpu_baseline", "fp16", None),
        ("4gpu_baseline", "fp16", None),
        ("2gpu_ddp", "bf16", None),
        ("4gpu_ddp", "bf16", None),
        ("8gpu_ddp", "bf16", None),
    ],
)
def test_the_script_gets_the_stated_precision_and_devices(name, precision, gpus, monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environment = launcher_environment(FOLDER / f"{name}.yaml")
    assert environment.get("CUDA_VISIBLE_DEVICES") == gpus
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", environment["ACCELERATE_MIXED_PRECISION"])
    assert TrainingArguments(str(tmp_path), report_to="none").mixed_precision == precision


@pytest.mark.parametrize(("name", "on_cpu"), [("cpu", "True"), ("1gpu_t4_fp16", "False"), ("2cpu_ddp", None)])
def test_use_cpu_is_passed_on_for_one_process_and_dropped_for_several(name, on_cpu, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert launcher_environment(FOLDER / f"{name}.yaml").get("ACCELERATE_USE_CPU") == on_cpu


@pytest.mark.parametrize(
    ("name", "threads"), [("cpu", "8"), ("2cpu_ddp", "4"), ("1gpu_t4_fp16", "1"), ("2gpu_ddp", "1")]
)
def test_eight_physical_cores_are_divided_among_the_processes_on_the_cpu(name, threads, monkeypatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16 if logical else 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launcher_environment(FOLDER / f"{name}.yaml")["OMP_NUM_THREADS"] == threads


def launch(name: str, script: Path, *arguments: str) -> list:
    """Launches `script`; returns the JSON lines that its processes wrote to files beside it, in order of rank."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "CUDA_", "OMP_"))}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FOLDER / f"{name}.yaml")]
    run = subprocess.run([*command, str(script), *arguments], env=clean, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(path.read_text()) for path in sorted(script.parent.glob("*.json"))]


def test_cpu_yaml_runs_one_process_on_the_cpu_in_fp32(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, pathlib; from accelerate import Accelerator\n"
        "a = Accelerator()\n"
        "seen = [a.num_processes, a.device.type, a.mixed_precision]\n"
        "pathlib.Path(__file__).with_name('0.json').write_text(json.dumps(seen))\n",
        encoding="ascii",
    )
    assert launch("cpu", script) == [[1, "cpu", "no"]]


TWO_PROCESSES = """
import json, pathlib, torch
from transformers import TrainingArguments
from hf_ext.training_args import FastTrainingArguments

here = pathlib.Path(__file__)
alone = TrainingArguments(str(here.parent), report_to="none").world_size
args = FastTrainingArguments(str(here.parent), report_to="none")
summed = torch.tensor([1.0 + args.process_index])
torch.distributed.all_reduce(summed)
state = args.distributed_state
seen = [args.world_size, state.backend, str(state.distributed_type.value), args.device.type, summed.item(), alone]
here.with_name(f"{args.process_index}.json").write_text(json.dumps(seen))
torch.distributed.destroy_process_group()
"""


def test_2cpu_ddp_yaml_runs_two_processes_that_sum_over_gloo(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES, encoding="ascii")
    ranks = launch("2cpu_ddp", script)
    # Under stock arguments each of the two processes is alone: a run of its own, twice.
    assert ranks == [[2, "gloo", "MULTI_CPU", "cpu", 3.0, 1]] * 2


def test_max_speed_recipe_under_2cpu_ddp_yaml_is_one_run_of_two_processes(tmp_path):
    recipe = FOLDER.parent / "recipes" / "max_speed.py"
    output = tmp_path / "output"
    given = {"output_dir": output, "embedding_cache_dir": tmp_path / "cache", "max_steps": 4, "disable_tqdm": "true"}
    launch("2cpu_ddp", recipe, *[part for name, value in given.items() for part in (f"--{name}", str(value))])
    results = json.loads((output / "all_results.json").read_text())
    assert results["environment"]["num_processes"] == 2
    assert results["environment"]["device"].startswith("cpu")
