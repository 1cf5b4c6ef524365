"""Rows of a step, the learning rates that follow them, and tokens of a pass."""

from __future__ import annotations

import copy
from dataclasses import replace

from .base import Context, Costs, Decision, Settings, Speedup, applied, are_weights_split, off, refused
from .trainer_fields import SetsFields

MIN_STEPS_PER_EPOCH = 64


class BatchSize(SetsFields):
    """Effective batch size; the learning rate stays as given, but for `--lr_scaling`.

    Class L: more rows per step means fewer, less noisy steps, which want another learning rate. So it happens only when
    named: `--effective_batch_size`, or a preset's `cached_batch_size` for heads that train from cached embeddings
    (printed as such; `--per_device_train_batch_size` overrides it).

    Rows per step = rows per device x processes x passes, exactly, whatever the number of processes: so the steps of an
    epoch, their rows and the learning rate stay as they are when a run moves from one card to eight and back. Rows per
    device are the user's, else the most that divide, up to the default's or the preset's. With `--max_tokens_per_batch`
    rows per step vary.
    """

    NAME = "batch_size"
    KIND = "L"

    def decide(self, context: Context) -> Decision:
        """Works out batch and accumulation; refuses sizes that do not divide."""
        args = context.args
        world = context.world_size
        if self.left_out(context):
            return off()
        if args.effective_batch_size:
            return _accumulate(context, args.effective_batch_size)
        chosen_by_hand = any(map(context.user_set, ("per_device_train_batch_size", "gradient_accumulation_steps")))
        if args.cached_batch_size and not chosen_by_hand and context.caches_all_inputs and context.data.num_rows:
            each = max(1, cached_batch_size(context.data.num_rows, args.cached_batch_size) // world)
            batch = each * world  # less than that where the processes do not divide it
            settings = {"per_device_train_batch_size": each, "gradient_accumulation_steps": 1}
            steps = context.data.num_rows // batch
            reason = f"{batch} rows per step, {steps} steps an epoch: the head trains on cached embeddings"
            return applied(reason, settings)
        return context.unasked(self.NAME, "give --effective_batch_size, or --cached_batch_size with cached inputs")

    def count(self, costs: Costs, settings: Settings) -> Costs:
        """Sets rows and passes of a step."""
        rows = settings.get("per_device_train_batch_size", costs.rows)
        return replace(costs, rows=rows, passes=settings["gradient_accumulation_steps"])


def cached_batch_size(num_rows: int, largest: int) -> int:
    """Chooses the largest power of two, at most `largest`, that leaves `MIN_STEPS_PER_EPOCH` steps per epoch.

    At least 8.
    """
    batch = 8
    while batch * 2 <= largest and num_rows // (batch * 2) >= MIN_STEPS_PER_EPOCH:
        batch *= 2
    return batch


def nearest_multiples(value: int, unit: int) -> str:
    """Names the multiples of `unit` around `value`."""
    below = value // unit * unit
    above = -(-value // unit) * unit
    return " or ".join(str(near) for near in dict.fromkeys((below, above)) if near)


def _accumulate(context: Context, effective: int) -> Decision:
    args = context.args
    asked = f"--effective_batch_size {effective}"
    if args.accelerator_config.split_batches and context.world_size > 1:
        return refused(f"{asked}: Accelerate's split_batches divides batches among processes already; leave it out")
    devices = context.world_size * max(1, args.n_gpu)
    rows = args.per_device_train_batch_size
    passes = args.gradient_accumulation_steps
    has_rows, has_passes = map(context.user_set, ("per_device_train_batch_size", "gradient_accumulation_steps"))
    unit = devices
    if has_rows:
        unit *= rows
    if has_passes:
        unit *= passes
    if effective % unit:
        given = ", ".join(
            [f"{devices} process{'es' if devices > 1 else ''}"]
            + [f"--per_device_train_batch_size {rows}"] * has_rows
            + [f"--gradient_accumulation_steps {passes}"] * has_passes
        )
        return refused(f"{asked} is not a multiple of {unit} ({given}): use {nearest_multiples(effective, unit)}")
    each = effective // devices
    if has_rows:
        num_rows = rows
    elif has_passes:
        num_rows = each // passes
    else:
        largest = args.cached_batch_size if args.cached_batch_size and context.caches_all_inputs else rows
        num_rows = next(number for number in range(min(largest, each), 0, -1) if each % number == 0)
    num_passes = each // num_rows
    if has_rows and has_passes and num_passes != passes:
        why = f"{asked} is {num_passes} passes of {devices * rows} rows, but {passes} are asked for"
        return refused(f"{why}: leave --gradient_accumulation_steps out")
    settings = {"gradient_accumulation_steps": num_passes}
    if num_rows != rows:
        settings["per_device_train_batch_size"] = num_rows
    reason = f"{effective} rows per optimizer step: {num_rows} x {devices} device{'s' if devices > 1 else ''}"
    how = f"{num_passes} pass{'es' if num_passes > 1 else ''}"
    return applied(f"{reason} x {how}", settings)


class LrScaling(SetsFields):
    """Learning rates that follow the rows of an optimizer step: `--lr_scaling` with `--lr_base_batch_size`.

    Class L. All rates, encoders' too, are multiplied once by rows / base, or by its root, before warm-up and schedule;
    rows are those of all processes and passes. A continued run computes the same from the same command, and is compared
    by the rates that come out.
    Conflicts: steps of no fixed number of rows; optimizers with a rate of their own.
    Source: Goyal et al., arXiv:1706.02677 (linear); Malladi et al., arXiv:2205.10287 (the square root, for Adam).
    """

    NAME = "lr_scaling"
    KIND = "L"

    def decide(self, context: Context) -> Decision:
        """Works out the rates; refuses what leaves rows or rates open."""
        args = context.args
        if args.lr_scaling is None:
            return context.unasked(self.NAME, "give --lr_scaling and --lr_base_batch_size")
        problem = ""
        if self.left_out(context):
            problem = "--without lr_scaling leaves it out: take one of them"
        elif args.max_tokens_per_batch is not None or args.auto_find_batch_size:
            problem = "rows per step vary with --max_tokens_per_batch and --auto_find_batch_size: leave it out"
        elif args.deepspeed_plugin is not None and "optimizer" in args.deepspeed_plugin.deepspeed_config:
            problem = "the DeepSpeed JSON has an optimizer with a rate of its own: take that out of it"
        if problem:
            return refused(f"--lr_scaling {args.lr_scaling}: {problem}")
        planned = copy.copy(args)
        vars(planned).update(BatchSize().decide(context).settings)
        num_loaders = 1 if args.accelerator_config.split_batches else context.world_size
        rows = planned.train_batch_size * planned.gradient_accumulation_steps * num_loaders
        factor = rows / args.lr_base_batch_size
        if args.lr_scaling == "sqrt":
            factor **= 0.5
        names = ["learning_rate"] if args.encoder_learning_rate is None else ["learning_rate", "encoder_learning_rate"]
        rates = {name: getattr(args, name) * factor for name in names}
        words = ", ".join(f"{name} {getattr(args, name):g} x {factor:.4g} = {rates[name]:.4g}" for name in names)
        return applied(f"{words}: {rows} rows per step over {args.lr_base_batch_size}, {args.lr_scaling}", rates)


class FindBatchSize(Speedup):
    """The most rows of a pass that fit into memory, found before the first step: `--find_batch_size true`.

    Class I: rows per optimizer step stay what they were, `--effective_batch_size` or rows of a pass x passes x
    processes, and only what divides them is tried, up to 128 or what `--per_device_train_batch_size` says.
    Effect: fewer and larger passes. Hardware: any; on a CPU, what is free of the host's memory.
    Cost: one step on the longest rows, which is undone. Source: `hf_ext/training/fitting/finder.py`.
    """

    NAME = "find_batch_size"

    def decide(self, context: Context) -> Decision:
        """Applies where it is asked for; refuses where rows per pass are none of its business, or not known."""
        if not context.args.find_batch_size or self.left_out(context):
            return context.unasked(self.NAME, "give --find_batch_size true")
        args = context.args
        give = "give --per_device_train_batch_size"
        problems = {
            "--auto_find_batch_size changes the rows of a step: leave one out": args.auto_find_batch_size,
            "passes follow --max_tokens_per_batch, not rows: leave one out": args.max_tokens_per_batch,
            f"weights are split over processes (FSDP, DeepSpeed): {give}": are_weights_split(args),
            f"the longest rows of a stream are not known: {give}": context.data.streaming,
            f"no encoder runs while training: {give}": context.caches_all_inputs,
            "Accelerate's split_batches divides batches: leave it out": args.accelerator_config.split_batches,
        }
        problem = next((text for text, holds in problems.items() if holds), context.replicas)
        if problem:
            return refused(f"--find_batch_size: {problem}")
        return applied("the most rows of a pass that fit are looked for before the first step, whose rows stay")


class TokenBudget(Speedup):
    """Batches of as many tokens as the card takes, instead of as many rows: `--max_tokens_per_batch`.

    Class L, because rows per optimizer step vary; the loss stays a mean over all items of the step. Effect: memory is
    bounded by the longest batch instead of the longest row times the batch size, so that short sequences fill the card
    too; on proteins of 30 to 1024 residues 98 % of the computed tokens are real, against 42 % in random batches of
    rows. With packing no padding is computed, and the sum of tokens is what is bounded.
    Cost: tokens of all rows are counted once, about 2 s per million rows and epoch go into planning.
    Source: fairseq's `--max-tokens` (Ott et al., arXiv:1904.01038).
    """

    NAME = "token_budget"
    KIND = "L"
    compared = ("max_tokens", "max_batch_size")

    def decide(self, context: Context) -> Decision:
        """Applies where a budget is given; a budget that cannot be met, or contradicts another request, is refused."""
        args = context.args
        if self.left_out(context):
            return off()
        if args.max_tokens_per_batch is None:
            needs = "it needs a budget: give --max_tokens_per_batch"
            return refused(needs) if context.names(self.NAME) else off()
        problem = _contradiction(context) or _missing_lengths(context)
        if problem:
            return refused(f"--max_tokens_per_batch {args.max_tokens_per_batch}: {problem}")
        rows = args.per_device_train_batch_size if context.user_set("per_device_train_batch_size") else None
        settings = {"max_tokens": args.max_tokens_per_batch, "max_batch_size": rows}
        reason = f"{args.max_tokens_per_batch:,} tokens per device and pass"
        return applied(f"{reason}, at most {rows} rows" if rows else reason, settings)

    def count(self, costs: Costs, settings: Settings) -> Costs:
        """Bounds tokens instead of rows."""
        return replace(costs, max_tokens=settings["max_tokens"])


def _contradiction(context: Context) -> str | None:
    args = context.args
    if context.user_set("train_sampling_strategy"):
        return f"batches follow the budget, not --train_sampling_strategy {args.train_sampling_strategy}: leave one out"
    if args.effective_batch_size:
        return (
            f"rows per step vary, so they cannot be --effective_batch_size {args.effective_batch_size}: leave one out"
        )
    if args.auto_find_batch_size:
        return "--auto_find_batch_size changes rows per batch, not tokens: leave one out"
    if args.dataloader_drop_last:
        return "no batch is left over that --dataloader_drop_last could drop: leave it out"
    if args.accelerator_config.split_batches or args.accelerator_config.dispatch_batches:
        return "Accelerate's split_batches and dispatch_batches need batches of one size: leave them out"
    return None


def _missing_lengths(context: Context) -> str | None:
    if context.data.streaming:
        return "a stream's lengths are not known in advance"
    if context.caches_all_inputs:
        return "no encoder runs while training, so there are no tokens to bound: leave it out"
    if context.data.num_rows is not None and not context.data.has_lengths:
        column = context.args.length_column_name
        return f"the dataset has no column '{column}' with the tokens of each row (--length_column_name)"
    return None
