"""Fused AdamW: one kernel per parameter group instead of several per parameter.

Class I. Effect: the same update in fewer passes over memory. Trainer's own default since transformers 4.5x, on GPU and
CPU alike; the entry makes it visible and names what replaced it.
"""

from __future__ import annotations

from .base import Context, Decision, Kind, Run, off

NAME = "fused_optimizer"
KIND: Kind = "I"


def decide(context: Context) -> Decision:
    """On unless the user named another optimizer."""
    optimizer = str(getattr(context.args.optim, "value", context.args.optim))
    if optimizer != "adamw_torch_fused" and context.user_set("optim"):
        return Decision(NAME, KIND, "skipped", f"--optim {optimizer} was asked for")
    if not context.wants(NAME, KIND):
        return off(NAME, KIND)
    return Decision(NAME, KIND, "applied", "fused AdamW is Trainer's default", {"optim": "adamw_torch_fused"})


def apply(decision: Decision, run: Run) -> Decision:
    """Sets Trainer's own field."""
    from transformers.training_args import OptimizerNames

    run.args.optim = OptimizerNames(decision.settings["optim"])
    return decision
