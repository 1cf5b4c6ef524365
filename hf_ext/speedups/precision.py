"""What products of matrices are computed in, by how many threads, and whether freed memory stays.

Mixed precision, TF32 on GPUs, oneDNN's float32, threads and freed memory on CPUs.

All are decided from what the hardware is, not from a clock: two runs of one command round alike.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import replace

import torch
from torch import nn

from ..hardware import Hardware, is_amd_cpu
from ..memory import MemoryModel, TrainConfig
from ..models import FAST_CPU, FAST_GPU, HELD_MATMUL, Held
from .base import Context, Costs, Decision, Run, Settings, Speedup, applied, off, refused, skipped

MAX_ERROR = 1e-5  # of a product in float32; in bf16 it is off by about 1e-3
_SIZE = 512
MIN_FLOPS = 8e6  # of a batch, forward (`benchmarks/results/plan_cost.json`)


class CpuMatmul(Speedup):
    """Float32 matrix products through oneDNN on AMD's CPUs, where torch's default library is slower.

    Class N. Effect: `torch.set_float32_matmul_precision("medium")` routes float32 products, forward and backward, to
    oneDNN, which uses AVX-512 on AMD too. The setting merely permits bf16: whether this CPU rounds is looked at, and if
    it does, the default comes back.
    Evidence: largest error of a 512 x 512 x 512 product against float64.
    Hardware: AMD's x86 CPUs; on an EPYC (Zen 5) the products measured twice as fast with errors of 1e-6, that is,
    float32. Intel's have MKL, which is made for them. Products of a perceptron with few rows are too small.
    Cost: a few milliseconds.
    """

    NAME = "cpu_matmul"
    KIND = "N"
    predicts = True

    def decide_wanted(self, context: Context) -> Decision:
        """Applies to CPUs of AMD with a torch that has oneDNN."""
        hardware = context.hardware
        if hardware.kind != "cpu":
            return skipped(f"{hardware.name} is not a CPU")
        if not torch.backends.mkldnn.is_available():
            return skipped("this torch build has no oneDNN")
        if hardware.device_name and not is_amd_cpu():
            return skipped("no CPU of AMD: torch's default library is made for this one")
        return applied("oneDNN's products are float32 too, and faster on AMD's CPUs")

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Switches to oneDNN where it is exact here, unless that makes a small model slower."""
        if small := _find_small(run):
            return small
        generator = torch.Generator().manual_seed(0)
        left, right = (torch.randn(_SIZE, _SIZE, generator=generator) for _ in range(2))
        exact = left.double() @ right.double()
        release = run.acquire(HELD_MATMUL, FAST_CPU)
        error = ((left @ right - exact).abs().max() / exact.abs().max()).item()
        if error > MAX_ERROR:
            release()
            decision = skipped(f"would round to bf16 (error {error:.1g})")
        return decision.with_evidence(relative_error=float(f"{error:.2g}"))


class Tf32(Speedup):
    """TF32 matrix products for what stays in float32 on Ampere and later GPUs.

    Class N. Effect: float32 products on tensor cores with 10-bit mantissas, accumulated in float32.
    Hardware: compute capability 8.0 and up; nothing to switch elsewhere.
    Source: NVIDIA A100 white paper (2020), "TF32 tensor cores".
    """

    NAME = "tf32"
    KIND = "N"
    predicts = True
    costs = {"float32": "tf32"}

    def decide(self, context: Context) -> Decision:
        """Meets or refuses an explicit `--tf32`; otherwise on where the hardware has it."""
        has_it = context.hardware.tf32
        missing = f"{context.hardware.name} has no TF32"
        if context.user_set("tf32") and context.args.tf32 is not None:
            if context.args.tf32 and not has_it:
                return refused(f"{missing}: leave --tf32 out")
            return applied("asked for") if context.args.tf32 else off("asked for")
        if not self.wanted(context):
            return off()
        if not has_it:
            return skipped(missing)
        return applied(f"{context.hardware.name} has TF32")

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Sets torch's float32 matmul precision to "high" for this run."""
        run.acquire(HELD_MATMUL, FAST_GPU)
        return decision


