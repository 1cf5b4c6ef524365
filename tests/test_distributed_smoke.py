"""The GPU smoke script: what it launches on how many GPUs, that it refuses to run without one, and its way to a result.

On a CPU it runs through the test-only shim of `cpu_as_gpus`; no test here says anything about NCCL.
"""

import importlib

import pytest
import torch
from launcher_files import FOLDER

SCRIPT = FOLDER.parent / "benchmarks" / "distributed_smoke.py"


@pytest.fixture
def smoke(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("distributed_smoke")


def launched(smoke, num_gpus, has_deepspeed=True):
    found = smoke.choose_launches(num_gpus, has_deepspeed)
    assert {launch.precision for launch in found} == {"no"}
    return {launch.file: launch.processes for launch in found}


def test_eight_gpus_run_every_file_for_several_gpus_of_one_machine_as_it_is(smoke):
    several = {path.stem for path in FOLDER.glob("[248]gpu_*.yaml")}
    assert launched(smoke, 8) == {name: int(name[0]) for name in several}
    assert len(several) == 13


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses_and_says_so(smoke, tmp_path):
    with pytest.raises(ValueError, match="No GPU: torch sees no CUDA device"):
        smoke.main(["--output_json", str(tmp_path / "result.json")])
    assert not (tmp_path / "result.json").exists()
