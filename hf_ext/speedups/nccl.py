"""NCCL's environment: the few variables of `--nccl_preset`, set before processes send anything, where you set none.

Class I. Effect: processes that talk by the wrong way fail with a message instead of being slow, or use more sockets.
Hardware: several processes on CUDA. Cost: none; `sockets` takes CPU time. Not measured. Source: `hf_ext/nccl.py`.
"""

from __future__ import annotations

import os

from ..nccl import NCCL_PRESETS, REASONS, is_connected, known_variables
from .base import Context, Decision, Kind, Run, off

NAME = "nccl"
KIND: Kind = "I"


def decide(context: Context) -> Decision:
    """Applies with `--nccl_preset` where NCCL connects processes; refused where it has read its variables already."""
    args, hardware, preset = context.args, context.hardware, context.args.nccl_preset
    if preset is None:
        if NAME in (args.speedups or []):
            return Decision(NAME, KIND, "skipped", "give --nccl_preset: which variables help depends on the machine")
        return off(NAME, KIND)
    if NAME in (args.without or []):
        reason = f"--nccl_preset {preset} and --without nccl contradict each other: keep one"
        return Decision(NAME, KIND, "refused", reason)
    if hardware.kind != "cuda" or context.world_size == 1:
        who = "one process" if context.world_size == 1 else f"processes on {hardware.name} talk by other means"
        return Decision(NAME, KIND, "skipped", f"not used: {who}")
    if args.ddp_backend not in (None, "nccl"):
        return Decision(NAME, KIND, "skipped", f"not used: --ddp_backend {args.ddp_backend} was asked for")
    wanted = NCCL_PRESETS[preset]
    seen = known_variables() if hardware.device_name else {}  # a described machine has another environment
    if hardware.device_name and is_connected() and wanted.keys() - seen.keys():
        words = " ".join(f"{name}={value}" for name, value in wanted.items() if name not in seen)
        reason = (
            f"NCCL connected the processes before: start with {words} accelerate launch ..., or make the trainer first"
        )
        return Decision(NAME, KIND, "refused", reason)
    kept = [
        f"{name}={seen[name]} was set before and stays, the preset has {value}"
        for name, value in wanted.items()
        if seen.get(name, value) != value
    ]
    reasons = {name: REASONS[name] for name in wanted}
    reason = "; ".join([f"{preset}: {', '.join(wanted)}", *kept])
    return Decision(NAME, KIND, "applied", reason, dict(wanted), {"reasons": reasons})


def apply(decision: Decision, run: Run) -> Decision:
    """Sets what is not set. Not undone: NCCL has read it, and a second trainer of the process finds it in place."""
    for name, value in decision.settings.items():
        os.environ.setdefault(name, value)
    return decision.with_evidence(in_force=known_variables())
