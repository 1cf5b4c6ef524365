"""Says what a device can do: one table, device -> abilities, with a source per row.

Nothing here touches a device when it is imported; torch is imported inside the functions that need it.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ArgumentError
from .hardware_table import ALIASES, CUDA_GUIDE, ROWS, Hardware, cuda_card, plain_device

if TYPE_CHECKING:
    import torch


def known_hardware() -> tuple[str, ...]:
    """Every name that `describe_hardware` knows, in table order."""
    return tuple(row.name for row, _ in ROWS)


def describe_hardware(name: str) -> Hardware:
    """Looks up a device that need not be present, so that a plan can be made for another machine.

    Args:
        name: a table name ("T4", "A100-80GB", "cpu-avx512-bf16"; any case, spaces or hyphens), a family ("A100" is the
            40 GB card, "V100" the 16 GB one, "H100" the SXM one), a driver's name ("NVIDIA A100-SXM4-80GB"), or a
            compute capability ("sm75").

    Returns:
        The table's row; for "smXY" the abilities of that capability, without memory or peaks.

    Raises:
        ArgumentError: the name is none of these; names the nearest and all known ones.
    """
    key = re.sub(r"[ _-]+", "-", name.strip()).lower()
    key = ALIASES.get(key, key).lower()
    for row, _ in ROWS:
        if key in (row.name.lower(), row.name.lower().replace("-", "")):
            return _fresh(row)
    if match := re.fullmatch(r"sm-?(\d{1,2})(\d)", key):
        return cuda_card(f"sm{match[1]}{match[2]}", (int(match[1]), int(match[2])), 1, None, CUDA_GUIDE)
    if (row_by_driver := _find_row(name, None)) is not None:
        return _fresh(row_by_driver)
    spelled = {known.lower(): known for known in known_hardware()}
    nearest = difflib.get_close_matches(key, list(spelled), n=1, cutoff=0.4)
    hint = f" Did you mean {spelled[nearest[0]]!r}?" if nearest else ""
    raise ArgumentError(
        f"Unknown hardware {name!r}.{hint} Known: {', '.join(spelled.values())}; or a compute capability like 'sm86'."
    )


def detect_hardware(device: str | torch.device | None = None) -> Hardware:
    """Says what a device of this machine can do; memory, core count and bf16 come from the driver, not from the table.

    A CUDA card is matched by its full driver name and its memory, so a laptop, Ti, SUPER or MIG variant, which has
    other peaks, is never taken for the card in the table; it gets its compute capability's abilities and no peaks.

    Args:
        device: "cpu", "cuda", "cuda:1", "mps" or a torch.device; None takes CUDA, else MPS, else CPU.

    Raises:
        ArgumentError: the device is of another type, or is not present on this machine.
    """
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"Unknown device {device!r}; use 'cpu', 'cuda', 'cuda:N' or 'mps'.") from error
    if wanted.type == "cpu":
        return _detect_cpu()
    if wanted.type == "mps" and torch.backends.mps.is_available():
        return dataclasses.replace(describe_hardware("mps"), device_name="mps")
    if wanted.type == "cuda" and (wanted.index or 0) < torch.cuda.device_count():
        return _detect_cuda(torch.cuda.current_device() if wanted.index is None else wanted.index)
    raise ArgumentError(
        f"Device {str(wanted)!r} is not on this machine or not one hf_ext knows: cpu, mps (available: "
        f"{torch.backends.mps.is_available()}), cuda (devices: {torch.cuda.device_count()})."
    )


def _fresh(row: Hardware, **changes: Any) -> Hardware:
    """A copy whose `peak_tflops` may be changed without changing the table."""
    return dataclasses.replace(row, peak_tflops=dict(row.peak_tflops), **changes)


def _find_row(device_name: str, memory_gib: float | None) -> Hardware | None:
    """The row of a driver's device name, or None; with memory, only if the size fits the row's nominal one."""
    bare = re.sub(r"^(NVIDIA|Tesla)\s+", "", re.sub(r"^NVIDIA\s+", "", device_name.strip()), flags=re.IGNORECASE)
    for row, pattern in ROWS:
        if not pattern or not re.fullmatch(pattern, bare, flags=re.IGNORECASE):
            continue
        # Same name, other size is another card: the RTX 3080 with 12 GB has 70 SMs, the 3060 with 8 GB a narrower bus,
        # and a vGPU profile only a share. Drivers report 91 % (T4, ECC on) to 100 % of the nominal size.
        if memory_gib is None or row.memory_gib is None or 0.88 <= memory_gib / row.memory_gib <= 1.02:
            return row
    return None


def _detect_cuda(index: int) -> Hardware:
    import torch

    name = torch.cuda.get_device_name(index)
    properties = torch.cuda.get_device_properties(index)
    memory_gib = round(properties.total_memory / 2**30, 2)
    live = {"memory_gib": memory_gib, "num_cores": properties.multi_processor_count, "device_name": name}
    with torch.cuda.device(index):  # is_bf16_supported asks about the current device only
        live["native_bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.version.hip is not None:  # AMD: capabilities are gfx numbers, so none of the sm rules hold
        row = plain_device(name, "rocm", "torch ROCm build; conservative", fp16=True, fused_sdpa=False)
        return _fresh(row, **live)
    sm = torch.cuda.get_device_capability(index)
    known = _find_row(name, memory_gib)
    if known is not None and known.compute_capability == sm:
        return _fresh(known, **live)
    return _fresh(cuda_card(name, sm, 1, None, f"{CUDA_GUIDE}: sm{sm[0]}{sm[1]}, not in the table"), **live)


def _detect_cpu() -> Hardware:
    flags = _cpu_flags()
    row = "cpu-amx-bf16" if "amx_bf16" in flags else "cpu-avx512-bf16" if "avx512_bf16" in flags else "cpu"
    return _fresh(describe_hardware(row), num_cores=count_cpu_cores(), memory_gib=_host_memory_gib(), device_name="cpu")


def _cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction-set flags of the first core; empty where the system does not list them (so: no bf16)."""
    if not cpuinfo.is_file():
        return frozenset()
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def is_amd_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the system lists AMD as the maker of its CPU."""
    return cpuinfo.is_file() and "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8", errors="replace")


def count_cpu_cores() -> int:
    """Cores that this process may use, after CPU affinity and a container's CPU quota; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: "<microseconds|max> <period>"
    if quota.is_file():
        allowed, _, period = quota.read_text(encoding="ascii").partition(" ")
        if allowed != "max":
            count = min(count, int(allowed) // int(period))
    return max(count, 1)


def _host_memory_gib() -> float | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (allowed := limit.read_text(encoding="ascii").strip()) != "max":
        total = min(total, int(allowed))
    return round(total / 2**30, 2)
