"""LoRA: encoders stay as they are, small matrices beside their linear layers train.

Class L: the update of each weight has a rank of at most r, so the model learns something else than full fine-tuning; it
happens only with `--use_peft`. Effect: AdamW keeps two numbers per trainable parameter, a small share of all, and a
checkpoint holds adapters and heads only. It saves no activations by itself, so the plan measures them, on two training
rows, in the weights' own precision, without activation checkpointing. Adapters on all linear layers keep as much as
full fine-tuning does; `--lora_dropout` above 0 keeps a copy of each input, fewer `--lora_target_modules` keep less.
Models with towers (`AffinityModel`) bring their adapters; others are wrapped in a `peft.PeftModel`.
Cost: two forward passes over two rows for the measurement. Source: see `hf_ext/models/lora.py`.
Conflicts: a model made by `model_init` comes too late to be wrapped; where every tower is frozen there is nothing to
adapt.
"""

from __future__ import annotations

import copy
import inspect
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import set_seed

from ..errors import PlanRefused
from ..models.lora import LORA_TARGETS, LoraSettings, has_adapters, trained_in_full, wrap_with_lora
from ..out_of_memory import DidNotFit, attempt
from ..zero import splits_weights
from .base import Context, Decision, Kind, Run, off

NAME = "lora"
KIND: Kind = "L"
MEASURED_ROWS = 2
FROZEN = "every tower is frozen, so there is nothing for --use_peft to adapt: give --tower_training lora"


def lora_settings(args: Any) -> LoraSettings:
    """The LoRA options of `FastTrainingArguments`.

    Raises:
        ArgumentError: a value out of range.
    """
    return LoraSettings(
        args.lora_r, args.lora_alpha, args.lora_dropout, args.use_rslora, args.use_dora, args.lora_target_modules
    )


def decide(context: Context) -> Decision:
    """Applies with `--use_peft`: to layers that are named, known of the family, or else all that repeat."""
    args, model = context.args, context.model
    if not args.use_peft:
        if NAME in (args.speedups or []):
            return Decision(NAME, KIND, "skipped", "give --use_peft: it changes what is learned")
        return off(NAME, KIND)
    problem = None
    if NAME in (args.without or []):
        problem = "--use_peft and --without lora contradict each other: keep one"
    elif not model.num_parameters:
        problem = "there is no model yet to adapt: pass the model itself instead of model_init"
    elif model.frozen_inputs and not model.trains_encoders:
        problem = FROZEN
    elif not args.lora_target_modules and not model.families:
        problem = "which layers to adapt is not known of a model without a configuration: give --lora_target_modules"
    if problem:
        return Decision(NAME, KIND, "refused", problem)
    settings = vars(lora_settings(args))
    is_known = args.lora_target_modules or set(model.families) & set(LORA_TARGETS)
    reason = f"adapters train beside {'frozen' if is_known else 'all'} linear layers"
    return Decision(NAME, KIND, "applied", reason if is_known else f"{reason} that repeat", settings)


def apply(decision: Decision, run: Run) -> Decision:
    """Wraps `run.model` where it has no adapters yet, seeded by `args.seed`; measures what they save.

    Raises:
        ArgumentError: a named target matches no layer.
        PlanRefused: a model with towers, none of which has adapters.
    """
    if not has_adapters(run.model):
        if hasattr(run.model, "frozen_inputs"):
            raise PlanRefused("lora: no tower of this model has adapters: build it with --tower_training lora.")
        set_seed(run.args.seed)  # Trainer seeds later; without this the adapters would not follow --seed
        run.model = wrap_with_lora(run.model, LoraSettings(**decision.settings))
    savings = measure_savings(run)
    decision = replace(decision, reason=f"{decision.reason}: {_summary(savings)}")
    return decision.with_evidence(**describe_adapters(run.model), **savings)


def describe_adapters(model: nn.Module) -> dict[str, Any]:
    """Rank and number of adapted layers, as they are in the model."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    ranks = sorted({rank for layer in layers for rank in getattr(layer, "r", {}).values()})
    return {"rank": ranks[0] if len(ranks) == 1 else ranks, "adapted_layers": len(layers)}


def measure_savings(run: Run) -> dict[str, Any]:
    """What trains, what AdamW keeps for it, and what autograd keeps for two rows; under LoRA and in full fine-tuning.

    Returns:
        `with_lora` and `full_fine_tuning`, each with `trainable_parameters`, `adamw_bytes` and `activation_bytes`; the
        last is None where there are no rows to measure on, or memory does not suffice.
    """
    batch = _batch(run)
    here = _measure(run.model, batch)
    with trained_in_full(run.model):
        full = _measure(run.model, batch)
    return {"with_lora": here, "full_fine_tuning": full}


def measure_activations(model: nn.Module, batch: dict[str, Any]) -> int:
    """Bytes that autograd keeps between a training forward pass over `batch` and its backward pass.

    Each storage counts once; parameters and buffers do not count. Leaves the model in the mode it was in; draws random
    numbers for dropout. Cost: one forward pass.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    training = model.training
    model.train()
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model(**batch)  # holds the graph, so that no address is used twice while it is counted
        del output
    finally:
        model.train(training)
    return sum(kept.values())


def _measure(model: nn.Module, batch: dict[str, Any] | None) -> dict[str, int | None]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    activation_bytes = None
    if batch is not None:
        with suppress(DidNotFit):  # training may fit all the same, with fewer rows at a time
            activation_bytes = attempt(partial(measure_activations, model, batch))
    return {
        "trainable_parameters": sum(parameter.numel() for parameter in trained),
        "adamw_bytes": sum(2 * parameter.numel() * parameter.element_size() for parameter in trained),
        "activation_bytes": activation_bytes,
    }


def _summary(savings: dict[str, Any]) -> str:
    here, full = savings["with_lora"], savings["full_fine_tuning"]
    parts = [
        f"{here['trainable_parameters']:,} parameters train instead of {full['trainable_parameters']:,}",
        f"AdamW keeps {_mib(here['adamw_bytes'])} instead of {_mib(full['adamw_bytes'])}",
    ]
    if here["activation_bytes"] is None:
        return ", ".join([*parts, "activations not measured (no map-style dataset and collator at hand, or no room)"])
    if full["activation_bytes"] is None:
        return ", ".join([*parts, f"{MEASURED_ROWS} rows of full fine-tuning do not fit"])
    kept = f"{_mib(here['activation_bytes'])} instead of {_mib(full['activation_bytes'])}"
    return ", ".join([*parts, f"{MEASURED_ROWS} rows keep {kept} of activations"])


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _batch(run: Run) -> dict[str, Any] | None:
    """Two rows as the model gets them, on the run's device; None where they cannot be had without side effects."""
    rows, collator = run.train_dataset, copy.copy(run.collator)  # a collator may count or draw numbers
    sharded = run.args.fsdp or splits_weights(run.args)  # the model is not whole on any device
    if rows is None or collator is None or sharded or not hasattr(rows, "__len__") or len(rows) < MEASURED_ROWS:
        return None
    chosen = [rows[i] for i in range(MEASURED_ROWS)]
    if run.args.remove_unused_columns and not hasattr(collator, "columns"):
        inner = run.model.get_base_model() if hasattr(run.model, "get_base_model") else run.model
        known = {*inspect.signature(inner.forward).parameters, "label", "label_ids"}
        chosen = [{name: value for name, value in row.items() if name in known} for row in chosen]
    run.model.to(run.args.device)
    return send_to_device(dict(collator(chosen)), run.args.device)
