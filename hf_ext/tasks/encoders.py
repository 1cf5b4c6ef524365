"""An encoder before a run: what it holds and computes, and a few of its layers to time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import PreTrainedModel

from ..files import Json
from ..memory import WEIGHT_BYTES
from ..models import EncoderSpec, Training, build_encoder, wrap_with_lora
from ..plan import Plan
from ..reporting import flops_coefficients
from ..speedups import CPU_TOKENS_PER_BATCH, GPU_TOKENS_PER_BATCH, lora_settings
from ..training_args import FastTrainingArguments
from .dry_run import Part, RowLengths, Step

MAX_NAME = 40  # characters of a path
TIMED_LAYERS = 2  # of an encoder: of one alone, embeddings would count for too much


def dry_run_encoder(
    model: PreTrainedModel, training: Training, source: str | None, lengths: RowLengths, names: Sequence[str]
) -> Part:
    """Describes an encoder, of whose layers `TIMED_LAYERS` are timed.

    Args:
        model: on the meta device. source: Hub id or folder of its weights, None where they are new.
        names: of the inputs that it reads.
    """
    length = max(8, round(sum(lengths.mean[name] for name in names) / len(names)))
    windows = sum(lengths.windows.get(name, 1) for name in names) / len(names)
    per_token, per_pair = flops_coefficients(copy.deepcopy(model).requires_grad_(False))  # forward
    name = source or type(model).__name__
    config = model.config.to_dict()
    num_parameters = model.num_parameters()
    return Part(
        name=name if len(name) < MAX_NAME else f"...{name[3 - MAX_NAME :]}",
        training=training,
        width=int(config.get("hidden_size") or config["d_model"]),
        num_parameters=num_parameters,
        flops=windows * (per_token * length + per_pair * length**2),
        make_step=partial(_make_layer, config, length, windows),
        inputs_per_row=len(names),
        num_distinct=sum(lengths.num_distinct[name] for name in names),
        download_bytes=0 if _is_at_hand(source) else num_parameters * WEIGHT_BYTES,
    )


def _is_at_hand(source: str | None) -> bool:
    """Returns whether weights need no download: new ones, a folder, or in the Hub's cache."""
    if source is None or Path(source).is_dir():
        return True
    files = (try_to_load_from_cache(source, name) for name in ("model.safetensors", "pytorch_model.bin"))
    return any(isinstance(file, str) for file in files)


def _make_layer(config: Json, length: int, windows: float, device: str, num: int) -> Step | None:
    if num > 1 and num * length > (CPU_TOKENS_PER_BATCH if device == "cpu" else GPU_TOKENS_PER_BATCH):
        return None
    layers = "num_layers" if "num_layers" in config else "num_hidden_layers"
    num_timed = min(TIMED_LAYERS, config[layers])
    encoder: Any = build_encoder(EncoderSpec("", {**config, layers: num_timed})).eval().to(device)
    ids = (torch.arange(num * length) % 20 + 4).view(num, length).to(device)  # ids of residues
    share = num_timed / config[layers] / windows
    return Step(encoder, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, share)


def with_adapters(model: nn.Module, args: FastTrainingArguments, plan: Plan) -> Any:
    """Copies a model on the meta device, with the adapters that the plan gives it."""
    made = copy.deepcopy(model)
    with torch.device("meta"):
        return wrap_with_lora(made, lora_settings(args)) if plan.applied("lora") else made
