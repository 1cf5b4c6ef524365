"""Frozen encoding, no gradients: sorted padded batches under autocast beside packed rows with weights in half.

Ours is what an affinity run does with a frozen encoder: weights stored in the half precision of the card, rows packed,
the kernel that `--attention auto` takes. Of a family without a packed path it is the same batches with such weights.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch

from hf_ext.hardware import detect_hardware
from hf_ext.models.packing import find_encoders, pack_encoders
from hf_ext.reporting.batch_counts import flops_coefficients
from hf_ext.speedups.attention import set_attention

from .shapes import Shape, make_rows, make_tokenizer
from .sides import OURS, STOCK, Bench, half_precision
from .work import Work

NUM_ROWS = {"full": 2048, "toy": 12}
TOKENS = {"full": 32_768, "toy": 64}  # of a padded batch
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Side:
    """An encoder, ready, and how it is called."""

    def __init__(self, name: str, shape: Shape, work: Work):
        self.name, self._device = name, work.device
        half = HALVES.get(half_precision(work.device) or "")
        model = shape.build(work.device, "frozen").eval()
        self.encoder: Any = model.base_model
        self.coefficients = flops_coefficients(self.encoder)
        self.kernel, self.autocast = "sdpa", half if name == STOCK else None
        if name == OURS and half is not None:
            for parameter in self.encoder.parameters():  # not buffers: positions are computed in float32
                parameter.data = parameter.data.to(half)
        if name == OURS and find_encoders(model):
            hardware = detect_hardware(work.device)
            gpu = "varlen" if hardware.flash_attention_2 and half is not None else "padded"
            self.kernel = "blocked" if hardware.kind == "cpu" else gpu
            set_attention(model, self.kernel)
            pack_encoders(model)

    @torch.inference_mode()
    def encode(self, batches: list[dict[str, torch.Tensor]]) -> tuple[float, float, torch.Tensor]:
        """Seconds, FLOPs, and the mean state of the first rows."""
        flops, first = 0.0, torch.empty(0)
        _wait(self._device)
        began = time.perf_counter()
        for number, batch in enumerate(batches):
            moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}
            kind = self._device.type
            with torch.autocast(kind, self.autocast) if self.autocast else nullcontext():
                states = self.encoder(**moved).last_hidden_state
            mask = moved["attention_mask"].unsqueeze(-1)
            pooled = (states * mask).sum(1) / mask.sum(1)
            first = pooled.float().cpu() if number == len(batches) - 1 else first
        _wait(self._device)
        seconds = time.perf_counter() - began
        for batch in batches:
            lengths = batch["attention_mask"].sum(1).double()
            flops += self.coefficients[0] * lengths.sum().item() + self.coefficients[1] * lengths.pow(2).sum().item()
        return seconds, flops, first


class Encoding(Bench):
    """Both sides over the same batches; what does not fit is encoded in batches of half the tokens."""

    def __init__(self, shape: Shape, work: Work):
        super().__init__(shape, "frozen, encoding only", work.device, NUM_ROWS[work.size], work.is_toy)
        self.tokens, self.first = TOKENS[work.size], dict[str, torch.Tensor]()
        self.sides = {name: Side(name, shape, work) for name in (STOCK, OURS)}

    def run(self, side: str, steps: int, passes: int, seed: int) -> dict[str, Any]:
        """All rows once, whatever the number of steps."""
        batches = make_batches(self.rows, self.is_toy, self.tokens // passes)
        seconds, flops, self.first[side] = self.sides[side].encode(batches)
        tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
        peak_memory = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        peak = detect_hardware(self.device).peak_tflops.get(half_precision(self.device) or "fp32")
        tflops = flops / seconds / 1e12
        found = {"tokens_per_s": tokens / seconds, "tflops": tflops, "mfu": tflops / peak if peak else None}
        return {**found, "peak_memory_gib": peak_memory / 2**30, "step_s": seconds, "wall_s": seconds}

    def describe(self) -> dict[str, Any]:
        """Kernels, and how far the sides are from each other."""
        ours, stock = self.first.get(OURS), self.first.get(STOCK)
        found: dict[str, Any] = {"kernels": {name: side.kernel for name, side in self.sides.items()}}
        if ours is not None and stock is not None and ours.shape == stock.shape:  # not where batches differ
            found["relative_difference"] = ((ours - stock).norm() / stock.norm()).item()
        return found


def make_batches(number: int, is_toy: bool, tokens: int) -> list[dict[str, torch.Tensor]]:
    """Rows sorted by length, the longest first, as many at a time as so many padded tokens hold."""
    rows = sorted(make_rows(number, is_toy)["sequence"], key=len, reverse=True)
    tokenizer, batches, start = make_tokenizer(), [], 0
    while start < len(rows):
        size = max(1, tokens // (len(rows[start]) + 2))
        batch = tokenizer(rows[start : start + size])
        batches.append({name: batch[name] for name in ("input_ids", "attention_mask")})
        start += size
    return batches


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
