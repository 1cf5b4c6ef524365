"""One module per speed-up. A new one is a module here and a line in `REGISTRY`, in the order of application."""

from __future__ import annotations

from . import (
    batch_size,
    cpu_matmul,
    data_loading,
    embedding_cache,
    encoder_precision,
    fused_gelu,
    fused_optimizer,
    length_grouping,
    precision,
    tf32,
)
from .base import Context, DataFacts, Decision, ModelFacts, Run, Speedup

REGISTRY: tuple[Speedup, ...] = (
    cpu_matmul,  # before anything computes
    tf32,
    fused_gelu,
    encoder_precision,  # before the cache, whose key holds the precision
    embedding_cache,
    precision,
    batch_size,
    length_grouping,
    data_loading,
    fused_optimizer,
)

__all__ = ["REGISTRY", "Context", "DataFacts", "Decision", "ModelFacts", "Run", "Speedup"]
