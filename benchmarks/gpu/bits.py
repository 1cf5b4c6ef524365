"""8 and 4 bits on this device: AdamW's states, and the frozen base under LoRA, beside the same without."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import nullcontext
from typing import Any

import optimizer_states
import torch

from hf_ext.models.frozen_weights import quantize_linear_layers
from hf_ext.optional import import_problem

from .encoding import HALVES
from .shapes import SHAPES, make_collator, make_rows
from .sides import free_memory, half_precision
from .work import Work

STEPS = {"full": 250, "toy": 3}
REPEATS = {"full": 8, "toy": 2}
ROWS = {"full": 16, "toy": 4}


def measure(work: Work) -> None:
    """Reports the states, then a row per way to store the base; or that there is no bitsandbytes."""
    problem = import_problem("bitsandbytes")
    if problem:
        work.report(not_run=f"bitsandbytes: {problem}")
        return
    rows = optimizer_states.make_rows()
    for side in optimizer_states.SIDES:
        with tempfile.TemporaryDirectory() as folder:
            use_cpu = work.device.type == "cpu"
            run = optimizer_states.train(side, 0, rows, folder, STEPS[work.size], use_cpu)
        work.add("states", {"optimizer": side, "loss": run["losses"][-1], "bytes_per_number": run["bytes_per_number"]})
    reference: list[float] = []
    for bits in (None, 8, 4):
        row = train_base(work, bits)
        reference = reference or row["losses"]
        row["first_loss_less_that_of_floats"] = row["losses"][0] - reference[0]
        work.add("bases", row)


def train_base(work: Work, bits: int | None) -> dict[str, Any]:
    """Steps of LoRA on one batch: seconds of a step, losses, peak memory."""
    is_cuda = work.device.type == "cuda"
    shape = SHAPES[work.size][0]
    model = shape.build(work.device, "lora").train()
    layers = quantize_linear_layers(model, bits) if bits else []
    free_memory(work.device)  # of the float weights
    collated = make_collator()([*make_rows(ROWS[work.size], work.is_toy)])
    batch = {name: tensor.to(work.device) for name, tensor in collated.items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    half = HALVES.get(half_precision(work.device) or "")
    losses, seconds = [], []
    for _ in range(REPEATS[work.size]):
        began = time.perf_counter()
        with torch.autocast(work.device.type, half) if half else nullcontext():
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None
    found = {"bits": bits, "model": shape.name, "layers": len(layers), "losses": losses, "peak_memory_gib": peak}
    return {**found, "step_s": statistics.median(seconds[1:]), "weights_gib": _weights(model) / 2**30}


def _weights(model: Any) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
