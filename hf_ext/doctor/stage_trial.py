"""How fast a generator trains on this machine: forward and backward of the model itself, on rows of such lengths."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ..data.varlen_layout import IGNORED
from ..hardware import Hardware
from ..models.generation.configuration import GeneratorConfig
from ..models.generation.model import AntibodyGenerator
from .measuring import DTYPES, time_passes
from .pair_lengths import PairLengths, count_pair_flops

FIRST_TOKENS = 8  # of each sequence, in the first step
FIRST_RESIDUE, NUM_RESIDUES = 4, 20  # ids of residues, in the generator's vocabulary and in that of ESM


def measure_training(
    config: GeneratorConfig, hardware: Hardware, dtype: str, lengths: PairLengths, num_rows: int, seconds: float
) -> tuple[float, int]:
    """FLOP/s of training steps without the optimizer, with random weights on random residues; tokens per sequence.

    A step has all its rows, of as many tokens as the time allows, 8, 16, 32, ..., up to their own. Fewer rows would be
    slower by far for their FLOPs: an LSTM's products are too small then.

    Args:
        config: of the generator. States of a frozen encoder are random numbers, since the run reads them from a cache.
        hardware: of this machine.
        dtype: "bf16" and "fp16" compute in it, others in float32.
        lengths: of the rows that are trained on.
        num_rows: of a step; a random choice.
        seconds: how long to measure.

    Cost: about twice `seconds`, or two steps of 8 tokens where these take longer; the memory of a step.
    """
    device = "cuda" if hardware.kind in ("cuda", "rocm") else hardware.kind
    rows = lengths.take(np.random.default_rng(0).permutation(len(lengths))[:num_rows])
    longest = int(max(rows.antigen_tokens.max(), rows.pair_tokens.max()))
    limit = min(FIRST_TOKENS, longest)
    context = torch.autocast(device, dtype=DTYPES[dtype]) if dtype in DTYPES else nullcontext()
    with torch.random.fork_rng(devices=[]), context:
        model = AntibodyGenerator(config).train().to(device)
        _time_step(model, rows.cut(limit), device)  # kernels that are built once took most of a second of it
        elapsed = _time_step(model, rows.cut(limit), device)
        while limit < longest and 4 * elapsed < seconds:
            limit = min(2 * limit, longest)
            elapsed = _time_step(model, rows.cut(limit), device)
        if elapsed < seconds:
            batch = _make_batch(model, rows.cut(limit), device)
            passes, total = time_passes(lambda: _step(model, batch), device, seconds / 2)
            elapsed = total / passes
        return count_pair_flops(model, rows.cut(limit), len(rows), is_training=True) / elapsed, limit


def _time_step(model: Any, rows: PairLengths, device: str) -> float:
    batch, begun = _make_batch(model, rows, device), time.perf_counter()
    _step(model, batch)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _step(model: Any, batch: dict[str, Any]) -> None:
    model(**batch).loss.backward()
    model.zero_grad()


def _make_batch(model: Any, rows: PairLengths, device: str) -> dict[str, torch.Tensor]:
    antigens = [_residues(length) for length in rows.antigen_tokens]
    ids = pad_sequence(antigens, batch_first=True, padding_value=1)
    lengths = torch.as_tensor(rows.antigen_tokens)
    batch = {
        "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long(),
        "labels": pad_sequence([_residues(n) for n in rows.pair_tokens], batch_first=True, padding_value=IGNORED),
        "antigen_index": torch.as_tensor(rows.antigen_index),
    }
    if model.config.architecture == "esm" and model.encoder.spec.training == "frozen":
        batch["encoder_outputs"] = torch.randn(*ids.shape, model.encoder.width)
    else:
        batch["input_ids"] = ids
    return {name: value.to(device) for name, value in batch.items()}


def _residues(length: int) -> torch.Tensor:
    return torch.randint(FIRST_RESIDUE, FIRST_RESIDUE + NUM_RESIDUES, (int(length),))
