"""Frozen weights beside LoRA adapters in half precision: 2 bytes each instead of 6.

Class I. Effect: under autocast (`precision`) a float32 weight that does not train is rounded at every use, and the
rounded copy kept for the backward pass. Here it is stored rounded: 4 bytes less per weight (2 of storage, 2 of copies),
no cast per pass, and the same numbers. Adapters, heads, norms, embeddings and losses stay in float32.
Evidence: one layer of each shape is run both ways under autocast, forward and backward; a difference keeps float32.
Cost: that, and for a `PeftModel` hashing its frozen weights before instead of at the first save.
Conflicts: `quantized_base` stores the same weights in fewer bits; FSDP and DeepSpeed gather what they have split in
half precision themselves; `--save_full` keeps weights that are saved in float32; DoRA's norms are taken from the
weights. The base stays in half precision after the run; `merged_copy` and `trainer.save_merged` merge in float32, from
the encoder read again (`AffinityModel`) or the rounded weights (others).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from peft import PeftModel

from ..checkpoints.weights import keep_source_digests
from ..models.half_linear import difference, narrow
from ..models.wrapping import find_base_layers
from .base import Context, Decision, Kind, Run, applied, are_weights_split, off, skipped
from .precision import Precision
from .quantized_base import asked_bits

NAME = "lora_base"
KIND: Kind = "I"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def decide(context: Context) -> Decision:
    """Applies to LoRA where training runs under autocast and the model is whole on each device."""
    if not context.wants(NAME, KIND):
        return off()
    args, trains_in = context.args, Precision.decide(context)
    if not (args.use_peft or context.model.has_adapters):
        return skipped("no LoRA")
    if asked_bits(args):
        return skipped(f"quantized_base stores the frozen weights in {asked_bits(args)} bits")
    if args.use_dora:
        return skipped("DoRA takes norms of the frozen weights: they stay in float32")
    if trains_in.status != "applied":
        return skipped("nothing is computed in half precision, so that float32 is what the weights are used in")
    if are_weights_split(args):
        return skipped("the weights are spread over processes, which send them in half precision as it is")
    dtype = trains_in.settings["mixed_precision"]
    return applied(f"{dtype}, as autocast rounds them", {"dtype": dtype})


def apply(decision: Decision, run: Run) -> Decision:
    """Narrows the frozen linear layers of `run.model` if that changes no number."""
    if getattr(run.model.config, "save_full", False):
        return skipped("--save_full keeps the weights that are saved in float32")
    layers = find_base_layers(run.model)
    if not layers:
        return skipped("no frozen float32 layer beside an adapter")
    dtype = _DTYPES[decision.settings["dtype"]]
    one_of_each = {tuple(layer.weight.shape): layer for layer in layers}
    for shape, layer in one_of_each.items():
        found = difference(layer, dtype)
        if found != 0:  # a NaN too
            return skipped(f"a layer of {shape[0]} x {shape[1]} differs by {found:.1e} from what autocast computes")
    if isinstance(run.model, PeftModel):
        keep_source_digests(run.model)
    saved = narrow(layers, dtype)
    reason = f"{decision.reason}: {saved / 2**20:.1f} MiB less of weights, and as much of copies"
    evidence = {"layers": len(layers), "bytes_saved": saved, "copies_saved": saved, "largest_difference": 0.0}
    return replace(decision, reason=reason).with_evidence(**evidence)
