"""A step for which memory does not suffice is made again, one rung lower, and the run goes on.

Class I. Effect (`--oom_policy step_down`): where forward or backward is out of memory, all micro-batches of that
optimizer step are computed again from the same weights, rows and random numbers, in parts of half as many rows; then
of a quarter, down to one; then with activations recomputed, all but those of attention (`activation_checkpointing`).
Losses are sums over the items of the step, so parts add up to the same gradient; the learning rate, the schedule and
the order of rows do not change. Where a loss is not such a sum (the user's own, a ranking), batches stay whole and
only activations are recomputed; a model that normalises over batches has no rungs. Evaluations go on in parts. An
optimizer step that did not fit and had changed nothing is tried again with memory freed; a save likewise. The run says
so, its checkpoints hold the rung, and a continued run begins on it. What would change numbers or learning (8-bit
states, quantised or frozen weights) is named in the error, never taken.
Hardware: any. Several processes take the same rung together; a process that fails during DistributedDataParallel's
exchange would leave the others waiting, so gradients are then averaged after the backward pass. Weights that are split
over processes are gathered within forward and backward, where nobody can leave the others: refused (FSDP, ZeRO).
Cost: random states kept once per optimizer step (about 20 microseconds); on several processes an exchange that no
longer overlaps with the backward pass, so it is taken there only when asked for by name.
Source: metaseq #314 and OpenNMT-py #1385 skip such a step, accelerate's `find_executable_batch_size` begins anew.
"""

from __future__ import annotations

from ..zero import splits_weights
from .base import Context, Decision, Kind, Run, off

NAME = "oom_ladder"
KIND: Kind = "I"


def decide(context: Context) -> Decision:
    """On request; not where weights are split over processes, and on several processes only by the user's own word."""
    args = context.args
    if args.oom_policy != "step_down" or NAME in (args.without or []):
        return off(NAME, KIND)
    asked = context.user_set("oom_policy") or NAME in (args.speedups or [])
    problem = _find_problem(context)
    if problem is None and context.world_size > 1 and not asked:
        problem = "several processes: gradients would be averaged after the backward pass; add --oom_policy step_down"
        return Decision(NAME, KIND, "skipped", problem)
    if problem:
        return Decision(NAME, KIND, "refused" if asked else "skipped", problem)
    return Decision(NAME, KIND, "applied", "a step that does not fit is made again with fewer rows at a time")


def _find_problem(context: Context) -> str | None:
    args = context.args
    if args.auto_find_batch_size:
        return "--auto_find_batch_size begins training anew where memory does not suffice: leave it out"
    if args.fsdp or splits_weights(args) or args.deepspeed_plugin is not None:
        return "weights are split over processes, which wait for each other within a step: take fewer rows at a time"
    return context.replicas


def apply(decision: Decision, run: Run) -> Decision:
    """Changes nothing: `hf_ext/training/ladder.py` carries it out while training."""
    return decision
