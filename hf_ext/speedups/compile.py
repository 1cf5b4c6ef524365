"""Encoder blocks compiled in place, one at a time.

Class N. Effect: inductor fuses the element-wise work of a block (norms, rotation, GELU, residuals). Blocks are compiled
through `Module.compile`, so names in checkpoints stay as they are; all blocks share their graphs.
Attention stays outside the graphs: a block is two of them, before and after. Lengths are dynamic, and packed rows are
filled up to few lengths (`models/segments.py`), so new batches do not recompile.
Hardware: CUDA from compute capability 7.0 (Triton). On CPUs only when named: there compiling took longer than it saved
(`benchmarks/results/`, one-at-a-time rows).
Conflicts: activation checkpointing (the recomputed block contains the graph break, and torch then compiles nothing of
it), Trainer's own `--torch_compile`, faesm's attention.
Evidence: one training pass on the first real rows at the start; at the end graphs, recompilations and seconds.
Cost: about a minute of compilation. Where it fails, the blocks run as they were and the plan says why.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import get_compilation_metrics
from transformers.models.esm.modeling_esm import EsmLayer
from transformers.models.t5.modeling_t5 import T5Block

from . import attention, parity
from .base import Context, Decision, Kind, Run, off

NAME = "compile"
KIND: Kind = "N"
MIN_CAPABILITY = (7, 0)


def decide(context: Context) -> Decision:
    """On where kernels can be generated, blocks train, and nothing else compiles or checkpoints them."""
    if not context.wants(NAME, KIND):
        return off(NAME, KIND)
    problem = _problem(context)
    named = NAME in context.args.speedups
    if problem:
        return Decision(NAME, KIND, "refused" if named else "skipped", problem)
    if context.hardware.kind == "cpu" and not named:
        return Decision(NAME, KIND, "skipped", "does not pay on CPUs: use --speedups all compile to try")
    return Decision(NAME, KIND, "applied", f"block by block on {context.hardware.name}", {"dynamic": True})


def _problem(context: Context) -> str | None:
    args, hardware = context.args, context.hardware
    if not set(attention.FAMILIES) & set(context.model.families):
        return f"known for blocks of {' and '.join(attention.FAMILIES)} encoders; the model has none"
    if context.caches_all_inputs:
        return "no encoder trains: blocks run once per distinct sequence"
    if args.torch_compile:
        return "--torch_compile compiles the whole model"
    if args.activation_checkpointing or args.gradient_checkpointing:
        return "activation checkpointing recomputes whole blocks, which torch does not compile around attention"
    if args.attention == "faesm":
        return "faesm's attention is not compiled"
    if hardware.kind == "cuda" and (hardware.compute_capability or (0, 0)) < MIN_CAPABILITY:
        return f"{hardware.name} is older than Triton's 7.0"
    if hardware.kind not in ("cuda", "rocm", "cpu"):
        return f"no compiler for {hardware.name}"
    return None


def compile_blocks(model: nn.Module, **options: Any) -> int:
    """Compiles every encoder block of `model` in place; returns how many. `options` go to `torch.compile`."""
    blocks = find_blocks(model)
    for block in blocks:
        block.compile(**options)
    return len(blocks)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """ESM layers and T5 blocks."""
    return [module for module in model.modules() if isinstance(module, EsmLayer | T5Block)]


def apply(decision: Decision, run: Run) -> Decision:
    """Compiles, and runs one training pass to know that it works; otherwise leaves the blocks as they were."""
    before = len(get_compilation_metrics())
    count = compile_blocks(run.model, dynamic=decision.settings["dynamic"])
    try:
        _train_once(run)
    except Exception as error:
        # Whatever a compiler backend raises, training goes on with what worked before it.
        for block in find_blocks(run.model):
            block._compiled_call_impl = None
        reason = f"compilation failed: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        return Decision(NAME, KIND, "skipped", reason)
    run.measure_at_end(NAME, lambda: count_graphs(before))
    return decision.with_evidence(blocks=count, **count_graphs(before))


def _train_once(run: Run) -> None:
    """Forward and backward through each encoder on real rows; leaves gradients and random state as they were."""
    with torch.random.fork_rng():
        for probe in parity.find_probes(run):
            device = probe.input_ids.device.type
            with torch.autocast(device, probe.autocast, enabled=probe.autocast is not None):
                states = probe.encoder(input_ids=probe.input_ids, attention_mask=probe.attention_mask)
            if states.last_hidden_state.requires_grad:
                states.last_hidden_state.float().sum().backward()
            probe.encoder.zero_grad(set_to_none=True)


def count_graphs(before: int = 0) -> dict[str, float]:
    """Graphs compiled since `before` (a length of torch's list), how many of them again, and the seconds spent."""
    metrics = get_compilation_metrics()[before:]
    again = sum(metric.recompile_reason is not None for metric in metrics)
    seconds = sum(metric.duration_us or 0 for metric in metrics) / 1e6
    return {"graphs": len(metrics), "recompilations": again, "compile_s": round(seconds, 1)}
