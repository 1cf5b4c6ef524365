"""LoRA, and the frozen weights beside it in half precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import set_seed

from ..checkpoints import keep_source_digests
from ..errors import PlanRefused
from ..memory import MemoryModel, TrainConfig, optimizer_bytes, trained
from ..models import FAMILIES, LoraSettings, find_base_layers, has_adapters, narrow, wrap_with_lora
from ..processes import fsdp_version
from .base import Context, Decision, Run, Speedup, applied, are_weights_split, refused, skipped
from .precision import Precision

FROZEN = "every tower is frozen, so there is nothing for --use_peft to adapt: give --tower_training lora"


def lora_settings(args: Any) -> LoraSettings:
    """Reads the LoRA options of `FastTrainingArguments`.

    Raises:
        ArgumentError: a value out of range.
    """
    given = args.lora_r, args.lora_alpha, args.lora_dropout, args.lora_target_modules, args.lora_kwargs or {}
    return LoraSettings(*given)


class Lora(Speedup):
    """LoRA: encoders stay as they are, small matrices beside their linear layers train.

    Class L: the update of each weight has a rank of at most r, so the model learns something else than full
    fine-tuning; it happens only with `--use_peft`. Effect: AdamW keeps two numbers per trainable parameter, a small
    fraction of all, and a checkpoint holds adapters and heads only. It saves no activations by itself: adapters on all
    linear layers keep as much as full fine-tuning does, `--lora_dropout` above 0 keeps a copy of each input, fewer
    `--lora_target_modules` keep less; what a step takes says `hf-ext doctor`. Models with towers (`AffinityModel`)
    bring their adapters; others are wrapped in a `peft.PeftModel`. Source: see `hf_ext/models/lora.py`.
    Conflicts: where every tower is frozen there is nothing to adapt.
    """

    NAME = "lora"
    KIND = "L"

    def decide(self, context: Context) -> Decision:
        """Applies with `--use_peft`: to layers that are named, known of the family, or else all that repeat."""
        args = context.args
        model = context.model
        if not args.use_peft:
            return context.unasked(self.NAME, "give --use_peft: it changes what is learned")
        if self.left_out(context):
            return refused("--use_peft and --without lora contradict each other: keep one")
        if not model.num_parameters:
            return refused("there is no model to adapt")
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

    def apply(self, decision: Decision, run: Run) -> Decision:
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


class CodedBase(Speedup):
    """QLoRA: frozen weights beside adapters in 4 bits, 0.52 bytes each instead of 4.

    Class L: adapters learn beside rounded weights; it happens only with `--use_peft --load_in_4bit`. Effect: linear
    layers of towers that train with LoRA are stored as nf4 codes with scales in 8 bits, and multiplied in the precision
    of training; adapters, heads, norms, embeddings and biases stay in float32. A step takes longer. A checkpoint holds
    the adapters; the encoder is named by its id and hash, and predictions are made beside the same codes.
    Evidence: bytes saved. Cost: the codes are made on the CPU, from float32 weights that it holds once.
    Hardware: what bitsandbytes computes on, CUDA, ROCm and CPUs. It did not run on a card.
    Source: Dettmers et al., arXiv:2305.14314.
    Conflicts: FSDP and DeepSpeed split weights, for which there are no codes; DoRA needs the weights' norms;
    `--save_full` saves them in float32.
    """

    NAME = "lora_4bit"
    KIND = "L"
    compared = ()
    costs = {"has_half_base": True, "has_coded_base": True}

    def decide(self, context: Context) -> Decision:
        """Applies with `--use_peft --load_in_4bit` to towers that have adapters."""
        args = context.args
        flags = "--use_peft --load_in_4bit"
        if not (args.use_peft and args.load_in_4bit and context.model.trains_encoders):
            return context.unasked(self.NAME, f"give {flags}: it changes what is learned")
        if self.left_out(context):
            return refused(f"{flags} and --without {self.NAME} contradict each other: keep one")
        if context.hardware.kind == "mps":
            return refused(f"{flags}: bitsandbytes trains no 4-bit weights on MPS: leave out --load_in_4bit")
        if lora_settings(args).kwargs.get("use_dora"):
            return refused(
                f"{flags}: DoRA takes the norms of weights, for which there are codes: leave out one of both"
            )
        if args.find_batch_size:
            return refused(f"{flags}: what products of codes take is not counted: leave out --find_batch_size")
        if are_weights_split(args) or fsdp_version(args) is not None:
            return refused(f"{flags}: FSDP and ZeRO split weights, for which there are no codes: use DDP")
        return applied("linear layers beside adapters in 4 bits (nf4)")

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Stores the base of each tower with adapters in 4 bits.

        Raises:
            MissingDependencyError: bitsandbytes does not work here.
        """
        if run.model.config.save_full:
            return refused(
                "--load_in_4bit and --save_full, which saves the weights in float32: leave out one of the two"
            )
        saved = run.model.quantize_bases()
        reason = f"{decision.reason}: {saved / 2**20:.1f} MiB less of weights"
        return replace(decision, reason=reason).with_evidence(bytes_saved=saved)


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class HalfBase(Speedup):
    """Frozen weights beside LoRA adapters in half precision: 2 bytes each instead of 6.

    Class I. Effect: under autocast (`precision`) a float32 weight that does not train is rounded at every use, and the
    rounded copy kept for the backward pass. Here it is stored rounded: 4 bytes less per weight (2 of storage, 2 of
    copies), no cast per pass, and the same numbers. Adapters, heads, norms, embeddings and losses stay in float32.
    Evidence: layers, and bytes saved of weights and of copies.
    Cost: for a `PeftModel` hashing its frozen weights before instead of at the first save.
    Conflicts: FSDP and DeepSpeed gather what they have split in half precision themselves; `--save_full` keeps weights
    that are saved in float32; layers of DoRA, whose norms are taken from the weights, stay as they are. The base stays
    in half precision after the run; `merged_copy` and `trainer.save_merged` merge in float32, from the encoder read
    again (`AffinityModel`) or the rounded weights.
    """

    NAME = "lora_base"
    costs = {"has_half_base": True}
    group = "base"

    def decide_wanted(self, context: Context) -> Decision:
        """Applies to LoRA where training runs under autocast and the model is whole on each device."""
        args = context.args
        trains_in = Precision().decide(context)
        if not (args.use_peft or context.model.has_adapters):
            return skipped("no LoRA")
        if trains_in.status != "applied":
            return skipped("nothing is computed in half precision, so that float32 is what the weights are used in")
        if are_weights_split(args):
            return skipped("the weights are spread over processes, which send them in half precision as it is")
        dtype = trains_in.settings["mixed_precision"]
        return applied(f"{dtype}, as autocast rounds them", {"dtype": dtype})

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Narrows the frozen linear layers of `run.model`."""
        if getattr(run.model.config, "save_full", False):
            return skipped("--save_full keeps the weights that are saved in float32")
        layers = find_base_layers(run.model)
        if not layers:
            return skipped("no frozen float32 layer beside an adapter")
        dtype = _DTYPES[decision.settings["dtype"]]
        if isinstance(run.model, PeftModel):
            keep_source_digests(run.model)
        saved = narrow(layers, dtype)
        reason = f"{decision.reason}: {saved / 2**20:.1f} MiB less of weights, and as much of copies"
        return replace(decision, reason=reason).with_evidence(layers=len(layers), bytes_saved=saved)

    def saves_memory(self, memory: MemoryModel, config: TrainConfig) -> bool:
        """Returns whether autocast rounds weights beside adapters that are stored in float32."""
        return config.half and not config.has_half_base and bool(memory.base_layers)
