"""The speed-ups, most of them a module each, some a class in a module; a new one is a line in `REGISTRY`.

The order there is the order of application.
"""

from __future__ import annotations

from . import attention, batch_size, compile, encoder_precision, fused_qkv, packing, sharding
from .base import Context, DataFacts, Decision, ModelFacts, Run, Speedup
from .batch_size import TokenBudget
from .fused_layers import FusedGelu, MaskedLMHead
from .lora import HalfBase, Lora
from .optimizers import CpuOffload, Muon
from .precision import CpuMatmul, CpuMemory, CpuThreads, Precision, Tf32
from .trainer_fields import DataLoading, Ddp, EmbeddingCache, LengthGrouping

REGISTRY: tuple[Speedup, ...] = (
    CpuMatmul(),  # before anything computes
    Tf32(),
    Precision(),  # before parity is proven, which is in the training dtype
    CpuThreads(),
    CpuMemory(),
    Lora(),  # before anything that replaces a forward function: the layers stand where they will stay
    HalfBase(),  # before parity is proven, on the weights as they will be
    FusedGelu(),
    fused_qkv,
    encoder_precision,  # before the cache, whose key holds the precision
    attention,
    packing,  # after attention, whose kernel it feeds
    MaskedLMHead(),
    EmbeddingCache(),
    batch_size,
    LengthGrouping(),
    TokenBudget(),
    DataLoading(),
    Muon(),  # after LoRA and the precision, which decide what there is to step
    CpuOffload(),
    sharding,  # once no layer changes its class any more, and no weights are added
    Ddp(),
    compile,  # last: it compiles what the others left
)

__all__ = ["REGISTRY", "Context", "DataFacts", "Decision", "ModelFacts", "Run", "Speedup"]
