"""Frozen encoding, no gradients: sorted padded batches under autocast beside packed rows with weights in half.

Ours is what an affinity run does with a frozen encoder: weights stored in the half precision of the card, rows packed,
the kernel that `--attention auto` takes. Of a family without a packed path it is the same batches with such weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from hf_ext.hardware import detect_hardware
from hf_ext.memory.out_of_memory import DidNotFit, attempt
from hf_ext.models.packing import find_encoders, pack_encoders
from hf_ext.reporting.flops import flops_coefficients
from hf_ext.speedups.attention import set_attention

from .rounds import ROUNDS, quartiles, ratio
from .shapes import Shape, make_rows, make_tokenizer
from .sides import OURS, STOCK, free_memory, half_precision
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


def interleave(shape: Shape, work: Work, budget_s: float, save: Callable[[dict[str, Any]], None]) -> None:
    """Both sides in turn over the same batches; what does not fit is encoded in batches of half the tokens."""
    began, hardware = time.monotonic(), detect_hardware(work.device)
    sides = {name: Side(name, shape, work) for name in (STOCK, OURS)}
    budgets = dict.fromkeys(sides, TOKENS[work.size])
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    failed: list[dict[str, Any]] = []
    first: dict[str, torch.Tensor] = {}
    longest = 0.0
    for number in range(-1, 1 if work.is_toy else ROUNDS):  # the first is warm-up
        round_began = time.monotonic()
        if number > 0 and round_began - began + longest > budget_s:
            break
        for name in [*sides][:: 1 if number % 2 else -1]:
            found, first[name] = _run(sides[name], budgets, work, failed)
            if number >= 0:
                runs[name].append(found)
        longest = max(longest, time.monotonic() - round_began)
        save(_describe(shape, sides, runs, budgets, failed, first, hardware))


def _run(side: Side, budgets: dict[str, int], work: Work, failed: list[dict[str, Any]]) -> tuple[Any, torch.Tensor]:
    while True:
        batches = make_batches(work, budgets[side.name])
        free_memory(work.device)
        try:
            seconds, flops, first = attempt(partial(side.encode, batches))
        except DidNotFit:
            failed.append({"side": side.name, "tokens": budgets[side.name]})
            budgets[side.name] //= 2
            if budgets[side.name] < 1024:
                raise
            continue
        tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
        peak = torch.cuda.max_memory_allocated() if work.device.type == "cuda" else 0
        return {"tokens_per_s": tokens / seconds, "tflops": flops / seconds / 1e12, "peak": peak}, first


def make_batches(work: Work, tokens: int) -> list[dict[str, torch.Tensor]]:
    """Rows sorted by length, the longest first, as many at a time as so many padded tokens hold."""
    rows = sorted(make_rows(NUM_ROWS[work.size], work.is_toy)["sequence"], key=len, reverse=True)
    tokenizer, batches, start = make_tokenizer(), [], 0
    while start < len(rows):
        size = max(1, tokens // (len(rows[start]) + 2))
        batch = tokenizer(rows[start : start + size])
        batches.append({name: batch[name] for name in ("input_ids", "attention_mask")})
        start += size
    return batches


def _describe(
    shape: Shape, sides: Any, runs: Any, budgets: Any, failed: Any, first: Any, hardware: Any
) -> dict[str, Any]:
    found: dict[str, Any] = {"model": shape.name, "ways": "frozen, encoding only", "did_not_fit": failed}
    found["rounds"] = len(runs[OURS])
    packs = sides[OURS].kernel != "sdpa"
    found["packing_known"] = packs or f"no packed path is known for {shape.family}: its batches keep their padding"
    found["sides"] = {}
    for name, measured in runs.items():
        about = {"kernel": sides[name].kernel, "tokens_per_batch": budgets[name]}
        if measured:
            peak = hardware.peak_tflops.get(half_precision(sides[name]._device) or "fp32")
            about |= {key: quartiles([run[key] for run in measured]) for key in ("tokens_per_s", "tflops")}
            about["mfu"] = quartiles([run["tflops"] / peak for run in measured]) if peak else None
            about["peak_memory_gib"] = quartiles([run["peak"] / 2**30 for run in measured])
        found["sides"][name] = about
    found["times_as_fast"] = {STOCK: ratio(runs[OURS], runs[STOCK])}
    ours, stock = first[OURS], first[STOCK]
    same = ours.shape == stock.shape  # not where one side had to take smaller batches
    found["relative_difference"] = ((ours - stock).norm() / stock.norm()).item() if same else None
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
