"""Weights of a run on several processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peft import PeftModel

from ..errors import ArgumentError
from ..models import choose_classes, unused_parameters
from ..processes import fsdp_version, offload_device, read_fsdp2, replaces_optimizer, zero_stage
from .base import ADAMW, Context, Decision, Run, Speedup, applied, off, optimizer_name, refused

LOSES_ADAPTERS = (
    "fsdp_activation_checkpointing renames the layers that a PeftModel looks for its adapters in, and PEFT would save "
    "none of them: use --activation_checkpointing true instead"
)

LOADS_IN_ONE = (
    "accelerate cannot hand out these models from one process, since they hold more than parameters: set "
    "fsdp_cpu_ram_efficient_loading: false in the YAML"
)
WHOLE = "DDP: every process holds the whole model"
SPLIT_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop")  # others were not tried, or fail
ENCODES_APART = (
    "--save_full keeps frozen encoders in the model, so that they are split, and the embedding cache calls them by "
    "themselves: leave --save_full out, or add --without embedding_cache"
)


class Sharding(Speedup):
    """How the weights live on several processes: whole on each (DDP), or split layer by layer (FSDP2, ZeRO-3).

    Class I. The launcher's YAML chooses (`accelerate_configs/`); what stands here is what it leaves to run time. FSDP2
    splits by the classes of the encoders' repeated layers, sums gradients in float32, keeps heads and frozen encoders
    in their own precision, and counts on nothing that has no gradient: ESM's contact head is frozen, as it is under DDP
    where unused weights are an error (`--ddp_find_unused_parameters false`, activation checkpointing).
    State dicts follow the phase: split while training, as the YAML says; whole for `save_model` and pushes.
    Order of what else changes a layer: LoRA and attention, compile (`compile.py`), activation checkpointing, sharding.
    Take either `--activation_checkpointing` or `fsdp_activation_checkpointing` of the YAML (Trainer refuses both): each
    recomputes a layer inside its sharding, with the same numbers.
    Conflicts: FSDP 1; `fsdp_activation_checkpointing` with a `PeftModel`, whose adapters PEFT 0.21 then leaves out when
    it saves. `fsdp_cpu_ram_efficient_loading`: accelerate 1.15 takes each entry of a checkpoint, buffers too (ESM's
    rotation, an AffinityModel's scales), for a sharded parameter when it hands out weights. Optimizers whose state is
    not split as the weights are (Adafactor), or not of plain tensors (8 bits and less). Embeddings cached of encoders
    that stay in the model (`save_full`): processes would encode unequal shares of what is new, and each batch gathers
    weights.
    With `offload_optimizer`, accelerate hands DeepSpeed a DeepSpeedCPUAdam in place of the optimizer, whatever that was
    (a CPU Adagrad for Adagrad), and says nothing: from AdamW it takes over rate, betas, epsilon and decay, and makes
    the same steps up to rounding; anything else would be trained by another optimizer than asked for, and is refused.
    Cost: FSDP2 gathers each layer's weights in forward and backward.
    """

    NAME = "sharding"

    def decide(self, context: Context) -> Decision:
        """Applies with FSDP2, and with DDP where weights without a gradient must be frozen; FSDP 1 is refused."""
        args = context.args
        version = fsdp_version(args)
        if version == 1:
            return refused("FSDP 1 (flat slices) is deprecated: set fsdp_version: 2 (accelerate_configs/fsdp2.yaml)")
        if version == 2:
            return _decide_fsdp2(context)
        if args.deepspeed_plugin is not None:
            return _decide_zero(args)
        if context.world_size == 1:
            return off("one process")
        # DDP fails on a trainable weight without a gradient where Trainer does not let it look for such weights.
        if args.ddp_find_unused_parameters is False:
            return applied("DDP with ddp_find_unused_parameters=False", {"is_sharded": False})
        if args.activation_checkpointing is True:
            return applied("DDP with activation checkpointing", {"is_sharded": False})
        return off(WHOLE)

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Freezes what never gets a gradient and names the classes to split by, for accelerate.

        Refuses a class that the model lacks, adapters that would not be saved, `save_full` with cached embeddings.
        """
        if run.model is None:  # Trainer says so
            return decision
        reasons = [decision.reason]
        settings = dict(decision.settings)
        if settings["is_sharded"]:
            try:
                settings["classes"] = choose_classes(run.model, settings["classes"])
            except ArgumentError as error:
                return refused(str(error))
            if settings["wraps_layers"] and isinstance(run.model, PeftModel):
                return refused(LOSES_ADAPTERS)
            if settings["caches"] and settings["has_frozen"] and getattr(run.model.config, "save_full", False):
                return refused(ENCODES_APART)
            unnamed = "layer by layer, once encoders are loaded" if settings["has_frozen"] else "as one piece"
            reasons.append(f"layer by layer ({', '.join(settings['classes'])})" if settings["classes"] else unnamed)
        unused = unused_parameters(run.model)
        for parameter in unused.values():
            parameter.requires_grad_(False)
        if unused:
            reasons.append(f"{len(unused)} weights of ESM's contact head are frozen: they never get a gradient")
        elif not settings["is_sharded"] and run.args.deepspeed_plugin is None:
            return off(WHOLE)
        return replace(decision, reason="; ".join(reasons), settings=settings)


def _decide_fsdp2(context: Context) -> Decision:
    args = context.args
    plugin = read_fsdp2(args)
    assert plugin is not None
    if plugin.cpu_ram_efficient_loading:
        return refused(LOADS_IN_ONE)
    optimizer = optimizer_name(args)
    if optimizer not in SPLIT_OPTIMIZERS:
        reason = (
            f"--optim {optimizer} cannot step split weights, or its state be saved in pieces: use adamw_torch_fused"
        )
        return refused(f"{reason}, {', '.join(SPLIT_OPTIMIZERS[2:])} or --speedups muon")
    settings = {
        "is_sharded": True,
        "has_frozen": bool(context.model.frozen_inputs),
        "caches": context.wants("embedding_cache", "I") and not context.data.streaming,
        "classes": plugin.transformer_cls_names_to_wrap,
        "wraps_layers": bool(plugin.activation_checkpointing),
    }
    return applied("FSDP2", settings)


def _decide_zero(args: Any) -> Decision:
    """Decides: applied, unless offloading would replace the optimizer that was asked for."""
    stage = zero_stage(args)
    device = offload_device(args)
    optimizer = optimizer_name(args)
    reason = f"DeepSpeed ZeRO-{stage}"
    if replaces_optimizer(args) and "optimizer" not in args.deepspeed_plugin.deepspeed_config:
        if optimizer not in ADAMW:  # whose steps DeepSpeed's CPU Adam makes
            return refused(
                f"ZeRO-{stage} with its optimizer on the {device} would step DeepSpeed's CPU Adam, not --optim "
                f"{optimizer}: use --optim {' or '.join(ADAMW)}, leave offload_optimizer_device out, or set "
                "zero_force_ds_cpu_optimizer: false in a DeepSpeed JSON, which keeps an optimizer that runs on the CPU"
            )
        reason += f"; DeepSpeed's CPU Adam makes AdamW's steps on the {device}"
    return applied(reason, {"is_sharded": False})
