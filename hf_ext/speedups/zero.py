"""What DeepSpeed's ZeRO leaves to decide; part of `sharding`.

ZeRO-2 splits gradients and optimizer, ZeRO-3 the weights too; its own files are the checkpoints'
(`training/backends/deepspeed.py`).
With `offload_optimizer`, accelerate hands DeepSpeed a DeepSpeedCPUAdam in place of the optimizer, whatever that was (a
CPU Adagrad for Adagrad), and says nothing: from AdamW it takes over rate, betas, epsilon and decay, and makes the same
steps up to rounding; anything else would be trained by another optimizer than asked for, and is refused.
"""

from __future__ import annotations

from typing import Any

from ..zero import offload_device, replaces_optimizer, zero_stage
from .base import Decision, Kind

ADAMW = ("adamw_torch_fused", "adamw_torch")


def decide_zero(name: str, kind: Kind, args: Any) -> Decision:
    """Applied, unless offloading would replace the optimizer that was asked for."""
    stage, device = zero_stage(args), offload_device(args)
    optimizer = str(getattr(args.optim, "value", args.optim))
    if replaces_optimizer(args) and "optimizer" not in args.deepspeed_plugin.deepspeed_config:
        if optimizer not in ADAMW:
            reason = (
                f"ZeRO-{stage} with its optimizer on the {device} would step DeepSpeed's CPU Adam, not --optim "
                f"{optimizer}: use --optim {' or '.join(ADAMW)}, leave offload_optimizer_device out, or set "
                "zero_force_ds_cpu_optimizer: false in a DeepSpeed JSON, which keeps an optimizer that runs on the CPU"
            )
            return Decision(name, kind, "refused", reason)
        what = f"DeepSpeed's CPU Adam makes AdamW's steps on the {device}"
        return Decision(name, kind, "applied", f"DeepSpeed ZeRO-{stage}; {what}", {"is_sharded": False})
    return Decision(name, kind, "applied", f"DeepSpeed ZeRO-{stage}", {"is_sharded": False})
