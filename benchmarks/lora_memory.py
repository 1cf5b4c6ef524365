"""LoRA's frozen base in float32 and in half precision: bytes counted, not timed, and the losses of both.

Bytes: two layers at the widths of ESM-2 650M and 3B under bf16 autocast, r = 8 on all linear layers; weights, and what
autograd keeps until the backward pass, by saved-tensor hooks; a whole model's weights are those of one layer times its
number of layers. Losses: a small ESM-2 from scratch as base, masked language modelling on generated chains, with the
base in float32, in half precision, and (what autocast itself costs) without autocast.

python benchmarks/lora_memory.py --output benchmarks/results/lora_memory.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import EsmConfig, EsmForMaskedLM, EsmModel

from hf_ext.models.blocks import find_base_layers
from hf_ext.models.frozen_weights import narrow
from hf_ext.models.lora import LoraSettings, wrap_with_lora

# Width, heads, layers of the published checkpoints.
SIZES = {"esm2_650M": (1280, 20, 33), "esm2_3B": (2560, 40, 36)}
LAYERS, ROWS, TOKENS = 2, 2, 64


def make_config(width: int, heads: int, layers: int) -> EsmConfig:
    """ESM-2's shape, without dropout."""
    special = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"}
    fixed = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "token_dropout": True}
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": heads}
    return EsmConfig(**special, **fixed, **shape, num_hidden_layers=layers)


def kept_bytes(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Bytes kept for backward of one pass under bf16 autocast: copies of weights, and everything else."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    shapes = {tuple(sorted(p.shape)) for p in model.parameters() if p.dim() == 2}
    kept: dict[int, tuple[int, bool]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            is_copy = tensor.dim() == 2 and tuple(sorted(tensor.shape)) in shapes
            kept[storage.data_ptr()] = (storage.nbytes(), is_copy)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        output = model(**batch)
    del output
    copies = sum(num_bytes for num_bytes, is_copy in kept.values() if is_copy)
    return copies, sum(num_bytes for num_bytes, _ in kept.values()) - copies


def count(name: str) -> dict[str, Any]:
    """Bytes of one layer, before and after, and what that makes of the whole model's frozen weights."""
    width, heads, depth = SIZES[name]
    torch.manual_seed(0)
    model = wrap_with_lora(EsmModel(make_config(width, heads, LAYERS), add_pooling_layer=False), LoraSettings(r=8))
    batch = {"input_ids": torch.randint(4, 24, (ROWS, TOKENS)), "attention_mask": torch.ones(ROWS, TOKENS).long()}
    sides = {}
    layers = find_base_layers(model)
    weights = [layer.weight for layer in layers]
    for side in ("float32_base", "half_base"):
        if side == "half_base":
            narrow(layers, torch.bfloat16)
        copies, others = kept_bytes(model, batch)
        stored = sum(weight.nbytes for weight in weights)
        per_layer = {"frozen_weights": stored // LAYERS, "copies_for_backward": copies // LAYERS}
        whole = (stored + copies) * depth // LAYERS
        sides[side] = {
            "bytes_per_layer": {**per_layer, "activations": others // LAYERS},
            "frozen_and_copies_gib_all_layers": round(whole / 2**30, 2),
            "bytes_per_frozen_weight": round((stored + copies) / sum(weight.numel() for weight in weights), 2),
        }
    return {"model": name, "width": width, "layers": depth, "frozen_per_layer": weights_per_layer(weights), **sides}


def weights_per_layer(weights: list[nn.Parameter]) -> int:
    """Frozen linear weights of one layer."""
    return sum(weight.numel() for weight in weights) // LAYERS


def train(side: str, steps: int, seed: int) -> list[float]:
    """Losses of LoRA on a small ESM, from the same start and on the same batches whatever the side."""
    torch.manual_seed(seed)
    model = wrap_with_lora(EsmForMaskedLM(make_config(64, 4, 3)), LoraSettings(r=8))
    if side == "half_base":
        narrow(find_base_layers(model), torch.bfloat16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        ids = torch.randint(4, 24, (8, 48), generator=generator)
        ids[:, 1::2] = ids[:, ::2]  # every residue twice, so that there is something to learn
        masked = torch.rand(ids.shape, generator=generator) < 0.15
        batch = {"input_ids": ids.masked_fill(masked, 32), "attention_mask": torch.ones_like(ids)}
        with torch.autocast("cpu", torch.bfloat16, enabled=side != "no_autocast"):
            loss = model(**batch, labels=ids.masked_fill(~masked, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare_losses(steps: int, seeds: int) -> list[dict[str, Any]]:
    """Largest difference of a loss from that with the float32 base under autocast, per seed."""
    found = []
    for seed in range(seeds):
        runs = {side: train(side, steps, seed) for side in ("float32_base", "half_base", "no_autocast")}
        reference = runs["float32_base"]
        row: dict[str, Any] = {"seed": seed, "first": reference[0], "last": reference[-1]}
        for side in ("half_base", "no_autocast"):
            row[f"largest_difference_{side}"] = max(abs(a - b) for a, b in zip(runs[side], reference))
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    result = {
        "what": f"{LAYERS} layers, {ROWS} x {TOKENS} tokens, bf16 autocast on a CPU, r = 8; bytes counted",
        "torch": torch.__version__,
        "bytes": [count(name) for name in args.sizes],
        "steps": args.steps,
        "losses": compare_losses(args.steps, args.seeds),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
