"""Frozen encoding without gradients: padded batches under autocast beside packed rows with weights in half precision.

    python benchmarks/gpu_encoding.py --output encoding.json

Ours is what an affinity run does with a frozen encoder: weights stored in the half precision of the card, rows packed,
the kernel that `--attention auto` takes. Both sides get the same rows, sorted by length, as many at a time as so many
padded tokens hold, and take turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import interleave, quartiles
from gpu_session import MODELS, build_model, build_tokenizer, draw_chains

from hf_ext.hardware import Hardware, detect_hardware
from hf_ext.models import pack_encoders
from hf_ext.speedups.attention import set_attention

NUM_ROWS = {"full": 1024, "toy": 12}
TOKENS = {"full": 32_768, "toy": 64}  # of a padded batch
ROUNDS = {"full": 3, "toy": 1}
STOCK, OURS = "stock", "max_speed"
Batches = list[dict[str, torch.Tensor]]


def make_batches(tokenizer: Any, size: str, device: str) -> Batches:
    """Rows from the longest to the shortest, cut into batches."""
    rows, batches, start = sorted(draw_chains(NUM_ROWS[size], size == "toy"), key=len, reverse=True), [], 0
    while start < len(rows):
        end = start + max(1, TOKENS[size] // (len(rows[start]) + 2))
        batch = tokenizer(rows[start:end], padding=True, return_tensors="pt").to(device)
        batches.append({name: batch[name] for name in ("input_ids", "attention_mask")})
        start = end
    return batches


def make_encoder(side: str, model: Any, hardware: Hardware, half: torch.dtype | None) -> tuple[Any, str]:
    """The encoder of a model, ready, and its attention kernel."""
    model = model.to(hardware.kind).eval()
    if side == STOCK:
        return model.base_model, "sdpa"
    if half is not None:
        for parameter in model.parameters():  # not buffers: positions are computed in float32
            parameter.data = parameter.data.to(half)
    on_gpu = "varlen" if hardware.flash_attention_2 and half is not None else "padded"
    kernel = "blocked" if hardware.kind == "cpu" else on_gpu
    set_attention(model, kernel)
    pack_encoders(model)
    return model.base_model, kernel


@torch.inference_mode()
def encode(encoder: Any, batches: Batches, kind: str, autocast: torch.dtype | None) -> tuple[float, float, Any]:
    """Seconds, GiB, and the mean state of each row."""
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    began, pooled = time.perf_counter(), []
    with torch.autocast(kind, autocast) if autocast else nullcontext():
        for batch in batches:
            mask = batch["attention_mask"].unsqueeze(-1)
            pooled.append((encoder(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    states = torch.cat(pooled).float().cpu()  # waits for the card
    seconds = time.perf_counter() - began
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if kind == "cuda" else 0.0, states


def measure(family: str, size: str, hardware: Hardware) -> dict[str, Any]:
    """Tokens per second of both sides, their ratio round by round, and how far their states are from each other."""
    is_gpu = hardware.kind == "cuda"
    half = (torch.bfloat16 if hardware.native_bf16 else torch.float16) if is_gpu else None
    with tempfile.TemporaryDirectory() as folder:
        batches = make_batches(build_tokenizer(Path(folder)), size, hardware.kind)
    made = {side: make_encoder(side, build_model(family, size == "toy"), hardware, half) for side in (STOCK, OURS)}
    runs = {
        side: partial(encode, encoder, batches, hardware.kind, half if side == STOCK else None)
        for side, (encoder, _) in made.items()
    }
    found = interleave(runs, ROUNDS[size])
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    stock, ours = found[STOCK], found[OURS]
    return {
        "kernels": {side: kernel for side, (_, kernel) in made.items()},
        "tokens_per_s": {side: quartiles([tokens / run[0] for run in each], 0) for side, each in found.items()},
        "peak_memory_gib": {side: max(run[1] for run in each) for side, each in found.items()},
        "times_as_fast": quartiles([slow[0] / fast[0] for slow, fast in zip(stock, ours)]),
        "relative_difference": ((ours[-1][2] - stock[-1][2]).norm() / stock[-1][2].norm()).item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("full", "toy"), default="full", help="toy: tiny shapes, also on a CPU.")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for family, name in MODELS.items():
        found[name] = measure(family, args.size, detect_hardware())
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
