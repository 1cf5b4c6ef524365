"""Frozen encoding without gradients: padded batches under autocast beside packed rows with weights in half precision.

    python benchmarks/gpu_encoding.py --output encoding.json
    python benchmarks/gpu_encoding.py --kernels --output attention.json

Ours is what an affinity run does with a frozen encoder: weights stored in the half precision of the card, rows packed,
the kernel that `--attention auto` takes. Both sides get the same rows, sorted by length, as many at a time as so many
padded tokens hold, and take turns. With `--kernels`, other choices of `--attention` take turns with that one, on fewer
rows; one that does not run says why.
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
from hf_ext.speedups.attention import FAESM_SDPA, set_attention

NUM_ROWS = {"full": 1024, "toy": 12}
TOKENS = {"full": 32_768, "toy": 64}  # of a padded batch
ROUNDS = {"full": 3, "toy": 1}
STOCK, OURS = "stock", "max_speed"
OTHERS = ("faesm", "fa2", "flex")  # flex last: it is compiled
FEWER = 4  # times, for other kernels
Batches = list[dict[str, torch.Tensor]]


def make_batches(tokenizer: Any, size: str, device: str, num_rows: int) -> Batches:
    """Rows from the longest to the shortest, cut into batches."""
    rows, batches, start = sorted(draw_chains(num_rows, size == "toy"), key=len, reverse=True), [], 0
    while start < len(rows):
        end = start + max(1, TOKENS[size] // (len(rows[start]) + 2))
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


def make_encoder(model: Any, hardware: Hardware, half: torch.dtype | None, kernel: str) -> Any:
    """The encoder of a model, ready; `sdpa` is the stock one, in float32 and padded."""
    model = model.to(hardware.kind).eval()
    if kernel == "sdpa":
        return model.base_model
    if half is not None:
        for parameter in model.parameters():  # not buffers: positions are computed in float32
            parameter.data = parameter.data.to(half)
    set_attention(model, kernel)
    if not kernel.startswith("faesm"):  # whose flash kernel takes padding out by itself
        pack_encoders(model)
    return model.base_model


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


def measure(family: str, size: str, hardware: Hardware, kernels: dict[str, str], num_rows: int) -> dict[str, Any]:
    """Tokens per second of two sides, their ratio round by round, and how far their states are from each other."""
    half = choose_half(hardware)
    with tempfile.TemporaryDirectory() as folder:
        batches = make_batches(build_tokenizer(Path(folder)), size, hardware.kind, num_rows)
    runs = {}
    for side, kernel in kernels.items():
        encoder = make_encoder(build_model(family, size == "toy"), hardware, half, kernel)
        runs[side] = partial(encode, encoder, batches, hardware.kind, half if kernel == "sdpa" else None)
    found = interleave(runs, ROUNDS[size])
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    stock, ours = found.values()
    return {
        "kernels": kernels,
        "tokens_per_s": {side: quartiles([tokens / run[0] for run in each], 0) for side, each in found.items()},
        "peak_memory_gib": {side: max(run[1] for run in each) for side, each in found.items()},
        "times_as_fast": quartiles([slow[0] / fast[0] for slow, fast in zip(stock, ours)]),
        "relative_difference": ((ours[-1][2] - stock[-1][2]).norm() / stock[-1][2].norm()).item(),
    }


def compare_kernel(kernel: str, size: str, hardware: Hardware) -> dict[str, Any]:
    """`measure` of a kernel beside that of `auto`, on ESM-2; or its `problem`."""
    best = choose_kernel(hardware, choose_half(hardware))
    if kernel == "faesm" and best != "varlen":
        kernel = FAESM_SDPA
    try:
        return measure("esm2", size, hardware, {best: best, kernel: kernel}, NUM_ROWS[size] // FEWER)
    except (RuntimeError, ValueError, ImportError) as error:  # what kernels raise where they cannot run
        return {"problem": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("full", "toy"), default="full", help="toy: tiny shapes, also on a CPU.")
    parser.add_argument("--kernels", action="store_true", help=f"Measure {', '.join(OTHERS)} beside that of auto.")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    hardware = detect_hardware()
    kernels = {STOCK: "sdpa", OURS: choose_kernel(hardware, choose_half(hardware))}
    found: dict[str, Any] = {}
    for name in OTHERS if args.kernels else MODELS.values():
        if args.kernels:
            found[name] = compare_kernel(name, args.size, hardware)
        else:
            (family,) = [key for key, model in MODELS.items() if model == name]
            found[name] = measure(family, args.size, hardware, kernels, NUM_ROWS[args.size])
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
