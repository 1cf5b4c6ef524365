"""The most rows that fit into memory at a time, found by trying; the optimizer step keeps its rows.

Class I. Effect (`--find_batch_size`): before training, forward and backward run on the longest rows of the training
data with 1 row on a device, then with more, up to the rows of an optimizer step, by its divisors, beside as many bytes
as the optimizer and the exchange of gradients will take. The most that fits becomes the batch, and accumulation makes
up the rest: rows per step, learning rate and schedule stay as they were asked for. Every try is printed; what a failed
one held is freed; all processes try the same and take what fits on each. Nothing else is changed: weights, gradients
and random numbers are afterwards as before.
What was found is kept beside the embedding cache for this model, data, device and settings, and tried once more,
alone, by the next run: it is checked, not trusted.
Hardware: any. On CPUs an allocation seldom fails, so there it ends at the whole step.
Cost: about twice the time of the largest batch; once it is known, one try.
Source: icefall PR #343 (longest batches first). accelerate's `find_executable_batch_size` multiplies by 0.9, changes
the rows of a step, begins anew with trained weights and lets each process decide for itself.
"""

from __future__ import annotations

from dataclasses import replace

from ..zero import splits_weights
from .base import Context, Decision, Kind, Run, off

NAME = "find_batch_size"
KIND: Kind = "I"


def decide(context: Context) -> Decision:
    """On request, where rows are numbered and no process needs another one within a pass."""
    args = context.args
    if not args.find_batch_size or NAME in (args.without or []):
        return off(NAME, KIND)
    problem = _find_problem(context)
    if problem:
        return Decision(NAME, KIND, "refused", f"--find_batch_size: {problem}")
    return Decision(NAME, KIND, "applied", "the most rows at a time that fit, of those of an optimizer step")


def _find_problem(context: Context) -> str | None:
    args = context.args
    if args.auto_find_batch_size:
        return "--auto_find_batch_size finds another one, and changes the rows of a step: leave it out"
    if context.data.streaming:
        return "a stream does not tell its longest rows: give --per_device_train_batch_size"
    if args.max_tokens_per_batch:
        return "--max_tokens_per_batch says how much at a time: leave one of them out"
    if args.fsdp or splits_weights(args) or args.deepspeed_plugin is not None:
        return "weights are split over processes: give --per_device_train_batch_size"
    return context.replicas


def apply(decision: Decision, run: Run) -> Decision:
    """Changes nothing: `hf_ext/training/batch_finder.py` does it when training begins, and sets Trainer's fields.

    Refused where the loss compares the rows of a batch; of class L where it is the user's own, which may be a mean.
    """
    if getattr(getattr(run.model, "config", None), "loss", None) == "ranking":
        reason = "--find_batch_size: --loss ranking compares the rows of a batch, so other batches learn something else"
        return replace(decision, status="refused", reason=f"{reason}: give --per_device_train_batch_size")
    if run.own_loss is not None:
        reason = f"{decision.reason}; the loss is {run.own_loss}, of which a mean changes a little with the batch"
        return replace(decision, kind="L", reason=reason)
    return decision
