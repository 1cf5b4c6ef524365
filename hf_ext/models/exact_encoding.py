"""A frozen encoder that computes in half precision, in float32 for a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from .affinity import AffinityModel
from .process_settings import replaced

Encode = Callable[[Sequence[str]], torch.Tensor]


@contextmanager
def computing_in_float32(encoder: nn.Module) -> Iterator[None]:
    """Within it, weights in half precision are widened, in place; afterwards they are narrowed, which loses nothing.

    No second copy is made, and nothing is read from disk. Cost: one pass over the weights each way, and memory for them
    in float32.
    """
    halves = [(p, p.dtype) for p in encoder.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    for parameter, _ in halves:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, dtype in halves:
            parameter.data = parameter.data.to(dtype)


def exact_encoding(model: AffinityModel, name: str, encode: Encode) -> Encode | None:
    """`encode`, which runs the encoder of input `name`, in float32; None where that is what it computes in already."""
    in_half = model.encoder_autocast is not None or model.encoder_dtype != torch.float32
    if not in_half or name not in model.frozen_inputs:
        return None

    def exactly(sequences: Sequence[str]) -> torch.Tensor:
        model.attach_encoders()
        encoder = model.encoders[str(model.tower_of(name).encoder)]
        with replaced(model.config, encoder_autocast=None), computing_in_float32(encoder):
            return encode(sequences)

    return exactly
