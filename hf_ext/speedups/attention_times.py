"""Which of two CPU kernels of attention is the faster one here, in the run's dtype and at its rows' lengths."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..data.segments import Segments
from ..models.attention import KERNELS
from .parity import Probe

ROUNDS = 5


def measure_gain(probes: list[Probe], faster: str, than: str) -> float:
    """How many times as fast one kernel is as another, forward, and backward where encoders train; to two digits.

    By processor time of one layer of each encoder on the first rows, the least of a few rounds that take turns.
    """
    runs = {kernel: [_one_layer(probe, kernel) for probe in probes] for kernel in (faster, than)}
    times: dict[str, list[float]] = {kernel: [] for kernel in runs}
    for _ in range(ROUNDS + 1):  # the first is not counted: libraries start in it
        for kernel, layers in runs.items():
            times[kernel].append(sum(layer() for layer in layers))
    return round(min(times[than][1:]) / min(times[faster][1:]), 2)


def _one_layer(probe: Probe, kernel: str) -> Callable[[], float]:
    """A function that runs attention of one layer once and returns the seconds."""
    config = probe.encoder.config
    heads = config.num_attention_heads
    segments = Segments.from_mask(probe.attention_mask)
    shape = (probe.num_tokens, heads, config.hidden_size // heads)
    generator = torch.Generator().manual_seed(0)
    dtype = probe.autocast or probe.dtype
    query, key, value = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3))

    def run() -> float:
        start = time.process_time()
        with torch.set_grad_enabled(probe.trains):
            output = KERNELS[kernel](query, key, value, segments, shape[-1] ** -0.5, 0.0, None)
            if probe.trains:
                torch.autograd.grad(output, (query, key, value), output.detach())
        return time.process_time() - start

    return run
