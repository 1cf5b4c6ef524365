"""How fast this machine really multiplies: one layer of the encoder itself, for two seconds."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch

from ..hardware import Hardware
from ..models.configuration import EncoderSpec
from ..models.encoders import build_encoder
from ..reporting.flops import flops_coefficients

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def measure_rate(
    config: dict[str, Any], hardware: Hardware, dtype: str, *, length: int, tokens: int, seconds: float
) -> float:
    """FLOP/s that one layer of an encoder reaches here, forward, with random weights.

    Args:
        config: the encoder's configuration as a dict.
        hardware: of this machine.
        dtype: "bf16" and "fp16" compute in it (on a CPU under autocast), others in float32.
        length, tokens: tokens per sequence, and per batch.
        seconds: how long to run, after one warm-up pass.

    Cost: `seconds`, and the memory of one layer with its word embeddings.
    """
    device = "cuda" if hardware.kind in ("cuda", "rocm") else hardware.kind
    layers = "num_layers" if "num_layers" in config else "num_hidden_layers"
    with torch.random.fork_rng(devices=[]):
        encoder = build_encoder(EncoderSpec("", {**config, layers: 1})).eval().to(device)
    if device != "cpu" and dtype in DTYPES:
        encoder = encoder.to(DTYPES[dtype])
    context = torch.autocast("cpu", dtype=DTYPES[dtype]) if device == "cpu" and dtype in DTYPES else nullcontext()
    rows = max(1, tokens // length)
    ids = (torch.arange(rows * length) % 20 + 4).view(rows, length).to(device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    per_token, per_pair = flops_coefficients(encoder)
    with torch.no_grad(), context:
        passes, elapsed = time_passes(lambda: encoder(**batch).last_hidden_state, device, seconds)
    return (per_token + per_pair * length) * rows * length * passes / elapsed


def time_passes(run: Any, device: str, seconds: float) -> tuple[int, float]:
    """Calls `run` once to warm up, then for so long, but at least once; how often, and the seconds that it took."""

    def finish() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    run()
    passes, start, elapsed = 0, finish(), 0.0
    while passes == 0 or elapsed < seconds:
        run()
        passes, elapsed = passes + 1, finish() - start
    return passes, elapsed
