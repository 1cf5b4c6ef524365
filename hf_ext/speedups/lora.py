"""LoRA: encoders stay as they are, small matrices beside their linear layers train.

Class L: the update of each weight has a rank of at most r, so the model learns something else than full fine-tuning; it
happens only with `--use_peft`. Effect: AdamW keeps two numbers per trainable parameter, a small share of all, and a
checkpoint holds adapters and heads only. It saves no activations by itself: adapters on all linear layers keep as much
as full fine-tuning does, `--lora_dropout` above 0 keeps a copy of each input, fewer `--lora_target_modules` keep less;
what a step takes says `hf-ext doctor`. Models with towers (`AffinityModel`) bring their adapters; others are wrapped in
a `peft.PeftModel`. Source: see `hf_ext/models/lora.py`.
Conflicts: a model made by `model_init` comes too late to be wrapped; where every tower is frozen there is nothing to
adapt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import set_seed

from ..errors import PlanRefused
from ..memory.stored import optimizer_bytes, trained
from ..models.families import FAMILIES
from ..models.lora import LoraSettings, has_adapters, wrap_with_lora
from .base import Context, Decision, Kind, Run, applied, refused

NAME = "lora"
KIND: Kind = "L"
FROZEN = "every tower is frozen, so there is nothing for --use_peft to adapt: give --tower_training lora"


def lora_settings(args: Any) -> LoraSettings:
    """The LoRA options of `FastTrainingArguments`.

    Raises:
        ArgumentError: a value out of range.
    """
    given = args.lora_r, args.lora_alpha, args.lora_dropout, args.lora_target_modules, args.lora_kwargs or {}
    return LoraSettings(*given)


def decide(context: Context) -> Decision:
    """Applies with `--use_peft`: to layers that are named, known of the family, or else all that repeat."""
    args, model = context.args, context.model
    if not args.use_peft:
        return context.unasked(NAME, "give --use_peft: it changes what is learned")
    if NAME in (args.without or []):
        return refused("--use_peft and --without lora contradict each other: keep one")
    if not model.num_parameters:
        return refused("there is no model yet to adapt: pass the model itself instead of model_init")
    if model.frozen_inputs and not model.trains_encoders:
        return refused(FROZEN)
    if not args.lora_target_modules and not model.families:
        return refused(
            "which layers to adapt is not known of a model without a configuration: give --lora_target_modules"
        )
    settings = vars(lora_settings(args))
    is_known = args.lora_target_modules or set(model.families) & set(FAMILIES)
    reason = f"adapters train beside {'frozen' if is_known else 'all'} linear layers"
    return applied(reason if is_known else f"{reason} that repeat", settings)


def apply(decision: Decision, run: Run) -> Decision:
    """Wraps `run.model` where it has no adapters yet, seeded by `args.seed`; counts what trains.

    Raises:
        ArgumentError: a named target matches no layer.
        PlanRefused: a model with towers, none of which has adapters.
    """
    if not has_adapters(run.model):
        if hasattr(run.model, "frozen_inputs"):
            raise PlanRefused("lora: no tower of this model has adapters: build it with --tower_training lora.")
        set_seed(run.args.seed)  # Trainer seeds later; without this the adapters would not follow --seed
        run.model = wrap_with_lora(run.model, LoraSettings(**decision.settings))
    layers = [module for module in run.model.modules() if isinstance(module, BaseTunerLayer)]
    ranks = sorted({rank for layer in layers for rank in getattr(layer, "r", {}).values()})
    num_trained = sum(parameter.numel() for parameter in trained(run.model))
    reason = (
        f"{decision.reason}: {num_trained:,} of {sum(p.numel() for p in run.model.parameters()):,} parameters train"
    )
    evidence = {"rank": ranks[0] if len(ranks) == 1 else ranks, "adapted_layers": len(layers)}
    adamw_bytes = optimizer_bytes(run.model, "adamw_torch_fused")[0]
    return replace(decision, reason=reason).with_evidence(**evidence, adamw_bytes=adamw_bytes)
