"""A masked-LM step and an encoding pass of ESM-2 8M's shape on this CPU, beside their matrix products alone.

    python benchmarks/cpu_step.py --output benchmarks/results/cpu_step_DEVICE.json

Sides: float32, and bf16 autocast, both with `blocked` attention. They take turns in one process; times are of the
processor, on one thread. Products alone: those of every linear layer and of attention, forward, and backward for a
step, each timed by itself in the side's dtype. (Results that were written earlier have sides that are gone.)
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import make_esm2, quartiles
from transformers import EsmForMaskedLM

from hf_ext.data.varlen_layout import VarlenLayout
from hf_ext.files import try_replacing, write_text
from hf_ext.hardware import detect_hardware
from hf_ext.models.packing import pack_encoders
from hf_ext.speedups.attention import set_attention
from hf_ext.speedups.fused_layers import fuse_gelu, label_only

HEADS, HEAD_SIZE, LAYERS = 20, 16, 6
CASES = {"16 x 107-630": (16, 107, 630), "64 x 40-200": (64, 40, 200)}  # sequences and their tokens
WIDTH, INNER = HEADS * HEAD_SIZE, 4 * HEADS * HEAD_SIZE
SIDES = {"float32": torch.float32, "bf16": torch.bfloat16}


def draw_lengths(num: int, shortest: int, longest: int) -> list[int]:
    return [random.Random(i).randint(shortest, longest) for i in range(num)]


def make_model() -> EsmForMaskedLM:
    """ESM-2 8M's shape with random weights, packed."""
    model = make_esm2("8M", token_dropout=True).train()
    pack_encoders(model)
    fuse_gelu(model)
    label_only(model)
    return model


def make_batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Random residues with 15 % masked."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(4, 24, mask.shape, generator=generator).where(mask, torch.tensor(1))
    chosen = (torch.rand(mask.shape, generator=generator) < 0.15) & mask
    labels = ids.masked_fill(~chosen, -100)
    return {"input_ids": ids.masked_fill(chosen, 32), "attention_mask": mask.long(), "labels": labels}


def make_pass(side: str, batch: dict[str, torch.Tensor], trains: bool) -> Callable[[], None]:
    """A training step, or a pass of the encoder alone, on a model of its own."""
    dtype = SIDES[side]
    model = make_model()
    set_attention(model, "blocked")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}

    def run() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            if not trains:
                with torch.no_grad():
                    model.esm(**inputs)
                return
            optimizer.zero_grad()
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()

    return run


def make_products(side: str, lengths: list[int], trains: bool) -> Callable[[], None]:
    """The products of one layer's linear layers and attention, and of their gradients for a step."""
    dtype, tokens = SIDES[side], sum(lengths)
    shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, INNER), (INNER, WIDTH)]
    linear = [[torch.randn(s).to(dtype) for s in ((tokens, a), (b, a), (tokens, b))] for a, b in shapes]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    groups = [(count * HEADS, length) for _, count, length in VarlenLayout.from_mask(mask).groups()]

    def run() -> None:
        for x, weight, grad in linear:
            torch.mm(x, weight.t())
            if trains:
                torch.mm(grad, weight)
                torch.mm(grad.t(), x)
        for num, length in groups:
            for first in range(0, num, size := max(1, (1 << 18) // length**2)):  # scores that stay in the cache
                row = torch.ones(min(size, num - first), length, HEAD_SIZE, dtype=dtype)
                scores = torch.bmm(row, row.mT)
                torch.bmm(scores, row)
                if trains:
                    torch.bmm(row, row.mT)
                    for left in (scores, scores.mT, scores.mT):
                        torch.bmm(left, row)

    return run


def measure(case: str, trains: bool, rounds: int) -> dict[str, Any]:
    """Seconds per side and of its products, quartiles, and ratios round by round."""
    lengths = draw_lengths(*CASES[case])
    batch = make_batch(lengths)
    passes = {side: make_pass(side, batch, trains) for side in SIDES}
    products = {side: make_products(side, lengths, trains) for side in SIDES}
    found: list[dict[str, float]] = []
    for _ in range(rounds + 2):
        times = {side: seconds(run) for side, run in passes.items()}
        found.append({**times, **{f"products {side}": LAYERS * seconds(run) for side, run in products.items()}})
    row: dict[str, Any] = {"what": "training step" if trains else "encoding", "sequences": case, "rounds": rounds}
    row["tokens"] = sum(lengths)
    first = next(iter(SIDES))
    for side in SIDES:
        kept = found[2:]  # libraries and memory start in the first two
        row[side] = {
            "seconds": quartiles([one[side] for one in kept], 3),
            "products_seconds": quartiles([one[f"products {side}"] for one in kept], 3),
            "over_its_products": quartiles([one[side] / one[f"products {side}"] for one in kept], 3),
            "times_as_fast_as_before": quartiles([one[first] / one[side] for one in kept], 3),
        }
    print(json.dumps(row), flush=True)
    return row


def seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="at least 5")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.rounds < 5:
        parser.error(f"--rounds {args.rounds}: at least 5, so that there is a spread.")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    try_replacing(args.output)
    torch.set_num_threads(1)
    result = {
        "device": detect_hardware("cpu").name,
        "threads": 1,
        "torch": torch.__version__,
        "shape": {"heads": HEADS, "head_size": HEAD_SIZE, "layers": LAYERS},
        "rows": [measure(case, trains, args.rounds) for trains in (True, False) for case in CASES],
    }
    write_text(args.output, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
