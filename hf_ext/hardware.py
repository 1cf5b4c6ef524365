"""What a device can do: `hardware.csv` has a row per card with its source, drivers and systems say which one is here.

- TFLOPS are the vendor's dense peaks (no 2:4 sparsity; data sheets since Hopper print only the sparse ones, which are
  halved there) with FP32 accumulation, the mode that torch's matmul runs in. GeForce cards run FP32 accumulation at
  half the rate that their boxes print. What no vendor paper states is left out; where only FP32 is given, it is 2 x
  CUDA cores x boost clock.
- The memory of a described device is the vendor's nominal size; the driver of a live one reports 1-9 % less.
- Drivers are regular expressions of the whole name, "NVIDIA " and "Tesla " stripped, any case.

Nothing here touches a device when it is imported; torch is imported inside the functions that need it.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ArgumentError
from .optional import import_problem

if TYPE_CHECKING:
    import torch

CPUINFO = Path("/proc/cpuinfo")
CUDA_GUIDE = "NVIDIA CUDA C++ Programming Guide, compute capabilities"
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What one device can do; every flag means natively, never by emulation. What is not stated is a conservative no.

    Attributes:
        name: the table's name ("T4", "A100-80GB", "cpu-avx512-bf16"), or the driver's where the table has no row.
        kind: "cuda", "rocm", "mps" or "cpu".
        compute_capability: (major, minor) of a CUDA device, else None.
        native_bf16: bf16 arithmetic in hardware. A T4 that torch lets run bf16 by emulation is False.
        native_fp16: fp16 matrix units (CUDA sm70+); False on CPU, where loss-scaled fp16 training has no gain.
        tf32: TF32 matrix units (sm80+).
        flash_attention_2: FlashAttention-2 kernels run (sm80+); whether the package imports is `optional`'s question.
        memory_gib: device memory (host memory on CPU); None where not known.
        peak_tflops: dense peaks by "fp32", "tf32", "fp16", "bf16"; a missing key is a number that was not published.
        source: who says so.
        device_name: the driver's name of a live device; empty for a described one.
    """

    name: str
    kind: str
    source: str
    compute_capability: tuple[int, int] | None = None
    native_bf16: bool = False
    native_fp16: bool = False
    tf32: bool = False
    flash_attention_2: bool = False
    memory_gib: float | None = None
    peak_tflops: dict[str, float] = dataclasses.field(default_factory=dict)
    device_name: str = ""

    @property
    def has_triton(self) -> bool:
        """Whether Triton generates kernels for it: ROCm, and CUDA from compute capability 7.0."""
        return self.kind == "rocm" or (self.compute_capability or (0, 0)) >= (7, 0)


@dataclasses.dataclass(frozen=True)
class Device:
    """What a run computes on: `dtype` is a key of `hardware.peak_tflops`, `index` the process's own CUDA device."""

    hardware: Hardware
    dtype: str
    num_processes: int
    index: int | None = None

    def why_no_mfu(self, flops_unknown: str) -> str:
        """Returns why MFU is not given; empty where it is."""
        if self.dtype not in self.hardware.peak_tflops:
            return f"no published {self.dtype} peak for {self.hardware.name}"
        return flops_unknown

    def mfu(self, flops_per_s: float) -> float:
        """Computes the share of the peak of all processes together, where that is known."""
        return flops_per_s / (self.hardware.peak_tflops[self.dtype] * 1e12 * self.num_processes)

    def utilization(self) -> float | None:
        """Asks the driver in which share of the last second or less a kernel ran. Cost: below a millisecond.

        None where it cannot be asked: no CUDA device, no nvidia-ml-py, a driver or a slice of a card without NVML.
        """
        if self.index is None or import_problem("pynvml") is not None:
            return None
        import torch
        from pynvml import NVMLError

        try:
            return torch.cuda.utilization(self.index) / 100
        except (NVMLError, RuntimeError):
            return None


