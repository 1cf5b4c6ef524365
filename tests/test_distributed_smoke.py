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
from locations import CPU_AS_GPUS

SCRIPT = FOLDER.parent / "benchmarks" / "distributed_smoke.py"


@pytest.fixture
def smoke(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("distributed_smoke")


def launched(smoke, num_gpus, has_deepspeed=True):
    found = smoke.choose_launches(num_gpus, has_deepspeed)
    assert {launch.precision for launch in found} == {"no"}
    return {launch.file: launch.processes for launch in found}


OFFLOADING = ("4gpu_fsdp2_lora", "4gpu_fsdp2_offload", "4gpu_zero2", "4gpu_zero3_offload")


def test_one_gpu_runs_one_file_of_each_kind_and_leaves_out_two_groups(smoke):
    assert launched(smoke, 1) == dict.fromkeys(["2gpu_baseline", "2gpu_ddp", "2gpu_fsdp2", *OFFLOADING], 1)
    assert "4gpu_zero2" not in launched(smoke, 1, has_deepspeed=False)


def test_two_gpus_run_the_files_for_two_as_they_are(smoke):
    assert launched(smoke, 2) == dict.fromkeys(["2gpu_baseline", "2gpu_ddp", "2gpu_fsdp2", *OFFLOADING], 2)


def test_eight_gpus_run_every_file_for_several_gpus_of_one_machine_as_it_is(smoke):
    several = {path.stem for path in FOLDER.glob("[248]gpu_*.yaml")}
    assert launched(smoke, 8) == {name: int(name[0]) for name in several}
    assert len(several) == 13


def test_four_gpus_run_hsdp_as_two_groups_of_two(smoke):
    (hsdp,) = [launch for launch in smoke.choose_launches(4, True) if launch.file == "8gpu_hsdp"]
    assert (hsdp.processes, hsdp.flags) == (4, ("--parallelism_config_dp_shard_size", "2"))


@pytest.mark.parametrize(
    ("native", "baseline", "fsdp2"), [(["bf16", "fp16"], "fp16", "bf16"), (["fp16"], "fp16", "fp16"), ([], None, None)]
)
def test_runs_for_speed_take_the_precision_of_the_file_where_the_card_has_it(smoke, native, baseline, fsdp2):
    timed = smoke.in_half_precision(smoke.choose_launches(1, False), native)
    found = {launch.file: launch.precision for launch in timed}
    assert (found.get("2gpu_baseline"), found.get("2gpu_fsdp2")) == (baseline, fsdp2)


def test_the_error_of_a_rank_is_told_and_not_that_of_its_launcher(smoke):
    printed = "[rank1]: Traceback\n[rank1]: RuntimeError: out of memory\ntorch.x.ChildFailedError: \n"
    assert smoke.last_error(printed) == "RuntimeError: out of memory"


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
def test_fsdp2_on_two_cpu_processes_ends_at_the_weights_of_one_process(tmp_path):
    code, rows = run_smoke(tmp_path / "result.json", ["2gpu_fsdp2"], CPU_AS_GPUS)
    assert code == 0, rows
    assert rows.keys() == {"cpu", "2gpu_fsdp2"}
    assert_passed(rows["2gpu_fsdp2"], "FSDP")


@pytest.mark.nightly
@pytest.mark.skipif(torch.accelerator.is_available(), reason="the script itself runs here")
def test_ddp_passes_and_a_launch_that_fails_is_a_row_with_its_reason_and_an_exit_code(tmp_path):
    code, rows = run_smoke(tmp_path / "result.json", ["2gpu_ddp", "2gpu_fsdp2"])
    assert code == 1
    assert_passed(rows["2gpu_ddp"], "MULTI_CPU")
    assert "accelerate would run DDP and say nothing" in rows["2gpu_fsdp2"]["failed"]
