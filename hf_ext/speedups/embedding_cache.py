"""Embed once: the output of a frozen encoder is computed once per distinct sequence, ever, and read from then on.

Class I. Effect: an epoch of head training reads rows of a table instead of running encoders; a second run with the same
encoder, tokenizer, pooling and precision encodes nothing.
Cost: width x 4 bytes of disk per distinct sequence, and the encoding itself, once.
Conflicts: encoders that train (LoRA, full) change every step and are never cached; streams are not known in advance.
"""

from __future__ import annotations

from .base import Context, Decision, Kind, Run, off

NAME = "embedding_cache"
KIND: Kind = "I"
CPU_TOKENS_PER_BATCH = 2048  # larger batches leave the CPU's caches: measured 1.7x slower at 26,000 tokens
GPU_TOKENS_PER_BATCH = 65536  # halves itself where it does not fit


def decide(context: Context) -> Decision:
    """Applies to the frozen inputs of a model with an `encode` method, on data that can be read twice."""
    if not context.wants(NAME, KIND):
        return off(NAME, KIND)
    frozen = list(context.model.frozen_inputs)
    if not frozen:
        return Decision(NAME, KIND, "skipped", "no frozen encoder")
    if context.data.streaming:
        return Decision(NAME, KIND, "skipped", "a stream's sequences are not known in advance")
    tokens = CPU_TOKENS_PER_BATCH if context.hardware.kind == "cpu" else GPU_TOKENS_PER_BATCH
    settings = {"inputs": frozen, "tokens_per_batch": tokens, "cache_dir": context.args.embedding_cache_dir}
    distinct = context.data.distinct_inputs
    counts = [f"{distinct[name]:,} {name}" for name in frozen if name in distinct]
    reason = f"frozen: {', '.join(counts or frozen)}" + (" distinct" if counts else "")
    return Decision(NAME, KIND, "applied", reason, settings)


def apply(decision: Decision, run: Run) -> Decision:
    """Nothing yet: `Embedder` encodes when a dataset is first used."""
    return decision
