"""LoRA, and how the frozen weights beside it are stored: in half precision, or on request in 8 or 4 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import set_seed

from ..checkpoints.weights import keep_source_digests
from ..errors import PlanRefused
from ..memory.stored import optimizer_bytes, trained
from ..models.affinity import AffinityModel
from ..models.blocks import find_base_layers, find_blocks
from ..models.families import FAMILIES
from ..models.frozen_weights import (
    find_frozen_layers,
    narrow,
    quantize_linear_layers,
    quantized_bytes,
)
from ..models.lora import LoraSettings, has_adapters, wrap_with_lora
from ..processes.sharding import fsdp_version
from .base import Context, Decision, Kind, Run, applied, are_weights_split, off, refused, skipped
from .precision import Precision

FROZEN = "every tower is frozen, so there is nothing for --use_peft to adapt: give --tower_training lora"


def lora_settings(args: Any) -> LoraSettings:
    """The LoRA options of `FastTrainingArguments`.

    Raises:
        ArgumentError: a value out of range.
    """
    given = args.lora_r, args.lora_alpha, args.lora_dropout, args.lora_target_modules, args.lora_kwargs or {}
    return LoraSettings(*given)


class Lora:
    """LoRA: encoders stay as they are, small matrices beside their linear layers train.

    Class L: the update of each weight has a rank of at most r, so the model learns something else than full
    fine-tuning; it happens only with `--use_peft`. Effect: AdamW keeps two numbers per trainable parameter, a small
    share of all, and a checkpoint holds adapters and heads only. It saves no activations by itself: adapters on all
    linear layers keep as much as full fine-tuning does, `--lora_dropout` above 0 keeps a copy of each input, fewer
    `--lora_target_modules` keep less; what a step takes says `hf-ext doctor`. Models with towers (`AffinityModel`)
    bring their adapters; others are wrapped in a `peft.PeftModel`. Source: see `hf_ext/models/lora.py`.
    Conflicts: a model made by `model_init` comes too late to be wrapped; where every tower is frozen there is nothing
    to adapt.
    """

    NAME: ClassVar[str] = "lora"
    KIND: ClassVar[Kind] = "L"

    @classmethod
    def decide(cls, context: Context) -> Decision:
        """Applies with `--use_peft`: to layers that are named, known of the family, or else all that repeat."""
        args, model = context.args, context.model
        if not args.use_peft:
            return context.unasked(cls.NAME, "give --use_peft: it changes what is learned")
        if cls.NAME in (args.without or []):
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

    @classmethod
    def apply(cls, decision: Decision, run: Run) -> Decision:
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


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def asked_bits(args: Any) -> int | None:
    """What `--load_in_8bit` and `--load_in_4bit` ask for; None without either."""
    return 8 if args.load_in_8bit else 4 if args.load_in_4bit else None


def asked_flag(args: Any) -> str:
    """The flag behind `asked_bits`."""
    return f"--load_in_{asked_bits(args)}bit"


class HalfBase:
    """Frozen weights beside LoRA adapters in half precision: 2 bytes each instead of 6.

    Class I. Effect: under autocast (`precision`) a float32 weight that does not train is rounded at every use, and the
    rounded copy kept for the backward pass. Here it is stored rounded: 4 bytes less per weight (2 of storage, 2 of
    copies), no cast per pass, and the same numbers. Adapters, heads, norms, embeddings and losses stay in float32.
    Evidence: layers, and bytes saved of weights and of copies.
    Cost: for a `PeftModel` hashing its frozen weights before instead of at the first save.
    Conflicts: `quantized_base` stores the same weights in fewer bits; FSDP and DeepSpeed gather what they have split in
    half precision themselves; `--save_full` keeps weights that are saved in float32; layers of DoRA, whose norms are
    taken from the weights, stay as they are. The base stays in half precision after the run; `merged_copy` and
    `trainer.save_merged` merge in float32, from the encoder read again (`AffinityModel`) or the rounded weights.
    """

    NAME: ClassVar[str] = "lora_base"
    KIND: ClassVar[Kind] = "I"

    @classmethod
    def decide(cls, context: Context) -> Decision:
        """Applies to LoRA where training runs under autocast and the model is whole on each device."""
        if not context.wants(cls.NAME, cls.KIND):
            return off()
        args, trains_in = context.args, Precision.decide(context)
        if not (args.use_peft or context.model.has_adapters):
            return skipped("no LoRA")
        if asked_bits(args):
            return skipped(f"quantized_base stores the frozen weights in {asked_bits(args)} bits")
        if trains_in.status != "applied":
            return skipped("nothing is computed in half precision, so that float32 is what the weights are used in")
        if are_weights_split(args):
            return skipped("the weights are spread over processes, which send them in half precision as it is")
        dtype = trains_in.settings["mixed_precision"]
        return applied(f"{dtype}, as autocast rounds them", {"dtype": dtype})

    @classmethod
    def apply(cls, decision: Decision, run: Run) -> Decision:
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
        return replace(decision, reason=reason).with_evidence(layers=len(layers), bytes_saved=saved, copies_saved=saved)


class QuantizedBase:
    """Frozen weights beside LoRA adapters in 8 or 4 bits (QLoRA): 1 or 0.56 bytes each instead of 4.

    Class N. Effect: with `--load_in_8bit` or `--load_in_4bit` (nf4) the frozen linear layers of encoders that have
    adapters are stored in bitsandbytes' own layers and dequantised at each use, forward and backward. Adapters, heads,
    norms, embeddings and losses stay in float32. Activations are as large as without: checkpoint those first.
    Hardware: any that bitsandbytes 0.50 runs on, but CPUs: there its layers round inputs in evaluation only, and biases
    in place. The model is in memory in float32 once before.
    Evidence: layers, and bytes saved.
    Cost: dequantising every layer in each forward and backward pass. Source: QLoRA, arXiv:2305.14314; LLM.int8; see
    `hf_ext/models/frozen_weights.py`.
    Conflicts: full fine-tuning; DoRA, whose norms are taken from the weights; `--save_full`; FSDP and ZeRO, which split
    weights, and split frozen ones too. Codes are never written: checkpoints and exports hold adapters, which a base in
    float32 takes as well (predictions then differ by what the codes round). An `AffinityModel` reads its float weights
    again to merge; of a `PeftModel` the saved adapters are merged into a base that is read again.
    """

    NAME: ClassVar[str] = "quantized_base"
    KIND: ClassVar[Kind] = "N"

    @classmethod
    def decide(cls, context: Context) -> Decision:
        """Applies on request to models with adapters that are whole on each device; full training is refused."""
        args, bits, flag = context.args, asked_bits(context.args), asked_flag(context.args)
        if bits is None:
            return context.unasked(cls.NAME, "give --load_in_8bit or --load_in_4bit: it changes the numbers")
        if args.load_in_8bit and args.load_in_4bit:
            return refused("--load_in_8bit and --load_in_4bit: give one of the two")
        if context.model.frozen_inputs and not context.model.trains_encoders:
            return skipped("no encoder trains: encoder_precision stores them so")
        if cls.NAME in (args.without or []):
            return refused(f"{flag} and --without {cls.NAME} contradict each other: keep one")
        if not (args.use_peft or context.model.has_adapters):
            return refused(f"{flag}: all weights train, which codes cannot: give --use_peft, or keep encoders frozen")
        if are_weights_split(args) or fsdp_version(args) is not None:
            return refused(
                f"{flag}: FSDP and ZeRO split frozen weights over the processes instead: leave it out, or use DDP"
            )
        if context.hardware.kind == "cpu":
            return refused(f"{flag}: not for training on a CPU, where bitsandbytes' layers are not exact: leave it out")
        if context.replicas:
            return refused(context.replicas)
        return applied(f"frozen layers beside adapters in {bits} bits", {"bits": bits})

    @classmethod
    def apply(cls, decision: Decision, run: Run) -> Decision:
        """Quantises the base of `run.model`, on the run's device.

        Raises:
            MissingDependencyError: no bitsandbytes that works here.
            ArgumentError: weights that bitsandbytes cannot take.
        """
        bits = decision.settings["bits"]
        blocks = [block for block in find_blocks(run.model) if has_adapters(block)]
        layers = [layer for block in blocks for _, layer in find_frozen_layers(block)]
        problem = _find_problem(run.model, layers)
        if problem:
            return replace(decision, status="refused", reason=f"--load_in_{bits}bit: {problem}")
        if isinstance(run.model, PeftModel):
            keep_source_digests(run.model)
        before = sum(layer.weight.nbytes for layer in layers)
        for block in blocks:
            quantize_linear_layers(block, bits, device=run.args.device)
        saved = before - quantized_bytes(run.model)
        reason = f"{decision.reason}: {saved / 2**20:.1f} MiB less of weights"
        return replace(decision, reason=reason).with_evidence(layers=len(layers), bytes_saved=saved)


def _find_problem(model: Any, layers: list[Any]) -> str | None:
    if not isinstance(model, PeftModel | AffinityModel):
        return f"{type(model).__name__} has adapters of its own making, and would be saved with codes: give --use_peft"
    if getattr(model.config, "save_full", False):
        return "--save_full keeps the weights that are saved in float32: leave out one of the two"
    if any(getattr(module, "lora_magnitude_vector", None) for module in model.modules()):
        return "DoRA takes norms of the frozen weights: train without it"
    return None if layers else "no frozen linear layer stands beside an adapter: leave it out"
