"""Effective batch size and the learning rate that goes with it.

Class L: more rows per step means fewer, less noisy steps, and another learning rate. So it happens only when named:
`--effective_batch_size`, `--lr_scaling`, or a preset's `cached_batch_size` for heads that train from cached embeddings
(printed as such; `--per_device_train_batch_size` overrides it).
Source of the scaling rules: Goyal et al., arXiv:1706.02677 (linear); Malladi et al., arXiv:2205.10287 (square root, for
Adam).
"""

from __future__ import annotations

from .base import Context, Decision, Kind, Run, off

NAME = "batch_size"
KIND: Kind = "L"
MIN_STEPS_PER_EPOCH = 64


def decide(context: Context) -> Decision:
    """Works out batch, accumulation and learning rate; refuses sizes that do not divide."""
    args, world = context.args, context.world_size
    if NAME in (args.without or []):
        return off(NAME, KIND)
    per_device = args.per_device_train_batch_size
    if args.effective_batch_size:
        return _accumulate(context, args.effective_batch_size, per_device * world)
    chosen_by_hand = any(map(context.user_set, ("per_device_train_batch_size", "gradient_accumulation_steps")))
    if args.cached_batch_size and not chosen_by_hand and context.caches_all_inputs and context.data.num_rows:
        batch = cached_batch_size(context.data.num_rows, args.cached_batch_size)
        settings: dict[str, float] = {"per_device_train_batch_size": max(1, batch // world)}
        settings["gradient_accumulation_steps"] = 1
        settings |= _scaled_rate(context, batch / (per_device * world * args.gradient_accumulation_steps))
        steps = context.data.num_rows // batch
        reason = f"{batch} rows per step, {steps} steps an epoch: the head trains on cached embeddings"
        return Decision(NAME, KIND, "applied", reason, settings)
    if args.lr_scaling != "none":
        reason = "--lr_scaling has no batch size to follow: give --effective_batch_size, or leave it out"
        return Decision(NAME, KIND, "refused", reason)
    if NAME in (args.speedups or []):
        return Decision(NAME, KIND, "skipped", "give --effective_batch_size, or --cached_batch_size with cached inputs")
    return off(NAME, KIND)


def cached_batch_size(num_rows: int, largest: int) -> int:
    """Largest power of two, at most `largest`, that leaves `MIN_STEPS_PER_EPOCH` steps per epoch; at least 8."""
    batch = 8
    while batch * 2 <= largest and num_rows // (batch * 2) >= MIN_STEPS_PER_EPOCH:
        batch *= 2
    return batch


def _accumulate(context: Context, effective: int, per_step: int) -> Decision:
    if effective % per_step:
        near = max(per_step, round(effective / per_step) * per_step)
        reason = f"--effective_batch_size {effective} is not a multiple of {per_step} rows per pass: use {near}"
        return Decision(NAME, KIND, "refused", reason)
    steps = effective // per_step
    asked = context.args.gradient_accumulation_steps
    if context.user_set("gradient_accumulation_steps") and asked != steps:
        reason = f"--effective_batch_size {effective} is {steps} passes of {per_step} rows, but {asked} are asked for"
        return Decision(NAME, KIND, "refused", f"{reason}: leave --gradient_accumulation_steps out")
    settings = {"gradient_accumulation_steps": steps, **_scaled_rate(context, steps)}
    return Decision(NAME, KIND, "applied", f"{effective} rows per optimizer step in {steps} passes", settings)


def _scaled_rate(context: Context, factor: float) -> dict[str, float]:
    scaling = context.args.lr_scaling
    if scaling == "none":
        return {}
    return {"learning_rate": context.args.learning_rate * (factor if scaling == "linear" else factor**0.5)}


def apply(decision: Decision, run: Run) -> Decision:
    """Sets Trainer's own fields."""
    for name, value in decision.settings.items():
        setattr(run.args, name, value)
    return decision
