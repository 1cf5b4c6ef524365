"""The attention kernel of encoders: which one, and how a model gets it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from transformers.models.esm.modeling_esm import EsmModel

from ..errors import PlanRefused
from ..models import (
    KERNELS,
    PACKED_FAMILIES,
    PREFIX,
    find_encoders,
    register_attention,
    restore_faesm,
    swap_faesm,
    unwrap_peft,
)
from ..optional import import_problem
from .base import Context, Costs, Decision, Run, Settings, Speedup, applied, cannot, off, refused, skipped
from .encoder_precision import EncoderPrecision
from .evidence import parity
from .evidence.sample import first_rows, sample_model, training_dtype
from .precision import Precision

WITHOUT_BIAS = ("esm", "esmc", "bert")  # whose scores flash attention computes; T5 adds a bias to them
PACKED = ("blocked", "padded", "varlen", "fa2", "flex")  # kernels that take unpadded sequences
FLASH = {"varlen": "torch.nn.attention.varlen", "flash_attn": "flash_attn"}  # where the function is
FAESM = "faesm"  # with its flash kernel
FAESM_SDPA = "faesm_sdpa"
NAMED_OTHERWISE = {"flash_attn": "fa2"}
WHOLE_FLEX = "flex_attention"  # transformers' own, for models without an encoder that is packed
# What is counted in their place: their memory is alike, and they need no device for it.
COUNTED_AS = {"blocked": "padded", "fa2": "varlen", "flex": "varlen"}


class Attention(Speedup):
    """The attention kernel that suits the machine, with proof that it computes the same.

    Class N. Choices of `--attention`:
    - `auto`: `varlen` from compute capability 8.0 in half precision, `padded` on other GPUs, `blocked` on CPUs.
    - `varlen`: torch's flash attention on unpadded sequences.
    - `padded`: torch SDPA with padding around attention only; on a T4 that is its memory-efficient kernel.
    - `blocked`: for CPUs, equally long sequences together in blocks that stay in the cache.
    - `flash_attn`: the package flash-attn on unpadded sequences, from 8.0 in half precision.
    - `flex`: torch's FlexAttention on unpadded sequences (`models/kernels/flex_attention.py`), T5's bias included; of
      other models of transformers their own, which is not packed. It trains on GPUs with Triton; CPUs run it forward.
    - `faesm`: the faesm library's attention for ESM (`models/kernels/faesm_bridge.py`): its flash kernel from 8.0 with
      flash-attn, elsewhere its SDPA kernel, which is as fast as `sdpa`.
    - `sdpa`, `eager`: transformers' own, for padded batches.
    Evidence: parity on the first real rows in the training dtype (`evidence/parity.py`). Above the bound, a choice is
    refused; `auto` goes back to the old attention, without packing (`--attention padded` may still keep that).
    Cost: two or three forward passes over four rows, and backward passes where encoders train.
    """

    NAME = "attention"
    KIND = "N"
    predicts = True  # so that what is put into the cache is what training would compute

    def decide(self, context: Context) -> Decision:
        """Meets or refuses an explicit choice; for `auto` takes what the hardware is fastest with."""
        asked = context.args.attention
        if self.left_out(context):
            return off()
        if asked == "auto" and not self.wanted(context):
            return off()
        is_packed = bool(set(PACKED_FAMILIES) & set(context.model.families))
        if not is_packed and not (asked == "flex" and context.model.supports_flex):
            return cannot(
                f"known for encoders of type {', '.join(PACKED_FAMILIES)}; the model has none", asked != "auto"
            )
        if asked == "auto":
            return _decide_auto(context)
        problem = _problem(asked, context)
        if problem:
            return refused(f"--attention {asked}: {problem}: use --attention auto")
        slow = _flash_problem(context, "faesm.fa_utils") if asked == FAESM else None
        if slow:
            return applied(f"faesm's SDPA kernel, as fast as sdpa: {slow}", {"kernel": FAESM_SDPA, "asked": True})
        kernel = NAMED_OTHERWISE.get(asked, asked) if is_packed else WHOLE_FLEX
        return applied("asked for", {"kernel": kernel, "asked": True})

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Swaps the attention of every encoder, now and when loaded later, if parity holds.

        Raises:
            PlanRefused: an explicit choice is above the bound, or does not run here.
        """
        kernel = decision.settings["kernel"]
        asked = decision.settings["asked"]
        if not asked and any(encoder.config._attn_implementation == "eager" for encoder in find_encoders(run.model)):
            return skipped("scores of the model's eager attention may be read, and no other kernel returns them")
        swap, undo = swaps(run.model, kernel)
        samples = None
        if kernel == WHOLE_FLEX:
            samples = sample_model(run, first_rows(run.train_dataset), training_dtype(run.args))
        found = parity.prove(run, partial(swap, run.model), samples)
        if found and found.problem:
            undo()
            problem = f"{kernel} against the old attention: {found.problem}"
            if asked:
                raise PlanRefused(f"--attention {problem}. Use --attention auto.")
            return skipped(problem, found.evidence())
        run.change_encoders(swap)
        run.on_end(undo)  # the choice stands in the model's configuration, which other models may share
        return decision.with_evidence(kernel=kernel, **(found.evidence() if found else parity.NOT_MEASURED))

    def change(self, model: nn.Module, settings: Settings) -> None:
        """Sets the kernel of all of its encoders."""
        set_attention(model, settings["kernel"])

    def change_traced(self, model: nn.Module, settings: Settings, costs: Costs) -> None:
        """Takes what holds as much: of a padded batch our kernels would read the mask, which has no values here.

        One that goes block by block, on CPUs, holds what one holds that pads.
        """
        kernel: str = settings["kernel"]
        counted = COUNTED_AS.get(kernel, kernel)
        set_attention(model, counted if kernel in KERNELS and not costs.pads else "sdpa")


