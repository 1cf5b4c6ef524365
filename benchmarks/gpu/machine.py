"""What a session was measured on: device, versions, and the sources by their content."""

from __future__ import annotations

import hashlib
import subprocess
from typing import Any

import torch

from hf_ext.hardware import Hardware, detect_hardware
from hf_ext.optional import installed_version

from .session import ROOT

SOURCES = ("hf_ext/**/*.py", "benchmarks/**/*.py", "recipes/**/*.py", "tests/**/*.py", "accelerate_configs/*.yaml")
PACKAGES = ("transformers", "accelerate", "peft", "bitsandbytes", "deepspeed", "flash-attn", "faesm", "triton")


def find_device() -> torch.device:
    """The first CUDA device, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Device and versions, JSON-able."""
    found: Hardware = detect_hardware(device)
    versions = {name: installed_version(name) for name in PACKAGES}
    return {
        "device": found.name,
        "kind": found.kind,
        "name": found.device_name,
        "memory_gib": found.memory_gib,
        "compute_capability": found.compute_capability and list(found.compute_capability),
        "count": torch.cuda.device_count() if device.type == "cuda" else 1,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, **versions},
    }


def identify_code() -> dict[str, str]:
    """The commit, for people, and a hash of all sources, which says whether it is still the same program."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # a downloaded folder
        commit = "unknown"
    return {"commit": commit, "sources": digest.hexdigest()[:16]}
