"""Launches `sharded_on_ranks.py`: in one process, in several under DDP, or under FSDP2 through the test-only shim."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from locations import CPU_AS_GPUS, HELPERS, ROOT
from safetensors.torch import load_file

import hf_ext

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def launch(runs: list[dict[str, Any]], place: Path, processes: int = 2, shards: bool = True, dies: bool = False) -> str:
    """Trains `runs` one after another; returns what was printed. `dies`: the run kills itself."""
    spec = place / f"spec-{len(list(place.glob('spec-*.json')))}.json"
    spec.write_text(json.dumps(runs))
    for run in runs:
        Path(run["folder"]).mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    script = [str(HELPERS / "sharded_on_ranks.py"), str(spec)]
    paths = [ROOT, Path(hf_ext.__file__).parents[1], HELPERS, *([CPU_AS_GPUS] if shards else [])]
    environment = {**os.environ, **(FSDP2 if shards else {}), "PYTHONPATH": os.pathsep.join(map(str, paths))}
    with subprocess.Popen(
        [sys.executable, *(launcher if processes > 1 else []), *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**environment, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            printed, _ = process.communicate(timeout=240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == (-signal.SIGKILL if dies else 0), printed[-3000:]
    return printed


def report(folder: Path, rank: int = 0, name: str = "end") -> dict[str, Any]:
    return json.loads((folder / f"{name}-{rank}.json").read_text())


def tensors(folder: Path, name: str = "end") -> dict[str, torch.Tensor]:
    """Gathered weights and optimizer state."""
    return load_file(folder / f"{name}.safetensors")


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not equal, bit for bit."""
    return [n for n in sorted({*one, *other}) if n not in one or n not in other or not torch.equal(one[n], other[n])]


def is_continued(folder: Path, whole: Path, processes: int = 2) -> bool:
    """Whether a run ended as the uninterrupted one, on every process: weights, optimizer, losses, random numbers."""
    for rank in range(processes):
        own, other = report(folder, rank), report(whole, rank)
        if any(own[key] != other[key] for key in ("losses", "random", "step", "world")):
            return False
    return not differences(tensors(folder), tensors(whole))
