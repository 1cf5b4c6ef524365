"""What measurements share: an ESM-2 with random weights, turns, spreads, and what a process took."""

from __future__ import annotations

import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from transformers import EsmConfig, EsmForMaskedLM

SIZES = {"tiny": (32, 2, 4), "8M": (320, 6, 20), "150M": (640, 30, 20), "650M": (1280, 33, 20)}  # width, layers, heads
MASK, PAD = 32, 1
Found = TypeVar("Found")


def make_esm2(size: str, **changes: Any) -> EsmForMaskedLM:
    """ESM-2's shape with random weights, always the same; without dropout, which no two process counts draw alike."""
    width, layers, heads = SIZES[size]
    torch.manual_seed(0)
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    tokens = {"vocab_size": 33, "pad_token_id": PAD, "mask_token_id": MASK, "position_embedding_type": "rotary"}
    fixed = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 4 * width}
    model = EsmForMaskedLM(EsmConfig(**{**tokens, **fixed, **shape, **changes}))
    model.esm.contact_head.requires_grad_(False)  # no gradient in masked-LM training
    return model


def interleave(sides: Mapping[str, Callable[[], Found]], rounds: int) -> dict[str, list[Found]]:
    """Runs all sides in turn, every second round backwards; what each found per round, without a first to warm up."""
    found: dict[str, list[Found]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in [*sides][:: -1 if number % 2 else 1]:
            found[name].append(sides[name]())
    return {name: each[1:] for name, each in found.items()}


def quartiles(values: Sequence[float], digits: int = 2) -> list[float]:
    """The three of them, rounded; of a single value, itself."""
    if len(values) < 2:
        return [round(values[0], digits)] * 3
    return [round(value, digits) for value in statistics.quantiles(values, n=4, method="inclusive")]


def run_timed(command: Sequence[str], **given: Any) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """Runs a command; what it printed, its seconds of the processor (children included), and by the clock."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, **given)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done, cpu_s, time.perf_counter() - began
