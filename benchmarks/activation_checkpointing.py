"""Bytes kept for the backward pass, and time, of what `--activation_checkpointing` computes again: sides take turns.

    python benchmarks/activation_checkpointing.py --output benchmarks/results/activation_checkpointing_cpu.json

Masked language models of ESM-2's shapes with random weights (8M whole, 4 layers at the widths of 150M and 650M), bf16
autocast, on sequences of 60 to 400 tokens: padded with transformers' own attention and GELU, and packed as the plan has
it on CPUs (`blocked` attention, one GELU). Per side: bytes that stay alive after the forward pass and the most at any
moment of forward and backward (copies of weights that autocast makes are left out; gradients are in the second), and
milliseconds of CPU time for forward and backward over those of `none` in the same round. Losses and gradients of all
sides are equal bit for bit, which is checked first. About a quarter of an hour on one idle core; use no loaded machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import EsmConfig, EsmForMaskedLM

from hf_ext.hardware import detect_hardware
from hf_ext.memory.probe import OTHER, Ledger
from hf_ext.models import pack_encoders, recompute
from hf_ext.speedups.attention import set_attention
from hf_ext.speedups.fused_layers import fuse_gelu

# Width, layers, sequences; 20 heads each.
SHAPES = {"8M": (320, 6, 8), "150M, 4 layers": (640, 4, 8), "650M, 4 layers": (1280, 4, 4)}
SHORTEST, LONGEST = 60, 400
LAYOUTS = ("padded", "packed")
POLICIES = ("none", "attention", "feed_forward", "every 2nd", "full")


def make_model(width: int, layers: int, layout: str, policy: str) -> EsmForMaskedLM:
    torch.manual_seed(0)
    special = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "token_dropout": True}
    fixed = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "position_embedding_type": "rotary"}
    shape = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 4 * width}
    model = EsmForMaskedLM(EsmConfig(num_attention_heads=20, use_cache=False, **shape, **special, **fixed)).train()
    if layout == "packed":
        fuse_gelu(model)
        set_attention(model, "blocked")
        pack_encoders(model)
    if policy in ("full", "every 2nd"):
        recompute(model, "layers", 1 if policy == "full" else 2)
    elif policy != "none":
        recompute(model, policy)
    return model


def make_batch(num: int) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([random.Random(i).randint(SHORTEST, LONGEST) for i in range(num)])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 24, mask.shape, generator=generator).where(mask, torch.tensor(1))
    chosen = (torch.rand(mask.shape, generator=generator) < 0.15) & mask
    labels = ids.masked_fill(~chosen, -100)
    return {"input_ids": ids.masked_fill(chosen, 32), "attention_mask": mask.long(), "labels": labels}


def step(model: EsmForMaskedLM, batch: dict[str, torch.Tensor], forward_done: Callable[[], object] = int) -> Any:
    """Forward and backward; returns the loss, and calls `forward_done` between the two."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    forward_done()
    loss.backward()
    return loss.detach()


class Activations(Ledger):
    """A ledger without tensors of the shapes of weights, and of matrices transposed: copies that autocast rounds."""

    def __init__(self, model: EsmForMaskedLM):
        super().__init__(1)
        shapes = [p.shape for p in model.parameters()]
        self.left_out = {tuple(shape) for shape in shapes} | {tuple(shape[::-1]) for shape in shapes if len(shape) == 2}

    def _add(self, tensor: torch.Tensor, category: str = OTHER) -> None:
        if category != OTHER or tuple(tensor.shape) not in self.left_out:
            super()._add(tensor, category)


def count_bytes(model: EsmForMaskedLM, batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Bytes kept after the forward pass, and the most at any moment."""
    ledger, kept = Activations(model), []
    ledger.know([*model.parameters(), *model.buffers(), *batch.values()])
    known = ledger.total
    with ledger:
        step(model, batch, lambda: kept.append(ledger.current[OTHER]))
    return kept[0], max(others + gradients for others, _, gradients in ledger.levels) - known


def measure(name: str, layout: str, rounds: int) -> list[dict[str, Any]]:
    width, layers, num = SHAPES[name]
    batch = make_batch(num)
    models = {policy: make_model(width, layers, layout, policy) for policy in POLICIES}
    first = {policy: (step(model, batch), [p.grad for p in model.parameters()]) for policy, model in models.items()}
    for policy, (loss, gradients) in first.items():
        pairs = zip(gradients, first["none"][1], strict=True)
        same = all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
        if not (torch.equal(loss, first["none"][0]) and same):
            raise SystemExit(f"{name}, {layout}: {policy} computes something else than none.")
    counted = {policy: count_bytes(model, batch) for policy, model in models.items()}
    times: list[dict[str, float]] = []
    for i in range(rounds):
        took = {}
        for policy in POLICIES[i % len(POLICIES) :] + POLICIES[: i % len(POLICIES)]:
            start = time.process_time()
            step(models[policy], batch)
            took[policy] = time.process_time() - start
        times.append(took)
    rows = []
    for policy in POLICIES:
        kept, most = counted[policy]
        row = {"model": name, "layout": layout, "policy": policy, "tokens": int(batch["attention_mask"].sum())}
        row |= {"kept_mb": round(kept / 1e6, 1), "most_mb": round(most / 1e6, 1)}
        row |= {"kept_over_none": round(kept / counted["none"][0], 3), "rounds": rounds}
        row |= {"most_over_none": round(most / counted["none"][1], 3)}
        row["cpu_ms"] = quartiles([1e3 * took[policy] for took in times], 1)
        row["cpu_over_none"] = quartiles([took[policy] / took["none"] for took in times], 3)
        rows.append(row)
        print(row, flush=True)
    return rows


def quartiles(values: list[float], digits: int) -> list[float]:
    """First quartile, median, third quartile."""
    return [round(value, digits) for value in statistics.quantiles(values, n=4, method="inclusive")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="at least 5")
    parser.add_argument("--models", nargs="*", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.rounds < 5:
        parser.error(f"--rounds {args.rounds}: at least 5, so that there is a spread.")
    torch.set_num_threads(1)
    rows = [row for name in args.models for layout in LAYOUTS for row in measure(name, layout, args.rounds)]
    result = {
        "device": detect_hardware("cpu").name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": "bfloat16 autocast",
        "rows": rows,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
