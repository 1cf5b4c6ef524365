"""The speed-ups, a class each; a new one is its file and a line in `REGISTRY`.

The order there is the order of application.
"""

from __future__ import annotations

from .attention import Attention
from .base import Speedup
from .batch_size import BatchSize, FindBatchSize, LrScaling, TokenBudget
from .compile import ActivationCheckpointing, Compile
from .encoder_precision import EncoderPrecision
from .fused_layers import FusedGelu, FusedQkv, MaskedLMHead
from .lora import CodedBase, HalfBase, Lora
from .optimizers import CpuOffload, Muon
from .packing import Packing
from .precision import CpuMatmul, CpuMemory, CpuThreads, Precision, Tf32
from .sharding import Sharding
from .trainer_fields import DataLoading, Ddp, EmbeddingCache, LengthBuckets, LengthGrouping

REGISTRY: tuple[Speedup, ...] = (
    CpuMatmul(),  # before anything computes
    Tf32(),
    Precision(),  # before parity is proven, which is in the training dtype
    CpuThreads(),
    CpuMemory(),
    Lora(),  # before anything that replaces a forward function: the layers stand where they will stay
    CodedBase(),  # before parity is proven, on the weights as they will be
    HalfBase(),  # what the codes left
    FusedGelu(),
    FusedQkv(),
    EncoderPrecision(),  # before the cache, whose key holds the precision
    Attention(),
    Packing(),  # after attention, whose kernel it feeds
    MaskedLMHead(),
    EmbeddingCache(),
    BatchSize(),
    FindBatchSize(),  # after it, whose rows per step it keeps
    LengthBuckets(),
    LrScaling(),
    LengthGrouping(),
    TokenBudget(),
    DataLoading(),
    Muon(),  # after LoRA and the precision, which decide what there is to step
    CpuOffload(),
    Sharding(),  # once no layer changes its class any more, and no weights are added
    Ddp(),
    ActivationCheckpointing(),  # around what the others left
    Compile(),  # last: it compiles what the others left
)


def find_speedup(name: str) -> Speedup:
    """Returns the speed-up of this name.

    Raises:
        LookupError: there is none, with the names of those that there are.
    """
    by_name = {speedup.NAME: speedup for speedup in REGISTRY}
    if name not in by_name:
        raise LookupError(f"speed-up {name!r}: there are {', '.join(by_name)}.")
    return by_name[name]
