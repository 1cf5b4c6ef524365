"""Frozen ESM-2 on a CPU in float32, under bfloat16 autocast, and with linear layers in 8 bits: speed and error.

    python benchmarks/cpu_int8.py [--sizes 8M 35M 650M]

Packed rows, 96 chains of 87 to 249 residues with random weights, one thread. 8 bits are those of `--load_in_8bit`
(`hf_ext/models/int8.py`), all else is under bfloat16 autocast. Of 650M four of the 33 layers are computed. Noise is
that of the probe of `encoder_precision`, cosines are of embeddings with those in float32. Writes
`results/cpu_int8.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import interleave, make_esm2, quartiles
from torch import nn

from hf_ext.models.int8 import in_int8
from hf_ext.models.packing import pack_encoders
from hf_ext.speedups.attention import set_attention
from hf_ext.speedups.fused_layers import fuse_gelu

RESULT = Path(__file__).resolve().parent / "results" / "cpu_int8.json"
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "8M": ("8M", {}),
    "35M": ("8M", {"hidden_size": 480, "num_hidden_layers": 12, "intermediate_size": 1920}),
    "650M": ("650M", {"num_hidden_layers": 4}),
}
NUM_ROWS, TOKENS = 96, 4096


def make_encoder(size: str, side: str) -> nn.Module:
    """The encoder as a run on a CPU has it, its linear layers replaced for int8."""
    shape, changes = SHAPES[size]
    model = make_esm2(shape, **changes).eval()
    set_attention(model, "blocked")
    fuse_gelu(model)
    pack_encoders(model)
    return in_int8(model.esm) if side == "int8" else model.esm


@torch.inference_mode()
def encode(encoder: nn.Module, batches: list[dict[str, torch.Tensor]], half: bool) -> tuple[float, float, torch.Tensor]:
    """Seconds by the clock and of the processor, and the mean state of each row."""
    began, used, pooled = time.perf_counter(), time.process_time(), []
    with torch.autocast("cpu", torch.bfloat16, half):
        for batch in batches:
            mask = batch["attention_mask"].unsqueeze(-1)
            pooled.append((encoder(**batch).last_hidden_state * mask).sum(1).float() / mask.sum(1))
    return time.perf_counter() - began, time.process_time() - used, torch.cat(pooled)


def make_batches() -> list[dict[str, torch.Tensor]]:
    """Chains from the longest to the shortest, cut into batches."""
    draw = random.Random(0)
    lengths, batches = sorted((draw.randint(87, 249) for _ in range(NUM_ROWS)), reverse=True), []
    while lengths:
        number = max(1, TOKENS // (lengths[0] + 2))
        now, lengths = lengths[:number], lengths[number:]
        ids = torch.full((len(now), now[0] + 2), 1)
        for row, length in zip(ids, now):
            row[: length + 2] = torch.tensor([0, *draw.choices(range(4, 24), k=length), 2])
        batches.append({"input_ids": ids, "attention_mask": (ids != 1).long()})
    return batches


def compare(size: str, rounds: int) -> dict[str, Any]:
    """Rows per second of the processor of each side, and how far its embeddings are from those in float32."""
    batches = make_batches()
    sides = {side: partial(encode, make_encoder(size, side), batches, side != "float32") for side in SIDES}
    found = interleave(sides, rounds)
    exact = found["float32"][0][2]
    spread = (exact - exact.mean(0)).norm(dim=1).mean()
    result = {}
    for side, each in found.items():
        error = each[0][2] - exact
        noise = (error - error.mean(0)).norm(dim=1).mean() / spread
        cosine = torch.nn.functional.cosine_similarity(each[0][2], exact).min()
        result[side] = {
            "rows_per_cpu_s": quartiles([NUM_ROWS / run[1] for run in each], 1),
            "rows_per_s": quartiles([NUM_ROWS / run[0] for run in each], 1),
            "noise_share": round(noise.item(), 4),
            "lowest_cosine": round(cosine.item(), 6),
        }
    return result


SIDES = ("float32", "bfloat16", "int8")


def main() -> None:
    """Runs all sizes, prints and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "threads": given.threads, "rounds": given.rounds}
    result["sizes"] = {}
    for size in given.sizes:
        result["sizes"][size] = compare(size, given.rounds)
        print(size, json.dumps(result["sizes"][size]), flush=True)
        given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