def _decide_auto(context: Context) -> Decision:
    hardware = context.hardware
    if hardware.kind == "cpu":
        reason = "scores in blocks that stay in the cache, none on padding"
        return applied(reason, {"kernel": "blocked", "asked": False})
    # On padded batches these kernels take the padding out and put it back in every layer.
    if not context.wants("packing", "I"):
        return skipped("without packing, transformers' SDPA is the best there is")
    if context.low_padding:
        return skipped(f"{context.low_padding}: transformers' SDPA is the best there is")
    problem = _flash_problem(context)
    if problem or not set(WITHOUT_BIAS) & set(context.model.families):
        reason = problem or "T5's bias has no flash kernel"
        return applied(f"SDPA, with padding around attention only: {reason}", {"kernel": "padded", "asked": False})
    return applied(f"flash attention of {hardware.name}", {"kernel": "varlen", "asked": False})


def _problem(asked: str, context: Context) -> str | None:
    """Returns why an explicit choice cannot be met; None if it can."""
    if asked == FAESM and "esm" not in context.model.families:
        return "the model has no ESM encoder"
    if asked in FLASH:
        if not set(context.model.families) & set(WITHOUT_BIAS):
            return "T5's relative bias has no flash kernel"
        return _flash_problem(context, FLASH[asked])
    if asked == "flex" and context.model.trains_encoders and not context.hardware.has_triton:
        return f"{context.hardware.name} has no Triton, without which FlexAttention has no backward pass"
    if asked == "blocked" and context.hardware.kind != "cpu":
        return f"made for CPUs, and {context.hardware.name} has faster kernels"
    return None


def _flash_problem(context: Context, module: str = FLASH["varlen"]) -> str | None:
    hardware = context.hardware
    if not hardware.flash_attention_2:
        capability = ".".join(map(str, hardware.compute_capability or ()))
        have = f"has compute capability {capability}" if capability else "is no CUDA device"
        return f"flash attention needs compute capability 8.0, {hardware.name} {have}"
    if not any(one.decide(context).status == "applied" for one in (Precision(), EncoderPrecision())):
        return "flash attention needs bf16 or fp16, this run is in float32"
    missing = import_problem(module)
    return missing and f"{module}: {missing}"


def swaps(model: nn.Module, kernel: str) -> tuple[Callable[[nn.Module], Any], Callable[[], Any]]:
    """Returns how to give the encoders of a model, now or when loaded, this attention, and how to undo it."""
    if kernel in (FAESM, FAESM_SDPA):
        return partial(set_faesm, flash=kernel == FAESM), partial(restore_faesm, model)
    before: list[tuple[Any, str]] = []  # configurations, which keep no encoder alive

    def swap(swapped: nn.Module) -> int:
        register_attention()
        encoders = [unwrap_peft(swapped)] if kernel == WHOLE_FLEX else find_encoders(swapped)
        for encoder in encoders:
            before.append((encoder.config, encoder.config._attn_implementation))
            encoder.set_attn_implementation(PREFIX + kernel if kernel in KERNELS else kernel)
        return len(encoders)

    def undo() -> None:
        while before:
            config, name = before.pop()
            config._attn_implementation = name

    return swap, undo


def set_attention(model: nn.Module, kernel: str) -> int:
    """Selects an attention kernel for every encoder in `model`; returns how many. Weights are untouched."""
    return int(swaps(model, kernel)[0](model))


def set_faesm(model: nn.Module, flash: bool) -> int:
    """Gives every ESM encoder in `model` faesm's attention; returns how many, 0 where there is none (a T5 tower)."""
    encoders = [encoder for encoder in find_encoders(model) if isinstance(encoder, EsmModel)]
    for encoder in encoders:
        if encoder.config._attn_implementation.startswith(PREFIX):  # left there by another model of this configuration
            encoder.set_attn_implementation("sdpa")
    return swap_faesm(model, flash) if encoders else 0