class Precision(Speedup):
    """Mixed precision for what trains: bf16 where the chip has it, fp16 with loss scaling where it has only that.

    Class N. Effect: matrix products in half precision, weights, heads, losses and metrics in float32.
    Hardware: bf16 from compute capability 8.0, and on CPUs with AMX, or with AVX512-BF16 if AMD made them: an Intel CPU
    that lists AVX512-BF16 and no AMX multiplied half as fast in it as in float32
    (`benchmarks/results/cpu_step_avx512.json`), so there it is taken only when asked for; fp16 on V100 and T4. A T4
    accepts `--bf16` through emulation, which is slower than float32, so asking for it is refused. On a CPU a batch of
    a perceptron with few rows takes less time than its casts, so there it is taken only when asked for.
    Cost: rounding of activations to 8 (bf16) or 11 (fp16) significant bits.
    Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.
    """

    NAME = "precision"
    KIND = "N"
    costs = {"half": True}
    group = "precision"

    def decide(self, context: Context) -> Decision:
        """Meets or refuses an explicit `--bf16`, `--fp16` or launcher setting.

        Otherwise takes the best native precision.

        `--bf16 false` where bf16 would be chosen leaves float32; so does `--fp16 false`.
        """
        hardware = context.hardware
        asked = context.args.mixed_precision
        if asked in ("bf16", "fp16"):
            return self._decide_asked(asked, hardware, context.user_set(asked))
        if not self.wanted(context):
            return off()
        best = best_precision(hardware)
        if context.args.deepspeed_plugin is not None:
            how = "accelerate launch --mixed_precision bf16"
            return skipped(f"DeepSpeed casts the whole model to what the launcher says: {how}")
        if context.caches_all_inputs:
            return skipped("only the head trains, and heads stay in float32")
        if best == "fp32":
            return skipped(no_half(hardware))
        if context.user_set(best):
            return skipped(f"--{best} false was asked for")
        has = "has native bf16" if best == "bf16" else "has fp16 but no native bf16"
        return applied(f"{hardware.name} {has}", {"mixed_precision": best})

    def _decide_asked(self, asked: str, hardware: Hardware, by_user: bool) -> Decision:
        if hardware.native_bf16 if asked == "bf16" else hardware.native_fp16 and hardware.kind == "cuda":
            return applied(f"asked for; native on {hardware.name}", {"mixed_precision": asked})
        other = best_precision(hardware)
        remedy = "leave it out" if other == "fp32" else f"use --{other}"
        if not by_user:
            asked += " comes from the launcher (mixed_precision of its file, ACCELERATE_MIXED_PRECISION),"
            remedy = "accelerate launch --mixed_precision no, or --config_file accelerate_configs/cpu.yaml"
        return refused(f"{asked} is not native on {hardware.name} and would be emulated: {remedy}")

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Sets the Trainer's own precision fields, unless that makes a small model slower."""
        precision = decision.settings["mixed_precision"]
        if run.args.mixed_precision != precision and (small := _find_small(run)):
            return small
        run.args.bf16 = precision == "bf16"
        run.args.fp16 = precision == "fp16"
        run.args.mixed_precision = precision
        return decision

    def count(self, costs: Costs, settings: Settings) -> Costs:
        """Lets what trains compute in it."""
        return replace(super().count(costs, settings), trained_dtype=settings["mixed_precision"])

    def saves_memory(self, memory: MemoryModel, config: TrainConfig) -> bool:
        """Returns whether activations are not in half precision yet, and could be."""
        return memory.has_half and not config.half


def _find_small(run: Run) -> Decision | None:
    """Skips, on a CPU, where a batch takes few operations: of linear layers alone, by weights and rows.

    Models with a configuration are larger: frozen encoders of ours are none of their modules.
    """
    layers = [layer for layer in run.model.modules() if next(layer.parameters(recurse=False), None) is not None]
    weights = sum(parameter.numel() for parameter in run.model.parameters())
    flops = 2 * weights * run.args.train_batch_size
    is_perceptron = not hasattr(run.model, "config") and all(isinstance(one, nn.Linear) for one in layers)
    if run.args.device.type != "cpu" or flops > MIN_FLOPS or not is_perceptron:
        return None
    told = f"{weights:,} weights times {run.args.train_batch_size} rows take {flops / 1e6:.2g} MFLOP"
    return skipped(f"{told}: below {MIN_FLOPS / 1e6:g} it costs more than it saves")


def best_precision(hardware: Hardware) -> str:
    """Returns "bf16", "fp16" or "fp32": the fastest that this hardware computes natively and Trainer can train in."""
    # Of this machine's own CPU; described ones are as the table says.
    is_slow = hardware.name == "cpu-avx512-bf16" and hardware.device_name and not is_amd_cpu()
    if hardware.native_bf16 and not is_slow:
        return "bf16"
    return "fp16" if hardware.kind == "cuda" and hardware.native_fp16 else "fp32"


