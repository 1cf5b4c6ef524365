"""TF32 matrix products for what stays in float32 on Ampere and later GPUs.

Class N. Effect: float32 products on tensor cores with 10-bit mantissas, accumulated in float32.
Hardware: compute capability 8.0 and up; nothing to switch elsewhere.
Source: NVIDIA A100 white paper (2020), "TF32 tensor cores".
"""

from __future__ import annotations

from ..matmul import FAST_GPU, HELD_MATMUL
from .base import Context, Decision, Kind, Run, off

NAME = "tf32"
KIND: Kind = "N"


def decide(context: Context) -> Decision:
    """An explicit `--tf32` is met or refused; otherwise on where the hardware has it."""
    if context.user_set("tf32") and context.args.tf32 is not None:
        if context.args.tf32 and not context.hardware.tf32:
            return Decision(NAME, KIND, "refused", f"{context.hardware.name} has no TF32: leave --tf32 out")
        return Decision(NAME, KIND, "applied" if context.args.tf32 else "off", "asked for", {"enabled": True})
    if not context.wants(NAME, KIND):
        return off(NAME, KIND)
    if not context.hardware.tf32:
        return Decision(NAME, KIND, "skipped", f"{context.hardware.name} has no TF32")
    return Decision(NAME, KIND, "applied", f"{context.hardware.name} has TF32", {"enabled": True})


def apply(decision: Decision, run: Run) -> Decision:
    """Sets torch's float32 matmul precision to "high" for this run."""
    run.hold(HELD_MATMUL, FAST_GPU)
    return decision
