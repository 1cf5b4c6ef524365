"""Several devices on paper: what each holds, and what each sends in a step.

Used by the table of accelerate_configs/README.md and by scaling_two_processes.py. Nothing here is measured; GB are
10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_ext.memory.stored import GRADIENT_BYTES, HALF_BYTES, OPTIMIZER_BYTES, WEIGHT_BYTES

TRAINED_BYTES = GRADIENT_BYTES + OPTIMIZER_BYTES  # of a parameter that trains, beside its weight
# DDP's buckets hold every gradient again, because Trainer leaves gradient_as_bucket_view off (torch's
# DistributedDataParallel: "the saved memory size will be equal to the total gradients size").
BUCKET_BYTES = 4
# FSDP2 holds this layer and the next one gathered, this one's gradients, and what it sends of them, in fp32.
GATHERED_LAYERS = 3
# DeepSpeed's own estimate (estimate_zero2_ and estimate_zero3_model_states_mem_needs): 2 of weights, and per process a
# part of 18 = 2 + 4 of gradients, 4 of fp32 weights, 8 of states. In fp32 the weights and gradients are 4 instead of 2.
ZERO_PARTS, ZERO3_HOST = 16, 27
# ZeRO-3 lets this many gathered parameters live (DeepSpeed's default of stage3_max_live_parameters).
ZERO3_LIVE = 10**9


@dataclass(frozen=True)
class Shape:
    """A model, as far as its bytes go. Layers are taken as equally large."""

    num_parameters: int
    num_trainable: int
    num_layers: int
    num_base: int = 0  # of them, frozen beside adapters and in half precision where no process splits them


@dataclass(frozen=True)
class Layout:
    """How processes share a model.

    Attributes:
        strategy: "one process", "DDP", "FSDP2", "HSDP", "ZeRO-2" or "ZeRO-3".
        group: processes that split one copy of the model; fewer than `num_processes` under HSDP only.
        half: bf16 or fp16.
        offload: what is split lies in host memory.
    """

    strategy: str
    num_processes: int
    group: int
    half: bool
    offload: bool = False

    @property
    def width(self) -> int:
        """Bytes of a parameter as it computes."""
        return HALF_BYTES if self.half else WEIGHT_BYTES


def state_bytes(layout: Layout, shape: Shape) -> float:
    """Weights, gradients and AdamW states on one device; activations come on top.

    Source: 16 bytes per parameter that trains, 4 of one that does not; autocast adds 2 of the first (a cast weight is
    kept for backward where it trains). Splits as Rajbhandari et al., ZeRO (arXiv:1910.02054, section 5).
    """
    total, trained, width = shape.num_parameters, shape.num_trainable, layout.width
    layer = total / shape.num_layers
    whole = WEIGHT_BYTES * total + TRAINED_BYTES * trained
    if layout.strategy in ("FSDP2", "HSDP"):
        kept = 0.0 if layout.offload else whole / layout.group
        return kept + (GATHERED_LAYERS * width + GRADIENT_BYTES) * layer
    if layout.strategy == "ZeRO-2":
        return width * total + (ZERO_PARTS + width) * trained / layout.group
    if layout.strategy == "ZeRO-3":
        kept = 0.0 if layout.offload else (width * total + ZERO_PARTS * trained) / layout.group
        return kept + width * min(total, ZERO3_LIVE) + 2 * width * layer
    whole -= shape.num_base * (WEIGHT_BYTES - HALF_BYTES) * layout.half
    return whole + trained * (HALF_BYTES * layout.half + BUCKET_BYTES * (layout.strategy == "DDP"))


def host_bytes(layout: Layout, shape: Shape) -> float:
    """Host memory that offloading takes on one machine; 0 without."""
    per_parameter = {"FSDP2": WEIGHT_BYTES + TRAINED_BYTES, "ZeRO-3": ZERO3_HOST}.get(layout.strategy, 0)
    return float(shape.num_parameters * per_parameter * layout.offload)


@dataclass(frozen=True)
class Transfer:
    """A collective operation of one step.

    Attributes:
        operation: "all-reduce", "all-gather" or "reduce-scatter".
        num_bytes: of all that is reduced or gathered.
        num_ranks: processes that take part.
        times: how often.
        every_pass: with every micro-batch; else once per optimizer step.
    """

    operation: str
    num_bytes: float
    num_ranks: int
    times: int = 1
    every_pass: bool = False

    @property
    def factor(self) -> float:
        """What a process sends of the data: (n - 1) / n in a ring, twice that for an all-reduce, `times` times.

        Source: NVIDIA nccl-tests, doc/PERFORMANCE.md.
        """
        rounds = 2 if self.operation == "all-reduce" else 1
        return self.times * rounds * (self.num_ranks - 1) / self.num_ranks

    @property
    def sent_bytes(self) -> float:
        """What one process sends, and receives."""
        return self.factor * self.num_bytes


def transfers(layout: Layout, shape: Shape) -> list[Transfer]:
    """What is sent: gradients under DDP; weights, forward and backward, and gradients where weights are split.

    Source: ZeRO (arXiv:1910.02054, section 7): 2 of the parameters, 3 where weights are split. Frozen parameters have
    no gradients, but are gathered. Gradients are fp32 under DDP with autocast and, as `speedups/sharding.py` has it,
    under FSDP2; of the computing width under ZeRO.
    """
    total, trained, group = shape.num_parameters, shape.num_trainable, layout.group
    if layout.num_processes == 1:
        return []
    if layout.strategy == "DDP":
        return [Transfer("all-reduce", GRADIENT_BYTES * trained, layout.num_processes)]
    weights = layout.width * total
    gradients = (GRADIENT_BYTES if layout.strategy in ("FSDP2", "HSDP") else layout.width) * trained
    if layout.strategy == "ZeRO-2":
        return [
            Transfer("reduce-scatter", gradients, group, every_pass=True),
            Transfer("all-gather", gradients, group),
        ]
    parts = [
        Transfer("all-gather", weights, group, times=2, every_pass=True),
        Transfer("reduce-scatter", gradients, group, every_pass=True),
    ]
    if layout.strategy == "HSDP":
        parts.append(Transfer("all-reduce", gradients / group, layout.num_processes // group))
    return parts


def sent_bytes(parts: Sequence[Transfer], passes: int = 1) -> float:
    """What one process sends in an optimizer step of `passes` micro-batches."""
    return sum(part.sent_bytes * (passes if part.every_pass else 1) for part in parts)
