"""Mixed precision for what trains: bf16 where the chip has it, fp16 with loss scaling where it has only that.

Class N. Effect: matrix products in half precision, weights, heads, losses and metrics in float32.
Hardware: bf16 from compute capability 8.0 and on CPUs with AVX512-BF16 or AMX where products measure faster in it than
in float32 (`half_rate.py`), which not all do; fp16 on V100 and T4. A T4 accepts
`--bf16` through emulation, which is slower than float32, so asking for it is refused.
Cost: rounding of activations to 8 (bf16) or 11 (fp16) significant bits.
Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.
"""

from __future__ import annotations

from ..hardware import Hardware
from .base import Context, Decision, Kind, Run, off
from .half_rate import GAIN, half_gain, too_slow

NAME = "precision"
KIND: Kind = "N"


def best_precision(hardware: Hardware) -> str:
    """ "bf16", "fp16" or "fp32": the fastest that this hardware computes natively and Trainer can train in."""
    if hardware.native_bf16:
        return "bf16"
    return "fp16" if hardware.kind == "cuda" and hardware.native_fp16 else "fp32"


def decide(context: Context) -> Decision:
    """An explicit `--bf16`, `--fp16` or launcher setting is met or refused; otherwise the best native precision.

    `--bf16 false` where bf16 would be chosen leaves float32; so does `--fp16 false`.
    """
    hardware, asked = context.hardware, context.args.mixed_precision
    if asked in ("bf16", "fp16"):
        return _decide_asked(asked, hardware)
    if not context.wants(NAME, KIND):
        return off(NAME, KIND)
    if context.args.deepspeed_plugin is not None:
        reason = "DeepSpeed casts the whole model to what the launcher says: accelerate launch --mixed_precision bf16"
        return Decision(NAME, KIND, "skipped", reason)
    if context.caches_all_inputs:
        return Decision(NAME, KIND, "skipped", "only the head trains, and heads stay in float32")
    best = best_precision(hardware)
    if best == "fp32":
        return Decision(NAME, KIND, "skipped", f"{hardware.name} computes neither bf16 nor fp16 natively")
    if context.user_set(best):
        return Decision(NAME, KIND, "skipped", f"--{best} false was asked for")
    reason = f"{hardware.name} has native bf16" if best == "bf16" else f"{hardware.name} has fp16 but no native bf16"
    return Decision(NAME, KIND, "applied", reason, {"mixed_precision": best})


def _decide_asked(asked: str, hardware: Hardware) -> Decision:
    native = hardware.native_bf16 if asked == "bf16" else hardware.native_fp16 and hardware.kind == "cuda"
    if native:
        return Decision(NAME, KIND, "applied", f"asked for; native on {hardware.name}", {"mixed_precision": asked})
    other = best_precision(hardware)
    remedy = "leave it out" if other == "fp32" else f"use --{other}"
    return Decision(NAME, KIND, "refused", f"{asked} is not native on {hardware.name} and would be emulated: {remedy}")


def apply(decision: Decision, run: Run) -> Decision:
    """Sets the Trainer's own precision fields; on a CPU, unless it was asked for, only where it measures faster."""
    precision, measured = decision.settings["mixed_precision"], {}
    is_asked = run.args.mixed_precision == precision
    if run.args.device.type == "cpu" and not is_asked:
        gain = half_gain(run.args, NAME)
        measured = {GAIN: gain}
        if problem := too_slow(gain):
            return Decision(NAME, KIND, "skipped", problem, {}, measured)
    run.args.bf16, run.args.fp16 = precision == "bf16", precision == "fp16"
    run.args.mixed_precision = precision
    return decision.with_evidence(**measured)
