"""The machine: its card, cores, memory and disks, and what the card can do and why."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub
import psutil
import torch
from huggingface_hub import constants

from ..files import can_make, free_bytes
from ..hardware import Hardware, count_cpu_cores, describe_hardware, detect_hardware
from ..speedups.precision import best_precision

COLAB_DRIVE = "/content/drive"
SHARED_MEMORY = "/dev/shm"
# Default wheels of torch 2.11 and later are built for CUDA 13, which has no Pascal and no Volta.
DEFAULT_WHEELS_FROM = (7, 5)


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
        load_average: processes that wanted a core in the last minute, on average; 0.0 where the system does not tell.
        shared_memory_bytes: size of /dev/shm, through which data workers pass batches; None where there is none.
        output_dir, cache_dir, hub_cache: absolute folders of the run, of embeddings, of downloads.
        free_bytes, is_writable: free where each of them is or will be, and whether this user may write there.
        in_colab, drive_is_mounted: Google Colab, and its Drive under /content/drive.
        hub_is_offline, has_token: HF_HUB_OFFLINE, and a Hugging Face token here.
        cuda_architectures: what the installed torch has kernels for ("sm_80", "compute_90"); none where it sees no GPU.
    """

    hardware: Hardware
    is_described: bool
    num_gpus: int
    has_nvidia_driver: bool
    cpu_cores: int
    memory_gib: float
    free_memory_gib: float
    load_average: float
    shared_memory_bytes: int | None
    output_dir: str
    cache_dir: str
    hub_cache: str
    free_bytes: dict[str, int]
    is_writable: dict[str, bool]
    in_colab: bool
    drive_is_mounted: bool
    hub_is_offline: bool
    has_token: bool
    cuda_architectures: tuple[str, ...] = ()


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
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).total if os.path.isdir(SHARED_MEMORY) else None,
        **{name: str(folder) for name, folder in folders.items()},
        free_bytes={name: free_bytes(folder) for name, folder in folders.items()},
        is_writable={name: can_make(folder) for name, folder in folders.items()},
        in_colab="COLAB_RELEASE_TAG" in os.environ or _is_importable("google.colab"),
        drive_is_mounted=os.path.ismount(COLAB_DRIVE),
        hub_is_offline=bool(constants.HF_HUB_OFFLINE),
        has_token=bool(args.hub_token or huggingface_hub.get_token()),
        cuda_architectures=tuple(torch.cuda.get_arch_list()),
    )


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def describe_abilities(hardware: Hardware) -> list[tuple[str, bool, str]]:
    """What a device computes natively, and why: (ability, whether, reason). Of a CPU bf16 only: the rest is CUDA's."""
    if hardware.kind == "cpu":
        why = f"instructions of {hardware.name}" if hardware.native_bf16 else "no AVX512-BF16 or AMX found"
        return [("bf16", hardware.native_bf16, why)]
    have = f"{hardware.name} is no CUDA card"
    if hardware.compute_capability:
        have = f"{hardware.name} has compute capability {'.'.join(map(str, hardware.compute_capability))}"
    needs = {
        "bf16": (hardware.native_bf16, "native", f"native from 8.0, {have}; torch would emulate it"),
        "fp16": (hardware.native_fp16, "matrix units; training scales its loss", f"from 7.0, {have}"),
        "TF32": (hardware.tf32, "float32 products on matrix units", f"from 8.0, {have}"),
        "flash attention": (hardware.flash_attention_2, "torch's own, or flash-attn 2", f"from 8.0, {have}"),
    }
    return [(name, able, yes if able else no) for name, (able, yes, no) in needs.items()]


def describe_precision(hardware: Hardware) -> str:
    """The precision that `max_speed` trains in there, in a word and with the reason."""
    best = best_precision(hardware)
    reasons = {
        "bf16": "native bf16",
        "fp16": "fp16 with loss scaling: no native bf16",
        "fp32": "float32: neither bf16 nor fp16 is native",
    }
    return reasons[best]


def lacks_kernels(hardware: Hardware, architectures: Iterable[str]) -> bool:
    """Whether none of `architectures`, as `torch.cuda.get_arch_list()` names them, runs on a card.

    "sm_86" runs on cards of the same major capability from 8.6 on, "sm_90a" on 9.0 only; "compute_90" is compiled
    anew for every later card. A build without CUDA has none; then it is what the default wheels have.
    """
    card, known = hardware.compute_capability, [*architectures]
    if card is None:
        return False
    return not any(_runs(name, card) for name in known) if known else card < DEFAULT_WHEELS_FROM


def _runs(architecture: str, card: tuple[int, int]) -> bool:
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
    if match is None:
        return False
    built = int(match[2]), int(match[3])
    if match[4] == "a":
        return built == card
    return built <= card if match[1] == "compute" else built[0] == card[0] and built[1] <= card[1]


def advise(hardware: Hardware, architectures: Iterable[str]) -> str:
    """What to install: older cards have kernels in the wheels of older CUDA versions, newer ones in newer wheels."""
    built = [(int(m[1]), int(m[2])) for name in architectures if (m := re.fullmatch(r"sm_(\d+)(\d)[a-z]?", name))]
    oldest = min(built, default=DEFAULT_WHEELS_FROM)
    if hardware.compute_capability is not None and hardware.compute_capability < oldest:
        return (
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126 (built for CUDA "
            "12.6, which has kernels from compute capability 5.0 on)"
        )
    return "pip install --upgrade torch (newer wheels have kernels for newer cards)"