def cuda_card(name: str, sm: tuple[int, int], memory_gib: float | None, source: str, **peak: float) -> Hardware:
    """Describes a CUDA device; all flags follow from the compute capability.

    Sources: fp16/bf16/tf32 units, CUDA guide and Transformer Engine support matrix; FlashAttention README.
    """
    return Hardware(
        name=name,
        kind="cuda",
        compute_capability=sm,
        native_bf16=sm >= (8, 0),
        native_fp16=sm >= (7, 0),
        tf32=sm >= (8, 0),
        flash_attention_2=sm >= (8, 0),
        memory_gib=memory_gib,
        source=source,
        peak_tflops=peak,
    )


def _read_rows() -> Iterator[tuple[Hardware, str]]:
    """Yields devices, and the names by which drivers know them."""
    yield Hardware("cpu", "cpu", "torch CPU build; no bf16 instructions assumed"), ""
    yield Hardware("cpu-avx512-bf16", "cpu", "Intel SDM: AVX512_BF16 (VDPBF16PS)", native_bf16=True), ""
    yield Hardware("cpu-amx-bf16", "cpu", "Intel SDM: AMX-BF16 (TDPBF16PS)", native_bf16=True), ""
    yield Hardware("mps", "mps", "Apple Metal Performance Shaders; conservative", native_fp16=True), ""
    with open(Path(__file__).with_name("hardware.csv"), encoding="ascii", newline="") as file:
        for row in csv.DictReader(file):
            major, minor = map(int, row["capability"].split("."))
            peaks = {name: float(row[name]) for name in PRECISIONS if row[name]}
            size = float(row["memory_gib"])
            source = row["source"]
            yield cuda_card(row["name"], (major, minor), size, source, **peaks), row["driver"]


ROWS = tuple(_read_rows())


def known_hardware() -> tuple[str, ...]:
    """Returns every name that `describe_hardware` knows, in table order."""
    return tuple(row.name for row, _ in ROWS)


def describe_hardware(name: str) -> Hardware:
    """Looks up a device that need not be present, so that a plan can be made for another machine.

    Args:
        name: a table name ("T4", "A100-80GB", "cpu-avx512-bf16"; any case, spaces or hyphens), a family ("A100" is the
            40 GB card, "V100" the 16 GB one, "H100" the SXM one), or a compute capability ("sm75").

    Returns:
        The table's row; for "smXY" the abilities of that capability, without memory or peaks.

    Raises:
        ArgumentError: the name is none of these; names the nearest and all known ones.
    """
    key = re.sub(r"[ _-]+", "-", name.strip()).lower()
    for row, _ in ROWS:
        if key in (row.name.lower(), row.name.lower().replace("-", "")):
            return row
    for row, _ in ROWS:  # the first of a family has the least memory, so a plan made for it also fits the others
        if re.fullmatch(re.escape(key) + r"-(\d+gb|sxm)", row.name.lower()):
            return row
    if match := re.fullmatch(r"sm-?(\d{1,2})(\d)", key):
        return cuda_card(f"sm{match[1]}{match[2]}", (int(match[1]), int(match[2])), None, CUDA_GUIDE)
    spelled = {known.lower(): known for known in known_hardware()}
    nearest = difflib.get_close_matches(key, list(spelled), n=1, cutoff=0.4)
    hint = f" Did you mean {spelled[nearest[0]]!r}?" if nearest else ""
    raise ArgumentError(
        f"Unknown hardware {name!r}.{hint} Known: {', '.join(spelled.values())}; or a compute capability like 'sm86'."
    )


