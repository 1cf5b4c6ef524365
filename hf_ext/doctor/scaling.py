"""Several devices on paper: what each holds, what each sends in a step, and how long that takes.

Used by the doctor's `--plan_scale`, by the table of accelerate_configs/README.md and by
benchmarks/scaling_two_processes.py. Nothing here is measured; GB are 10^9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .sizes import GRADIENT_BYTES, HALF_BYTES, OPTIMIZER_BYTES, WEIGHT_BYTES

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
# What is sent at once: DDP's bucket_cap_mb; DeepSpeed's reduce_bucket_size and allgather_bucket_size (elements).
DDP_BUCKET, ZERO_BUCKET = 25 * 2**20, 5 * 10**8


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
        messages: collective calls that it is cut into, over all `times`.
        every_pass: with every micro-batch; else once per optimizer step.
    """

    operation: str
    num_bytes: float
    num_ranks: int
    times: int = 1
    messages: int = 1
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
        gradients = GRADIENT_BYTES * trained
        return [
            Transfer("all-reduce", gradients, layout.num_processes, messages=max(1, math.ceil(gradients / DDP_BUCKET)))
        ]
    weights = layout.width * total
    gradients = (GRADIENT_BYTES if layout.strategy in ("FSDP2", "HSDP") else layout.width) * trained
    if layout.strategy == "ZeRO-2":
        calls = max(1, math.ceil(trained / ZERO_BUCKET))
        return [
            Transfer("reduce-scatter", gradients, group, messages=calls, every_pass=True),
            Transfer("all-gather", gradients, group, messages=calls),
        ]
    calls = shape.num_layers + 1  # a layer is a message; what is outside the layers is one more
    parts = [
        Transfer("all-gather", weights, group, times=2, messages=2 * calls, every_pass=True),
        Transfer("reduce-scatter", gradients, group, messages=calls, every_pass=True),
    ]
    if layout.strategy == "HSDP":
        parts.append(Transfer("all-reduce", gradients / group, layout.num_processes // group, messages=calls))
    return parts


def sent_bytes(parts: Sequence[Transfer], passes: int = 1) -> float:
    """What one process sends in an optimizer step of `passes` micro-batches."""
    return sum(part.sent_bytes * (passes if part.every_pass else 1) for part in parts)


def communication_seconds(
    parts: Sequence[Transfer], bytes_per_second: float, message_seconds: float, passes: int = 1
) -> float:
    """Overhead of each message, and bytes sent / bandwidth (nccl-tests, doc/PERFORMANCE.md: "overhead + size / bw").

    Args:
        bytes_per_second: of the slowest link of the ring, in one direction.
        message_seconds: what a collective call takes however little it sends.
        passes: micro-batches of the step.
    """
    calls = sum(part.messages * (passes if part.every_pass else 1) for part in parts)
    return calls * message_seconds + sent_bytes(parts, passes) / bytes_per_second


def hideable_seconds(strategy: str, compute_s: float, backward_share: float, passes: int = 1) -> float:
    """Compute of a step beside which its communication can run.

    DDP sends gradients while backward of the last micro-batch still runs (Li et al., arXiv:2006.15704, section 3.2.3);
    ZeRO-2 in every backward; FSDP2 and ZeRO-3 gather the next layer while one computes (Zhao et al., arXiv:2304.11277,
    section 3.3).
    """
    if strategy == "DDP":
        return compute_s * backward_share / passes
    return compute_s * (backward_share if strategy == "ZeRO-2" else 1.0)


def step_seconds(compute_s: float, communication_s: float, hideable_s: float = 0.0) -> float:
    """Compute, and the communication that is not hidden behind it."""
    return compute_s + max(0.0, communication_s - hideable_s)
