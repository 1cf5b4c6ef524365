"""One module per speed-up. A new one is a module here and a line in `REGISTRY`, in the order of application."""

from __future__ import annotations

from . import (
    activation_checkpointing,
    attention,
    batch_size,
    compile,
    cpu_matmul,
    cpu_offload,
    cpu_threads,
    data_loading,
    ddp,
    embedding_cache,
    encoder_precision,
    find_batch_size,
    fused_gelu,
    fused_optimizer,
    fused_rotary,
    length_grouping,
    lora,
    lora_base,
    masked_lm_head,
    muon,
    nccl,
    oom_ladder,
    packing,
    precision,
    quantized_base,
    sharding,
    tf32,
    token_budget,
)
from .base import Context, DataFacts, Decision, ModelFacts, Run, Speedup

REGISTRY: tuple[Speedup, ...] = (
    cpu_matmul,  # before anything computes
    tf32,
    precision,  # before parity is proven, which is in the training dtype
    cpu_threads,  # in that dtype; before anything else is timed
    lora,  # before anything that replaces a forward function: the layers stand where they will stay
    quantized_base,  # before lora_base, which rounds what is left in float32
    lora_base,  # before parity is proven, on the weights as they will be
    fused_gelu,
    fused_rotary,
    encoder_precision,  # before the cache, whose key holds the precision
    attention,
    packing,  # after attention, whose kernel it feeds
    masked_lm_head,
    embedding_cache,
    batch_size,
    find_batch_size,  # after the rows of a step are decided
    length_grouping,
    token_budget,
    oom_ladder,
    data_loading,
    fused_optimizer,
    muon,  # after LoRA and the precision, which decide what there is to step
    cpu_offload,
    activation_checkpointing,  # on layers as they stay; before those that run the model to see what it does
    nccl,  # no speed-up sends anything, so NCCL has not read its variables
    sharding,  # once no layer changes its class any more, and no weights are added
    ddp,  # after sharding, which freezes what gets no gradient
    compile,  # last: it compiles what the others left
)

__all__ = ["REGISTRY", "Context", "DataFacts", "Decision", "ModelFacts", "Run", "Speedup"]
