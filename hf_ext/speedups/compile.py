"""Repeated layers: compiled, and computed again in the backward pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..data import change_layout
from ..models import (
    PACKED_FAMILIES,
    block_parts,
    find_blocks,
    find_encoders,
    find_recomputed,
    is_packed,
    keep_activations,
    pack_encoders,
    recompute,
)
from ..processes import read_fsdp2
from .base import Context, Costs, Decision, Run, Settings, Speedup, applied, cannot, refused, skipped
from .evidence.parity import one_line
from .evidence.sample import Sample, draws_kept, find_samples, first_rows, modes_kept, sample_model, training_dtype

GRAPHS = ("reduce-overhead", "max-autotune")  # modes that replay CUDA graphs


class Compile(Speedup):
    """Repeated layers compiled in place, one at a time.

    Class N. Models: any with repeated layers (`models/blocks.py`).
    Effect: inductor fuses the element-wise work of a block (norms, rotation, GELU, residuals). Blocks are compiled
    through `Module.compile`, so names in checkpoints stay as they are; all blocks share their graphs. A block with SDPA
    is one graph; packed with `padded` attention two; with `blocked`, which the compiler leaves alone, nine short ones.
    Lengths are dynamic, and packed rows are filled up to few lengths (`data/batches/varlen_layout.py`), so new batches
    do not recompile.
    Hardware: CUDA from compute capability 7.0 (Triton). On CPUs only when named: no benchmark has shown a gain there
    yet.
    Order with FSDP2: compiled here, before blocks are split, which adds hooks around them; their graphs stay whole.
    With activation checkpointing, the parts of a block that is computed again are compiled (attention, feed-forward),
    and the checkpoint stands around their graphs. Compiled around the checkpoint, torch would trace into it, and
    compile nothing where attention breaks the graph, as `blocked` does.
    `--compile_mode` is torch's. Two of its modes replay CUDA graphs, recorded for each shape: packed rows have ever
    others, so they are refused, in favour of rows padded to a multiple (`--pad_to_multiple_of`). Their gain was not
    measured. `--torch_compile_mode`, Trainer's own, switches `--torch_compile` on.
    Conflicts: FSDP's own checkpointing, which was not tried, Trainer's own `--torch_compile`, faesm's attention and
    FlexAttention, which is compiled by itself. CUDA graphs: accumulation, whose sums torch 2.13 gets wrong
    (https://github.com/pytorch/pytorch/issues/169545), and layers that are computed again.
    Evidence: how many blocks were compiled, by one training pass on the first real rows at the start.
    Cost: about a minute of compilation. Where it fails, the blocks run as they were and the plan says why.
    """

    NAME = "compile"
    KIND = "N"

    def decide(self, context: Context) -> Decision:
        """Refuses a mode where nothing is compiled."""
        mode = context.args.compile_mode
        if mode == "default" or self.wanted(context):
            return super().decide(context)
        return refused(f"--compile_mode {mode}: no layer is compiled. Add --speedups compile")

    def decide_wanted(self, context: Context) -> Decision:
        """Decides: on where kernels can be generated, blocks train, and nothing else compiles or checkpoints them."""
        mode = context.args.compile_mode
        problem = _problem(context) or (_graphs_problem(context) if mode in GRAPHS else None)
        named = context.names(self.NAME) or mode != "default"
        if problem:
            return cannot(problem, named)
        if context.hardware.kind == "cpu" and not named:
            return skipped("no gain was shown on CPUs: use --speedups all compile to try")
        what = f"{context.model.blocks}, " if context.model.blocks else ""
        return applied(f"{what}block by block on {context.hardware.name}", {"dynamic": True, "mode": mode})

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Compiles, and runs one training pass to know that it works; otherwise leaves the blocks as they were.

        `decision.settings` go to `torch.compile`: `dynamic`, and `backend` where it is not inductor.
        """
        # As written: what does not compute then is not the compiler's fault.
        samples = find_samples(run) or sample_model(run, first_rows(run.train_dataset), training_dtype(run.args))
        in_parts = run.args.activation_checkpointing or getattr(run.model, "is_activation_checkpointing", False)
        blocks = compile_blocks(run.model, in_parts, **decision.settings)
        if decision.settings.get("mode") in GRAPHS:  # what the pass before put out may be written over
            mark = run.model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
            run.on_end(mark.remove)
        try:
            _train_once(run, samples)
        except Exception as error:  # whatever a compiler backend raises: training goes on with what worked before it
            uncompile_blocks(run.model)
            change_layout(run.collator, round_up=False)  # rows are filled up for compiled blocks only
            for encoder in filter(is_packed, find_encoders(run.model)):
                pack_encoders(encoder)
            return skipped(f"compilation failed: {one_line(error)}")
        run.on_end(partial(uncompile_blocks, run.model))
        return decision.with_evidence(blocks=blocks)


def _problem(context: Context) -> str | None:
    args = context.args
    hardware = context.hardware
    if context.caches_all_inputs:
        return "no encoder trains: blocks run once per distinct sequence"
    if not context.model.blocks and not context.model.frozen_inputs:  # frozen encoders may not be loaded yet
        return "the model has no repeated layers"
    if context.model.has_own_decoder:
        return "no gain was measured for an encoder whose states a decoder reads"
    if args.torch_compile:
        return "--torch_compile compiles the whole model"
    fsdp2 = read_fsdp2(args)
    if fsdp2 and fsdp2.activation_checkpointing:
        return "not tried with FSDP's own activation checkpointing: use --activation_checkpointing true in its place"
    if args.attention in ("faesm", "flex"):
        return f"{args.attention}'s attention is not compiled"
    if hardware.kind == "cuda" and not hardware.has_triton:
        return f"{hardware.name} is older than Triton's 7.0"
    if hardware.kind not in ("cuda", "rocm", "cpu"):
        return f"no compiler for {hardware.name}"
    return None


def _graphs_problem(context: Context) -> str | None:
    """Returns why CUDA graphs, which read and write fixed places in memory, cannot be replayed; None if they can."""
    args = context.args
    asked = f"--compile_mode {args.compile_mode} replays CUDA graphs"
    if context.hardware.kind != "cuda":
        return f"{asked}, and {context.hardware.name} has none: use max-autotune-no-cudagraphs"
    if args.activation_checkpointing:
        return f"{asked}, which layers that are computed again would overwrite: leave one of the two out"
    if args.gradient_accumulation_steps > 1 or args.effective_batch_size:
        why = "and torch adds up gradients of several passes wrongly then"
        return f"{asked}, {why}: give the rows of a step as --per_device_train_batch_size alone"
    packs = set(context.model.families) & set(PACKED_FAMILIES) and context.wants("packing", "I")
    share = context.data.padding_share_random
    if not packs and (args.pad_to_multiple_of or not share):
        return None
    cost = "" if share is None else f", {share:.0%} of a random batch at least is padding then"
    return f"{asked}, and these batches have ever other shapes: add --without packing --pad_to_multiple_of 64{cost}"


def compile_blocks(model: nn.Module, in_parts: bool = False, **options: Any) -> int:
    """Compiles every block of `model` in place; returns how many.

    Args:
        in_parts: the parts of each block, since it will be computed again in the backward pass.
        options: go to `torch.compile`.
    """
    blocks = find_blocks(model)
    for block in blocks:
        for module in _compilable(block, in_parts):
            module.compile(**options)
    return len(blocks)


def uncompile_blocks(model: nn.Module) -> None:
    """Lets every block of `model` run as written."""
    for block in find_blocks(model):
        for module in block.modules():
            module._compiled_call_impl = None  # Module.compile has no counterpart


def _compilable(module: nn.Module, in_parts: bool) -> list[nn.Module]:
    """Returns the module itself, or its parts where a checkpoint stands around or in it."""
    if not (in_parts or find_recomputed(module)):
        return [module]
    return [one for part in block_parts(module) for one in _compilable(part, in_parts=False)]


def _train_once(run: Run, samples: list[Sample]) -> None:
    """Runs forward and backward through the model on real rows, as in training; leaves no gradient, draws no number."""
    try:
        with modes_kept(run.model), draws_kept(run.args.device):
            run.model.train()  # of an AffinityModel, frozen encoders stay in evaluation mode
            for sample in samples:
                with torch.set_grad_enabled(sample.trains):
                    states = sample.states(sample.autocast)
                if sample.trains:
                    states.sum().backward()
    finally:
        run.model.zero_grad(set_to_none=True)


class ActivationCheckpointing(Speedup):
    """Attention, feed-forward layers, whole layers or every n-th computed again in the backward pass: less memory.

    Class I: losses and gradients are those without, bit for bit, with dropout too. `--activation_checkpointing`
    `attention`, `feed_forward`, `layers` or a number n, of any model with repeated layers that train
    (`models/blocks.py`); `true` is Trainer's own, of all layers, for models of transformers.
    With compiled blocks (`compile`), what stands within a checkpoint is compiled.
    Hardware: any. Cost: the forward pass of these parts, once more; bytes against time are in
    `benchmarks/results/activation_checkpointing_cpu.json`.
    Conflicts: FSDP's own checkpointing, DataParallel, `--activation_checkpointing_kwargs`.
    Source: torch.utils.checkpoint, without re-entry.
    """

    NAME = "activation_checkpointing"

    def decide(self, context: Context) -> Decision:
        """Applies a word or a number, and refuses what Trainer would take for `true` or would not do."""
        asked = context.args.activation_checkpointing
        if isinstance(asked, bool):
            return context.unasked(self.NAME, "give --activation_checkpointing attention, feed_forward, layers or n")
        settings = {"recomputes": "layers", "every_n_layers": 1}
        settings["every_n_layers" if isinstance(asked, int) else "recomputes"] = asked
        fsdp2 = read_fsdp2(context.args)
        problem = context.replicas
        if self.left_out(context):
            problem = "--without activation_checkpointing leaves it out: take one of them"
        elif fsdp2 and fsdp2.activation_checkpointing:
            problem = "fsdp_activation_checkpointing of the YAML computes all layers again: take one of them"
        elif context.args.activation_checkpointing_kwargs:
            problem = "--activation_checkpointing_kwargs are for true: leave them out"
        elif context.caches_all_inputs or not context.model.blocks:
            problem = "no repeated layer trains: leave it out"
        if problem:
            return refused(f"--activation_checkpointing {asked}: {problem}")
        what = f"every {asked}. layer" if isinstance(asked, int) else asked
        return applied(f"{what} of {context.model.blocks} again in the backward pass", settings)

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Changes the forwards; keeps Trainer from its own form. Refuses where layers have no such part."""
        number = recompute(run.model, *decision.settings.values())
        if not number:
            return refused(f"no repeated layer that trains has an {decision.settings['recomputes']} part: use layers")
        run.on_end(partial(keep_activations, run.model))
        run.args.activation_checkpointing = False
        return decision.with_evidence(checkpoints=number)

    def count(self, costs: Costs, settings: Settings) -> Costs:
        """Sets what is computed again."""
        return replace(costs, **settings)
