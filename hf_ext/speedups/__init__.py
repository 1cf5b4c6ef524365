"""The speed-ups, most of them a module each, some a class in a module; a new one is a line in `REGISTRY`.

The order there is the order of application.
"""

from __future__ import annotations

from . import (
    activation_checkpointing,
    attention,
    batch_size,
    compile,
    cpu_offload,
    cpu_threads,
    encoder_precision,
    lora,
    muon,
    packing,
    sharding,
)
from .base import Context, DataFacts, Decision, ModelFacts, Run, Speedup
from .batch_size import TokenBudget
from .fused_layers import FusedGelu, MaskedLMHead
from .precision import CpuMatmul, Precision, Tf32
from .stored_base import HalfBase, QuantizedBase
from .trainer_fields import DataLoading, Ddp, EmbeddingCache, FindBatchSize, LengthGrouping, OomLadder

REGISTRY: tuple[Speedup, ...] = (
    CpuMatmul,  # before anything computes
    Tf32,
    Precision,  # before parity is proven, which is in the training dtype
    cpu_threads,
    lora,  # before anything that replaces a forward function: the layers stand where they will stay
    QuantizedBase,  # before HalfBase, which rounds what is left in float32
    HalfBase,  # before parity is proven, on the weights as they will be
    FusedGelu,
    encoder_precision,  # before the cache, whose key holds the precision
    attention,
    packing,  # after attention, whose kernel it feeds
    MaskedLMHead,
    EmbeddingCache,
    batch_size,
    FindBatchSize,  # after the rows of a step are decided
    LengthGrouping,
    TokenBudget,
    OomLadder,
    DataLoading,
    muon,  # after LoRA and the precision, which decide what there is to step
    cpu_offload,
    activation_checkpointing,  # on layers as they stay; before those that run the model to see what it does
    sharding,  # once no layer changes its class any more, and no weights are added
    Ddp,
    compile,  # last: it compiles what the others left
)

__all__ = ["REGISTRY", "Context", "DataFacts", "Decision", "ModelFacts", "Run", "Speedup"]
