"""Float32 matrix products through oneDNN on CPUs where torch's default library is slower.

Class N. Effect: `torch.set_float32_matmul_precision("medium")` routes float32 products, forward and backward, to
oneDNN, which uses AVX-512 on AMD too. The setting merely permits bf16: whether this CPU rounds is measured, and if it
does, the default comes back.
Evidence: largest error of a 512 x 512 x 512 product against float64, and time against the default.
A run that continues must round as it began, and a fresh one as the one before: time is taken once per machine
(`measured_once.py`).
Hardware: x86 CPUs; on an AMD EPYC (Zen 5) the products measured twice as fast with errors of 1e-6, that is, float32.
Cost: a few milliseconds for the measurement.
"""

from __future__ import annotations

from functools import partial

import torch

from ..matmul import FAST_CPU, HELD_MATMUL, MatmulPrecision, read_matmul_precision, set_matmul_precision
from .base import Context, Decision, Kind, Run, off
from .measured_once import measure_once
from .taking_turns import times_as_fast

NAME = "cpu_matmul"
KIND: Kind = "N"
MAX_ERROR = 1e-5  # bf16 products are off by about 1e-3
MIN_GAIN = 1.1
_SIZE = 512


def decide(context: Context) -> Decision:
    """Tried on CPUs only; kept if it measures exact and faster."""
    if not context.wants(NAME, KIND):
        return off(NAME, KIND)
    if context.hardware.kind != "cpu":
        return Decision(NAME, KIND, "skipped", f"{context.hardware.name} is not a CPU")
    if not torch.backends.mkldnn.is_available():
        return Decision(NAME, KIND, "skipped", "this torch build has no oneDNN")
    return Decision(NAME, KIND, "applied", "oneDNN products are exact and faster here")


def apply(decision: Decision, run: Run) -> Decision:
    """Switches to oneDNN where it is exact here and was found faster; all processes call it."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_SIZE, _SIZE, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    gain = measure_once(run.args, NAME, "speedup", partial(_measure_gain, left, right), plain=HELD_MATMUL.read_before())
    let_go = run.hold(HELD_MATMUL, FAST_CPU)
    error = ((left @ right - exact).abs().max() / exact.abs().max()).item()
    evidence = {"relative_error": float(f"{error:.2g}"), "speedup": gain}
    if error <= MAX_ERROR and gain >= MIN_GAIN:
        return decision.with_evidence(**evidence)
    let_go()
    reason = f"would round to bf16 (error {error:.1g})" if error > MAX_ERROR else f"no faster here ({gain:.2f}x)"
    return Decision(NAME, KIND, "skipped", reason, {}, evidence)


def _measure_gain(left: torch.Tensor, right: torch.Tensor) -> float:
    """How many times as fast oneDNN is as what no run has set, see `times_as_fast`; the settings are put back."""
    before, plain = read_matmul_precision(), HELD_MATMUL.read_before()
    try:
        return times_as_fast(*(partial(_multiply, setting, left, right) for setting in (FAST_CPU, plain)))
    finally:
        set_matmul_precision(before)


def _multiply(setting: MatmulPrecision, left: torch.Tensor, right: torch.Tensor) -> None:
    set_matmul_precision(setting)
    for _ in range(3):
        torch.mm(left, right)
