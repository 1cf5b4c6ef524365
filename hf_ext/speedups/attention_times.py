"""Which of two CPU kernels of attention is the faster one here, in the run's dtype and at its rows' lengths."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..data.segments import Segments
from ..models.attention import KERNELS
from .parity import Probe
from .taking_turns import times_as_fast


def measure_gain(probes: list[Probe], faster: str, than: str) -> float:
    """How many times as fast one kernel is as another, forward, and backward where encoders train.

    By one layer of each encoder on the first rows; see `times_as_fast`.
    """
    return times_as_fast(_layers(probes, faster), _layers(probes, than))


def describe(probe: Probe) -> list[object]:
    """What decides the time of one layer of an encoder: its shape, whether it trains, the dtype, and the rows."""
    sizes = probe.encoder.config.num_attention_heads, probe.encoder.config.hidden_size
    return [*sizes, probe.attention_mask.sum(1).tolist(), probe.trains, probe.autocast or probe.dtype]


def _layers(probes: list[Probe], kernel: str) -> Callable[[], None]:
    """A function that runs attention of one layer of each encoder."""
    layers = [_one_layer(probe, kernel) for probe in probes]

    def run() -> None:
        for layer in layers:
            layer()

    return run


def _one_layer(probe: Probe, kernel: str) -> Callable[[], None]:
    """A function that runs attention of one layer once."""
    config = probe.encoder.config
    heads = config.num_attention_heads
    segments = Segments.from_mask(probe.attention_mask)
    shape = (probe.num_tokens, heads, config.hidden_size // heads)
    generator = torch.Generator().manual_seed(0)
    dtype = probe.autocast or probe.dtype
    query, key, value = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3))

    def run() -> None:
        with torch.set_grad_enabled(probe.trains):
            output = KERNELS[kernel](query, key, value, segments, shape[-1] ** -0.5, 0.0, None)
            if probe.trains:
                torch.autograd.grad(output, (query, key, value), output.detach())

    return run
