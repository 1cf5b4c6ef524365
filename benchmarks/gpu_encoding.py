"""Frozen encoding without gradients: padded batches under autocast beside packed rows with weights in half precision.

A part of `gpu_session.py`. Ours is what a run does with a frozen encoder: weights stored in the half precision of the
card, rows packed, the kernel that `--attention auto` takes. All sides get the same rows, sorted by length, as many at a
time as so many padded tokens hold, and take turns. Other choices of `--attention` come last, on ESM-2.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from gpu_parts import COMPILES_S, OURS, ROUNDS, STOCK, Shape, build_model, build_tokenizer, draw_chains
from gpu_rounds import Entry

from hf_ext.hardware import Device, Hardware, detect_hardware
from hf_ext.models import pack_encoders
from hf_ext.speedups.attention import FAESM_SDPA, set_attention

MODELS = {"esm2": "ESM-2 650M", "esmc": "ESM C 300M"}
TOKENS, TOY_TOKENS = 32_768, 64  # of a padded batch
OTHERS = ("faesm", "fa2", "flex")  # flex last: it is compiled
Batches = list[dict[str, torch.Tensor]]


def make_batches(tokenizer: Any, shape: Shape, device: str) -> Batches:
    """Rows from the longest to the shortest, cut into batches."""
    rows, batches, start = sorted(draw_chains(shape.encoded, shape.is_toy), key=len, reverse=True), [], 0
    while start < len(rows):
        end = start + max(1, (TOY_TOKENS if shape.is_toy else TOKENS) // (len(rows[start]) + 2))
        batch = tokenizer(rows[start:end], padding=True, return_tensors="pt").to(device)
        batches.append({name: batch[name] for name in ("input_ids", "attention_mask")})
        start = end
    return batches


def choose_kernel(hardware: Hardware, half: torch.dtype | None) -> str:
    """The one of `--attention auto`."""
    on_gpu = "varlen" if hardware.flash_attention_2 and half is not None else "padded"
    return "blocked" if hardware.kind == "cpu" else on_gpu


def choose_half(hardware: Hardware) -> torch.dtype | None:
    if hardware.kind != "cuda":
        return None
    return torch.bfloat16 if hardware.native_bf16 else torch.float16


def make_encoder(model: Any, half: torch.dtype | None, kernel: str) -> Any:
    """The encoder of a model, ready; `sdpa` is the stock one, in float32 and padded."""
    model = model.eval()
    if kernel == "sdpa":
        return model.base_model
    if half is not None:
        for parameter in model.parameters():  # not buffers: positions are computed in float32
            parameter.data = parameter.data.to(half)
    set_attention(model, kernel)
    if not kernel.startswith("faesm"):  # whose flash kernel takes padding out by itself
        pack_encoders(model)
    return model.base_model


class Side:
    """An encoder with a kernel, made when its first turn comes; `states` are the mean ones of each row, of the last."""

    def __init__(self, make: Callable[[], Any], batches: Batches, hardware: Hardware, kernel: str) -> None:
        self.make = make
        self.batches = batches
        self.hardware = hardware
        self.kernel = kernel
        self.states: Any = None

    @cached_property
    def encoder(self) -> Any:
        """Which has seen the longest rows and the shortest."""
        made = make_encoder(self.make(), choose_half(self.hardware), self.kernel)
        self.encode(made, [self.batches[0], self.batches[-1]])
        return made

    @torch.inference_mode()
    def encode(self, encoder: Any, batches: Batches) -> torch.Tensor:
        """Mean states of each row, on the CPU, for which the card is waited for."""
        half, pooled = choose_half(self.hardware), []
        with torch.autocast(self.hardware.kind, half) if half and self.kernel == "sdpa" else nullcontext():
            for batch in batches:
                mask = batch["attention_mask"].unsqueeze(-1)
                pooled.append((encoder(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
        return torch.cat(pooled).float().cpu()

    def __call__(self) -> dict[str, Any]:
        """A turn: tokens per second, and bytes without those of other sides."""
        kind, half, encoder = self.hardware.kind, choose_half(self.hardware), self.encoder
        weights, others = [*encoder.parameters()], 0
        if kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
            others = torch.cuda.memory_allocated() - sum(one.nbytes for one in weights)
            torch.cuda.synchronize()
        began = time.perf_counter()
        self.states = self.encode(encoder, self.batches)
        seconds = time.perf_counter() - began
        tokens = sum(int(batch["attention_mask"].sum()) for batch in self.batches)
        device = Device(self.hardware, {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(half, "fp32"), 1)
        flops = 2 * sum(one.numel() for one in weights) * tokens
        mfu = None if device.why_no_mfu("") else device.mfu(flops / seconds)
        peak = torch.cuda.max_memory_allocated() - others if kind == "cuda" else 0
        return {"unit": "tokens", "rate": tokens / seconds, "mfu": mfu, "peak_bytes": peak}


def run_encoding(entry: Entry, shape: Shape) -> bool:
    """Both models, padded and packed; then other kernels."""
    hardware = detect_hardware()
    entry.begin("its rows")
    best = choose_kernel(hardware, choose_half(hardware))
    batches = make_batches(build_tokenizer(), shape, hardware.kind)
    sized = shape if shape.is_toy else replace(shape, esm2="650M")
    rounds = 1 if shape.is_toy else ROUNDS
    kernels = {"faesm": "faesm" if best == "varlen" else FAESM_SDPA, "fa2": "fa2", "flex": "flex"}
    sides = {}
    for family, name in MODELS.items():
        make = partial(build_model, family, sized, hardware.kind)
        sides[family] = {f"{name}, {STOCK}": Side(make, batches, hardware, "sdpa")}
        sides[family][f"{name}, {OURS}"] = Side(make, batches, hardware, best)
    make = partial(build_model, "esm2", sized, hardware.kind)
    others = {f"{MODELS['esm2']}, {kernels[one]}": Side(make, batches, hardware, kernels[one]) for one in OTHERS}
    entry.result |= {"what": "frozen", "kernel": best}
    is_done = entry.take_rounds({**sides["esm2"], **sides["esmc"]}, rounds)
    for pair in sides.values():
        padded, packed = (side.states for side in pair.values())
        if padded is not None and packed is not None:
            name = next(iter(pair)).rpartition(",")[0]
            difference = ((packed - padded).norm() / padded.norm()).item()
            entry.result.setdefault("relative_difference", {})[name] = difference
    return is_done and entry.take_rounds(others, rounds, warms_up=True, least_s=0 if shape.is_toy else COMPILES_S)
