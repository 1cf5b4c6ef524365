"""The GPU smoke script: what it launches on how many GPUs, that it refuses to run without one, and its way to a result.

On a CPU it runs through the test-only shim of `cpu_as_gpus`; no test here says anything about NCCL.
"""

import importlib
import json
import subprocess
import sys

import pytest
import torch
from launcher_files import FOLDER
from launches import clean_environment

SCRIPT = FOLDER.parent / "benchmarks" / "distributed_smoke.py"


@pytest.fixture
def smoke(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("distributed_smoke")


def test_every_file_for_several_gpus_of_one_machine_is_launched_on_all_of_them(smoke):
    launches = smoke.choose_launches(4, has_deepspeed=True)
    assert {launch.file for launch in launches} == {"ddp", "fsdp2", "fsdp2_offload", "hsdp", "zero3"}
    assert {(launch.processes, launch.precision) for launch in launches} == {(4, "no")}
    assert [launch.file for launch in smoke.choose_launches(1, has_deepspeed=False)] == [
        "ddp",
        "fsdp2",
        "fsdp2_offload",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses_and_says_so(smoke, tmp_path):
    with pytest.raises(ValueError, match="No GPU: torch sees no CUDA device"):
        smoke.main(["--output_json", str(tmp_path / "result.json")])
    assert not (tmp_path / "result.json").exists()


def run_smoke(path, files, *paths) -> tuple[int, dict[str, dict]]:
    """Exit code, and the row of each file."""
    sizes = ["--model_size", "tiny", "--steps", "6", "--rows", "8", "--length", "12"]
    words = ["--device", "cpu", *sizes, "--files", *files, "--output_json", str(path)]
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, env=clean_environment(*paths), capture_output=True, text=True, timeout=400)
    assert path.is_file(), done.stderr[-3000:]
    return done.returncode, {row["file"]: row for row in json.loads(path.read_text())["runs"]}


def assert_passed(row, kind):
    assert (row["kind"], row["processes"], row["backend"]) == (kind, 2, "gloo")
    assert row["passed"]
    assert 0 < row["max_weight_difference"] < 1e-4  # other sums, the same weights
    assert row["missing_keys"] == []
    assert row["rows_per_second"] > 0
    assert row["peak_memory_gib"] > 0


@pytest.mark.nightly
@pytest.mark.skipif(torch.accelerator.is_available(), reason="the script itself runs here")
def test_ddp_passes_and_a_launch_that_fails_is_a_row_with_its_reason_and_an_exit_code(tmp_path):
    code, rows = run_smoke(tmp_path / "result.json", ["ddp", "fsdp2"])
    assert code == 1
    assert_passed(rows["ddp"], "MULTI_CPU")
    assert "accelerate would run DDP and say nothing" in rows["fsdp2"]["failed"]