def detect_hardware(device: str | torch.device | None = None) -> Hardware:
    """Says what a device of this machine can do; memory and bf16 come from the driver, not from the table.

    A CUDA card is matched by its full driver name and its memory, so a laptop, Ti, SUPER or MIG variant, which has
    other peaks, is never taken for the card in the table; it gets its compute capability's abilities and no peaks.

    Args:
        device: "cpu", "cuda", "cuda:1", "mps" or a torch.device; None takes CUDA, else MPS, else CPU.

    Raises:
        ArgumentError: the device is of another type, or is not present on this machine.
    """
    import torch

    if device is None:
        device = "mps" if torch.backends.mps.is_available() else "cpu"
        if torch.cuda.is_available():
            device = "cuda"
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


def _find_row(device_name: str, memory_gib: float) -> Hardware | None:
    """Finds the row of a driver's device name whose nominal memory fits, or None."""
    bare = re.sub(r"^(NVIDIA\s+)?((NVIDIA|Tesla)\s+)?", "", device_name.strip(), flags=re.IGNORECASE)
    for row, pattern in ROWS:
        if not pattern or not re.fullmatch(pattern, bare, flags=re.IGNORECASE):
            continue
        # Same name, other size is another card: the RTX 3080 with 12 GB has 70 SMs, the 3060 with 8 GB a narrower bus,
        # and a vGPU profile only a fraction. Drivers report 91 % (T4, ECC on) to 100 % of the nominal size.
        if 0.88 <= memory_gib / (row.memory_gib or 1) <= 1.02:
            return row
    return None


def _detect_cuda(index: int) -> Hardware:
    import torch

    name = torch.cuda.get_device_name(index)
    memory_gib = round(torch.cuda.get_device_properties(index).total_memory / 2**30, 2)
    live: dict[str, Any] = {"memory_gib": memory_gib, "device_name": name}
    with torch.cuda.device(index):  # is_bf16_supported asks about the current device only
        live["native_bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.version.hip is not None:  # AMD: capabilities are gfx numbers, so none of the sm rules hold
        row = Hardware(name, "rocm", "torch ROCm build; conservative", native_fp16=True)
        return dataclasses.replace(row, **live)
    sm = torch.cuda.get_device_capability(index)
    known = _find_row(name, memory_gib)
    if known is not None and known.compute_capability == sm:
        return dataclasses.replace(known, **live)
    return dataclasses.replace(cuda_card(name, sm, None, f"{CUDA_GUIDE}: sm{sm[0]}{sm[1]}, not in the table"), **live)


def _detect_cpu() -> Hardware:
    flags = _cpu_flags()
    # Up to these, bf16 takes twice the time of float32.
    if re.fullmatch("(?i)SSE41|AVX|AVX2(_VNNI.*)?|AVX512_CORE(_VNNI)?", os.environ.get("ONEDNN_MAX_CPU_ISA", "")):
        flags = frozenset()
    row = "cpu-avx512-bf16" if "avx512_bf16" in flags else "cpu"
    if "amx_bf16" in flags:
        row = "cpu-amx-bf16"
    return dataclasses.replace(describe_hardware(row), memory_gib=_host_memory_gib(), device_name="cpu")


def _cpu_flags() -> frozenset[str]:
    """Reads the instruction-set flags of the first core; empty where the system does not list them (so: no bf16)."""
    if not CPUINFO.is_file():
        return frozenset()
    for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def is_amd_cpu() -> bool:
    """Returns whether the system lists AMD as the maker of its CPU."""
    return CPUINFO.is_file() and "AuthenticAMD" in CPUINFO.read_text(encoding="utf-8", errors="replace")


def count_cpu_cores() -> int:
    """Counts cores that this process may use, after CPU affinity and a container's CPU quota; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: "<microseconds|max> <period>"
    if quota.is_file():
        allowed, _, period = quota.read_text(encoding="ascii").partition(" ")
        if allowed != "max":
            count = min(count, int(allowed) // int(period))
    return max(count, 1)


def _host_memory_gib() -> float:
    import psutil

    total = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (allowed := limit.read_text(encoding="ascii").strip()) != "max":
        total = min(total, int(allowed))
    return round(total / 2**30, 2)
