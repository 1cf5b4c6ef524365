"""The speed-ups, a class each; a new one is its file and a line in `REGISTRY`."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .attention import set_attention
    from .base import KIND_NAMES, Context, Costs, Decision, Run, Speedup, optimizer_name
    from .compile import GRAPHS
    from .encoder_precision import asked_bits, halve_encoders, set_encoder_dtype
    from .evidence.facts import describe_data, describe_model
    from .evidence.sample import collate, evaluating, modes_kept
    from .fused_layers import fuse_gelu
    from .lora import lora_settings
    from .optimizers import BITSANDBYTES
    from .precision import best_precision
    from .registry import REGISTRY, find_speedup
    from .trainer_fields import CPU_TOKENS_PER_BATCH, GPU_TOKENS_PER_BATCH
else:
    __getattr__, __dir__, __all__ = offer(__name__)
