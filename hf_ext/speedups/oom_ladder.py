"""A step for which memory does not suffice is made again with less at a time, and the run goes on.

Class I. Effect (`--oom_policy step_down`): where forward or backward is out of memory, all micro-batches of that
optimizer step are computed again from the same weights, rows and random numbers, in parts of half as many rows; then
of a quarter, down to one; then with activations recomputed, all but those of attention (`activation_checkpointing`).
Losses are sums over the items of the step, so parts add up to the same gradient; the learning rate, the schedule and
the order of rows do not change. Where a loss is not such a sum (the user's own, a ranking), batches stay whole and
only activations are recomputed; of a model that normalises over batches nothing is made again. The run says so, its
checkpoints hold it, and a continued run begins there. What would change numbers or learning (8-bit states, quantised or
frozen weights) is named in the error, never taken. Evaluations and optimizer steps that do not fit end the run.
Hardware: any; one process. Of several, those that have room would wait for one that begins again: there the run ends
with a message that names a smaller batch, of which `--find_batch_size` finds the largest that fits.
Cost: random states kept once per optimizer step (about 20 microseconds).
Source: metaseq #314 and OpenNMT-py #1385 skip such a step, accelerate's `find_executable_batch_size` begins anew.
"""

from __future__ import annotations

from ..zero import splits_weights
from .base import Context, Decision, Kind, Run, off

NAME = "oom_ladder"
KIND: Kind = "I"


def decide(context: Context) -> Decision:
    """On request, on one process."""
    args = context.args
    if args.oom_policy != "step_down" or NAME in (args.without or []):
        return off(NAME, KIND)
    problem = context.replicas
    if args.auto_find_batch_size:
        problem = "--auto_find_batch_size begins training anew where memory does not suffice: leave it out"
    elif args.fsdp or splits_weights(args) or args.deepspeed_plugin is not None:
        problem = "weights are split over processes, which wait for each other within a step: take fewer rows at a time"
    elif context.world_size > 1:
        problem = "several processes wait for each other within a step: --find_batch_size finds the rows that fit"
    if problem:
        asked = context.user_set("oom_policy") or NAME in (args.speedups or [])
        return Decision(NAME, KIND, "refused" if asked else "skipped", problem)
    return Decision(NAME, KIND, "applied", "a step that does not fit is made again with fewer rows at a time")


def apply(decision: Decision, run: Run) -> Decision:
    """Changes nothing: `hf_ext/training/oom_policy.py` carries it out while training."""
    return decision
