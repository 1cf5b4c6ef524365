"""`blocked` attention's backward pass before and after: sides interleaved in one process, medians and spread.

    python benchmarks/attention_backward.py --output benchmarks/results/attention_backward_cpu.json

`slices` is what the kernel once did (a slice of the packed row per group of equally long sequences, all weights
computed again in the backward pass), `split` cuts the row once, `kept` is the package: it cuts once and keeps weights
up to `KEPT_BYTES`. Each is timed alone, forward and backward of one layer, and in whole training steps of a masked
language model of ESM-2 8M's shape (bf16 autocast, packed, AdamW). Gradients of the three are equal bit for bit, which
is checked first.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, EsmConfig, EsmForMaskedLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_ext.data.varlen_layout import VarlenLayout
from hf_ext.hardware import detect_hardware
from hf_ext.models import cpu_attention
from hf_ext.models.attention import KERNELS
from hf_ext.models.packing import pack_encoders
from hf_ext.speedups.attention import set_attention
from hf_ext.speedups.fused_layers import fuse_gelu, label_only

HEADS, HEAD_SIZE, LAYERS = 20, 16, 6
CASES = {"16 x 107-630": (16, 107, 630), "64 x 40-200": (64, 40, 200)}  # sequences and their tokens
SIDES = ("slices", "split", "kept")


def slices_attention(query, key, value, segments, scaling, dropout, bias):
    """`blocked` before: each slice's gradient is as large as the row, and all of them are added up."""
    outputs = []
    for start, count, length in segments.groups():
        shape = (count, length, *query.shape[1:])
        q, k, v = (x[start : start + count * length].reshape(shape).transpose(1, 2) for x in (query, key, value))
        outputs.append(cpu_attention.attend(q, k, v, scaling, dropout, bias).transpose(1, 2).flatten(0, 1))
    return pad(torch.cat(outputs), (0, 0, 0, 0, 0, segments.num_filled))


def slices_backend(module, query, key, value, mask, scaling=None, dropout=0.0, segments=None, **others):
    """`slices_attention` as transformers calls it, on packed rows only."""
    rows = (x.transpose(1, 2)[0] for x in (query, key, value))
    return slices_attention(*rows, segments, scaling, dropout, None)[None], None


@contextmanager
def keeping(num_bytes: int):
    """`blocked` with another bound on the weights that it keeps."""
    before, cpu_attention.KEPT_BYTES = cpu_attention.KEPT_BYTES, num_bytes
    try:
        yield
    finally:
        cpu_attention.KEPT_BYTES = before


def bound(side: str) -> int:
    return cpu_attention.KEPT_BYTES if side == "kept" else 0


def draw_lengths(num: int, shortest: int, longest: int) -> list[int]:
    return [random.Random(i).randint(shortest, longest) for i in range(num)]


def one_layer(lengths: list[int]) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Per side, forward and backward of attention alone in bf16; what is called returns output and gradients."""
    segments = VarlenLayout.from_mask(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])
    generator = torch.Generator().manual_seed(0)
    shape = (sum(lengths), HEADS, HEAD_SIZE)
    query, key, value, grad = (torch.randn(shape, generator=generator).bfloat16() for _ in range(4))

    def make(side: str) -> Callable[[], list[torch.Tensor]]:
        kernel = slices_attention if side == "slices" else KERNELS["blocked"]

        def run() -> list[torch.Tensor]:
            rows = [x.clone().requires_grad_() for x in (query, key, value)]
            with keeping(bound(side)):
                output = kernel(*rows, segments, HEAD_SIZE**-0.5, 0.0, None)
                output.backward(grad)
            return [output.detach(), *(x.grad for x in rows)]

        return run

    return {side: make(side) for side in SIDES}


def make_model() -> EsmForMaskedLM:
    torch.manual_seed(0)
    shape = {"hidden_size": HEADS * HEAD_SIZE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    special = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "token_dropout": True}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = EsmConfig(intermediate_size=1280, position_embedding_type="rotary", **shape, **special, **dropout)
    model = EsmForMaskedLM(config).train()
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


def whole_step(lengths: list[int]) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Per side, a training step of a model of its own; what is called returns the gradients that it stepped with."""
    batch = make_batch(lengths)
    AttentionInterface.register("slices", slices_backend)
    AttentionMaskInterface.register("slices", sdpa_mask)

    def make(side: str) -> Callable[[], list[torch.Tensor]]:
        model = make_model()
        set_attention(model, "slices" if side == "slices" else "blocked")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def run() -> list[torch.Tensor]:
            optimizer.zero_grad()
            with keeping(bound(side)), torch.autocast("cpu", torch.bfloat16):
                model(**batch).loss.backward()
            optimizer.step()
            return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

        return run

    return {side: make(side) for side in SIDES}


def measure(what: str, case: str, runs: dict[str, Callable[[], list[torch.Tensor]]], rounds: int) -> dict:
    """Milliseconds per side, and what each saves over `slices`, round by round: quartiles of both."""
    first = {side: [x.clone() for x in run()] for side, run in runs.items()}
    for side in SIDES:
        if not all(torch.equal(a, b) for a, b in zip(first[side], first["slices"], strict=True)):
            raise SystemExit(f"{what}, {case}: {side} computes something else than slices.")
    times = []
    for i in range(rounds):
        took = {}
        for side in SIDES[i % len(SIDES) :] + SIDES[: i % len(SIDES)]:
            start = time.perf_counter()
            runs[side]()
            took[side] = 1e3 * (time.perf_counter() - start)
        times.append(took)
    row: dict = {"what": what, "sequences": case, "rounds": rounds}
    for side in SIDES:
        row[f"{side}_ms"] = quartiles([t[side] for t in times], 1)
        row[f"{side}_over_slices"] = quartiles([t[side] / t["slices"] for t in times], 3)
    print(row, flush=True)
    return row


def quartiles(values: list[float], digits: int) -> list[float]:
    """First quartile, median, third quartile."""
    return [round(value, digits) for value in statistics.quantiles(values, n=4, method="inclusive")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="at least 5")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.rounds < 5:
        parser.error(f"--rounds {args.rounds}: at least 5, so that there is a spread.")
    rows = []
    for what, make in (("attention", one_layer), ("training step", whole_step)):
        for case, lengths in CASES.items():
            rows.append(measure(what, case, make(draw_lengths(*lengths)), args.rounds))
    result = {
        "device": detect_hardware("cpu").name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "shape": {"heads": HEADS, "head_size": HEAD_SIZE, "layers": LAYERS, "dtype": "bfloat16"},
        "kept_bytes": cpu_attention.KEPT_BYTES,
        "rows": rows,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