def no_half(hardware: Hardware) -> str:
    """Returns why `best_precision` is float32."""
    if hardware.native_bf16:
        return f"{hardware.name} without AMX, and not of AMD: products in bf16 are slower there than in float32"
    return f"{hardware.name} computes neither bf16 nor fp16 natively"


VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_HELD_THREADS = Held(torch.get_num_threads, torch.set_num_threads)


class CpuThreads(Speedup):
    """One thread for each core that this process may use, where no number was given.

    Class N: sums over several threads may differ in their last bits. Effect: products of matrices run on several cores.
    `accelerate launch` gives a process one thread where no configuration names a CPU (`accelerate/commands/launch.py`,
    1.15), and torch by itself one per core of the machine, whatever a container's quota is.
    Hardware: CPUs with two cores or more, a run of one process. OMP_NUM_THREADS or MKL_NUM_THREADS that you set are
    met, but for OMP_NUM_THREADS=1 under `accelerate launch`, which may be its own word: set one to less on a machine
    whose cores others use, where several threads may be slower than one. `--without cpu_threads` keeps what the process
    has.
    """

    NAME = "cpu_threads"
    KIND = "N"

    def decide_wanted(self, context: Context) -> Decision:
        """Decides: on where one process has several cores, and the user has not said how many threads."""
        if context.hardware.kind != "cpu":
            return skipped(f"{context.hardware.name} is not a CPU")
        if context.world_size > 1:
            return skipped(f"{context.world_size} processes share the cores: the launcher says how many each has")
        if context.cpu_cores < 2:
            return skipped("one core")
        if name := chosen_by_user():
            return skipped(f"{name}={os.environ[name]} is set")
        return applied(f"one for each of {context.cpu_cores} cores", {"threads": context.cpu_cores})

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Sets the number until the run is over."""
        run.acquire(_HELD_THREADS, decision.settings["threads"])
        return decision


def chosen_by_user() -> str | None:
    """Returns the variable by which the user chose a number of threads; None where there is none, or accelerate's 1."""
    by_launcher = "ACCELERATE_MIXED_PRECISION" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    names = ("MKL_NUM_THREADS",) if by_launcher else VARIABLES
    return next((name for name in names if os.environ.get(name)), None)


_MMAP_THRESHOLD = -3  # of glibc's mallopt
_TRIM_THRESHOLD = -1
_OWN_BLOCKS = 32 << 20
KEPT_BYTES = 512 << 20
_MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


class CpuMemory(Speedup):
    """Freed memory stays with the process on Linux, so that the system need not clear it for the next step.

    Class I. Effect: glibc gives the end of its heap back as soon as 128 KiB of it are free, and asks for it again a
    moment later; here 512 MiB may stay, and blocks below 32 MiB come from the heap.
    A step of ESM-2 8M has some thousand page faults where it had 46,000 to 80,000 (`benchmarks/results/cpu_step.json`).
    Hardware: CPUs, with glibc (Linux but for Alpine). Thresholds that you set (MALLOC_TRIM_THRESHOLD_,
    MALLOC_MMAP_THRESHOLD_) are met. Lasts as long as the process: what was set before cannot be read.
    Cost: up to 512 MiB that would have been given back between steps.
    """

    NAME = "cpu_memory"
    predicts = True
    costs = {"kept_bytes": KEPT_BYTES}

    def decide_wanted(self, context: Context) -> Decision:
        """Decides: on for CPUs with glibc, unless the user has set its thresholds."""
        if context.hardware.kind != "cpu":
            return skipped(f"{context.hardware.name} is not a CPU")
        if platform.libc_ver()[0] != "glibc":
            return skipped("memory is not glibc's")
        if name := next((name for name in _MALLOC_VARIABLES if os.environ.get(name)), None):
            return skipped(f"{name} is set")
        return applied("up to 512 MiB stay for the next step")

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Sets both thresholds of this process."""
        return decision if keep_freed_memory() else skipped("glibc did not take the thresholds")


def keep_freed_memory() -> bool:
    """Does to this process what `CpuMemory` says; returns whether glibc took the thresholds."""
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _OWN_BLOCKS) and mallopt(_TRIM_THRESHOLD, KEPT_BYTES))
