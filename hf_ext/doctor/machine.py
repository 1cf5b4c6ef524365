"""The machine: its card, cores, memory and disks, and the packages on it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import huggingface_hub
import psutil
import torch
from huggingface_hub import constants
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ..files import can_make, free_bytes
from ..hardware import Hardware, count_cpu_cores, describe_hardware, detect_hardware
from ..optional import import_problem, installed_version

COLAB_DRIVE = "/content/drive"


@dataclass(frozen=True)
class Machine:
    """What stands there. Of a described card, everything but `hardware` is still this machine's.

    Attributes:
        hardware: the card, or the CPU where there is none.
        is_described: the card is not this machine's.
        num_gpus: CUDA devices that torch sees.
        has_nvidia_driver: an NVIDIA driver is installed, whether torch sees a device or not.
        cpu_cores: cores that this process may use.
        memory_gib, free_memory_gib: of the host.
        output_dir, cache_dir, hub_cache: absolute folders of the run, of embeddings, of downloads.
        free_bytes, is_writable: free where each of them is or will be, and whether this user may write there.
        in_colab, drive_is_mounted: Google Colab, and its Drive under /content/drive.
        hub_is_offline, has_token: HF_HUB_OFFLINE, and a Hugging Face token here.
    """

    hardware: Hardware
    is_described: bool
    num_gpus: int
    has_nvidia_driver: bool
    cpu_cores: int
    memory_gib: float
    free_memory_gib: float
    output_dir: str
    cache_dir: str
    hub_cache: str
    free_bytes: dict[str, int]
    is_writable: dict[str, bool]
    in_colab: bool
    drive_is_mounted: bool
    hub_is_offline: bool
    has_token: bool


def read_machine(args: Any, device: str | None = None) -> Machine:
    """Reads this machine, with the card that `device` names, if any, in place of its own.

    Args:
        args: `FastTrainingArguments`.
        device: a name that `describe_hardware` knows.

    Raises:
        ArgumentError: an unknown device.
    """
    hardware = detect_hardware(args.device) if device is None else describe_hardware(device)
    folders = {
        "output_dir": Path(args.output_dir).absolute(),
        "cache_dir": Path(args.embedding_cache_dir).expanduser().absolute(),
        "hub_cache": Path(constants.HF_HUB_CACHE).absolute(),
    }
    memory = psutil.virtual_memory()
    total_gib = detect_hardware("cpu").memory_gib or memory.total / 2**30  # a container's limit, where there is one
    return Machine(
        hardware=hardware,
        is_described=device is not None,
        num_gpus=torch.cuda.device_count(),
        has_nvidia_driver=shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists(),
        cpu_cores=count_cpu_cores(),
        memory_gib=total_gib,
        free_memory_gib=min(total_gib, round(memory.available / 2**30, 2)),
        **{name: str(folder) for name, folder in folders.items()},
        free_bytes={name: free_bytes(folder) for name, folder in folders.items()},
        is_writable={name: can_make(folder) for name, folder in folders.items()},
        in_colab="COLAB_RELEASE_TAG" in os.environ,
        drive_is_mounted=os.path.ismount(COLAB_DRIVE),
        hub_is_offline=bool(constants.HF_HUB_OFFLINE),
        has_token=bool(args.hub_token or huggingface_hub.get_token()),
    )


# --- packages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Package:
    """A distribution that the project names. `wanted` is a version rule (">=5.24,<6"); without those of
    `is_required` hf_ext never runs."""

    name: str
    installed: str | None
    wanted: str
    is_required: bool

    @property
    def problem(self) -> str | None:
        """None where it is fine, else "not installed", which version is wanted, or what its import raised.

        Cost: the import of an optional one, once; required ones are imported already.
        """
        if self.installed is None:
            return "not installed"
        if not SpecifierSet(self.wanted).contains(self.installed, prereleases=True):
            return f"{self.wanted} is wanted"
        if self.is_required:
            return None
        return import_problem(self.name.replace("-", "_"))


def read_packages() -> list[Package]:
    """Reads the project's own requirements, in their order; none where hf_ext runs without being installed."""
    try:
        lines = requires("hf_ext") or []
    except PackageNotFoundError:
        return []
    named = {one.name: one for one in map(Requirement, lines[::-1])}  # the first line of each: dev brings some again
    packages = []
    for name, one in reversed(named.items()):
        wanted = ",".join(sorted(map(str, one.specifier), reverse=True))
        packages.append(Package(name, installed_version(name), wanted, "extra" not in str(one.marker)))
    return packages
