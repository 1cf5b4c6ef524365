"""DDP whose gradients live where they are sent from.

Class I. Effect: gradients are views of the buckets that processes exchange, not copies: 4 bytes per trained weight
less, and one copy of each (`gradient_as_bucket_view`).
Hardware: any, with more than one process. Trainer lets DDP walk the graph of every forward pass for weights that get no
gradient; `--ddp_find_unused_parameters false` ends that where all that train get one (`sharding` then freezes ESM's
contact head, which no loss reaches).
"""

from __future__ import annotations

from ..processes import fsdp_version
from .base import Context, Decision, Kind, Run, applied, off, skipped

NAME = "ddp"
KIND: Kind = "I"


def decide(context: Context) -> Decision:
    """On under DDP."""
    if not context.wants(NAME, KIND):
        return off()
    if context.world_size == 1:
        return off("one process")
    if fsdp_version(context.args) or context.args.deepspeed_plugin is not None:
        return skipped("weights or gradients are split: not DDP")
    return applied("gradients are views of what is exchanged")


def apply(decision: Decision, run: Run) -> Decision:
    """Changes nothing: `hf_ext/training/backends/base.py` tells accelerate, before it wraps the model."""
    return decision
