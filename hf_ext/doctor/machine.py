"""The machine: its card, cores, memory and disks, and the packages on it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub
import psutil
import torch
from huggingface_hub import constants
from packaging.requirements import Requirement

from ..files import can_make, free_bytes
from ..hardware import Hardware, count_cpu_cores, describe_hardware, detect_hardware
from ..optional import import_problem, installed_version
from ..speedups.precision import best_precision

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
    """This machine, with the card that `device` names, if any, in place of its own.

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
        in_colab="COLAB_RELEASE_TAG" in os.environ or _is_importable("google.colab"),
        drive_is_mounted=os.path.ismount(COLAB_DRIVE),
        hub_is_offline=bool(constants.HF_HUB_OFFLINE),
        has_token=bool(args.hub_token or huggingface_hub.get_token()),
    )


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def describe_precision(hardware: Hardware) -> str:
    """The precision that `max_speed` trains in there, in a word and with the reason."""
    best = best_precision(hardware)
    return {
        "bf16": "native bf16",
        "fp16": "fp16 with loss scaling: no native bf16",
        "fp32": "float32: neither bf16 nor fp16 is native",
    }[best]


# --- packages ---------------------------------------------------------------------------------------------------------

# Package -> (what it gates, name to import).
PURPOSES = {
    "torch": ("everything", "torch"),
    "transformers": ("everything", "transformers"),
    "accelerate": ("several devices", "accelerate"),
    "datasets": ("reading data", "datasets"),
    "peft": ("LoRA (--use_peft)", "peft"),
    "safetensors": ("checkpoints", "safetensors"),
    "huggingface_hub": ("downloads, pushes", "huggingface_hub"),
    "jinja2": ("the report", "jinja2"),
    "evaluate": ("metrics as modules", "evaluate"),
    "faesm": ("--attention faesm", "faesm"),
    "sentencepiece": ("T5 encoders' tokenizers", "sentencepiece"),
    "flash-attn": ("flash attention 2", "flash_attn"),
    "torchao": ("--optim adamw_torch_8bit", "torchao"),
    "bitsandbytes": ("--load_in_8bit, 4bit", "bitsandbytes"),
    "deepspeed": ("--deepspeed, ZeRO", "deepspeed"),
}


@dataclass(frozen=True)
class Package:
    """One distribution. `wanted` is a version rule (">=5.24,<6"), `extra` the optional group that brings it.

    `problem`: None where it is fine, else "not installed", "too old" (or too new), or what its import raised.
    """

    name: str
    installed: str | None
    wanted: str
    purpose: str
    extra: str | None = None
    problem: str | None = None

    @property
    def is_required(self) -> bool:
        """Whether hf_ext never runs without it."""
        return self.extra is None

    @property
    def command(self) -> str:
        """What installs a version that fits."""
        return f'pip install "{self.name}{self.wanted}"'


def read_packages() -> list[Package]:
    """The packages of `PURPOSES`, required ones first, in the order of the project's own requirements.

    Returns:
        Nothing where hf_ext runs without being installed, so that no requirements are known.

    Cost: the import of optional packages that are installed, once; required ones are imported already.
    """
    try:
        lines = requires("hf_ext") or []
    except PackageNotFoundError:
        return []
    named = {one.name: one for one in map(Requirement, lines[::-1])}  # the first line of each: dev brings some again
    packages = [_read_package(named[name]) for name in reversed(named) if name in PURPOSES]
    return sorted(packages, key=lambda package: not package.is_required)


def _read_package(requirement: Requirement) -> Package:
    purpose, module = PURPOSES[requirement.name]
    # 'extra == "flash"', as setuptools writes it
    extra = str(requirement.marker).split('"')[1] if requirement.marker and "extra" in str(requirement.marker) else None
    wanted = ",".join(sorted(str(rule) for rule in requirement.specifier)[::-1])
    return check_package(requirement.name, installed_version(requirement.name), wanted, purpose, extra, module)


def check_package(
    name: str, installed: str | None, wanted: str, purpose: str, extra: str | None = None, module: str | None = None
) -> Package:
    """Compares a version with the rule; of one that fits, tries the import, where `module` names one."""
    problem = None
    if installed is None:
        problem = "not installed"
    elif not Requirement(f"{name}{wanted}").specifier.contains(installed, prereleases=True):
        problem = f"{wanted} is wanted"
    elif module:
        problem = import_problem(module)
    return Package(name, installed, wanted, purpose, extra, problem)
