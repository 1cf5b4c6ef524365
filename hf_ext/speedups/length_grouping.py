"""Batches of similar length, so that little of a batch is padding.

Class I in expectation: each epoch still sees every row once, in random order of batches; which rows share a batch is
correlated with length. That is not always harmless: a small causal model that learns to copy rows of 3 to 8 words
(`recipes/examples/causal_lm.py`) learned less in as many steps, since each of its batches had one length. Effect: on
proteins of 30 to 1024 residues, random batches are about 58 % padding, grouped ones 3 %. Not needed where sequences
are packed, or where all inputs come from the embedding cache.
"""

from __future__ import annotations

from . import packing
from .base import Context, Decision, Kind, Run, off

NAME = "length_grouping"
KIND: Kind = "I"


def decide(context: Context) -> Decision:
    """On where an encoder runs on batches whose padding is worth removing."""
    if context.user_set("train_sampling_strategy"):
        asked = context.args.train_sampling_strategy
        return Decision(NAME, KIND, "skipped", f"--train_sampling_strategy {asked} was asked for")
    if not context.wants(NAME, KIND):
        return off(NAME, KIND)
    if context.args.max_tokens_per_batch is not None and "token_budget" not in (context.args.without or []):
        return Decision(NAME, KIND, "skipped", "--max_tokens_per_batch sorts rows into batches itself")
    if context.data.streaming:
        return Decision(NAME, KIND, "skipped", "a stream's lengths are not known in advance")
    if context.caches_all_inputs:
        return Decision(NAME, KIND, "skipped", "no encoder runs while training: nothing is padded")
    if not context.data.has_lengths:
        column = context.args.length_column_name
        reason = (
            f"the dataset has no column '{column}' (--length_column_name); rows of one size, as images are, need none"
        )
        return Decision(NAME, KIND, "skipped", reason)
    if context.low_padding:
        return Decision(NAME, KIND, "skipped", context.low_padding)
    all_packed = set(context.model.families) <= set(packing.FAMILIES)
    if all_packed and packing.decide(context).status == "applied":
        return Decision(NAME, KIND, "skipped", "packed batches have no padding: rows stay in random order")
    padding = context.data.padding_share_random
    evidence = {} if padding is None else {"padding_share_random": round(padding, 4)}
    return Decision(NAME, KIND, "applied", "groups rows of similar length", {"strategy": "group_by_length"}, evidence)


def apply(decision: Decision, run: Run) -> Decision:
    """Sets Trainer's own sampler."""
    run.args.train_sampling_strategy = decision.settings["strategy"]
    return decision
