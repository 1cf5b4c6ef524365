"""How long a run would take and what that costs: ranges, each with what it rests on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..hardware import Hardware
from ..plan import Plan
from ..reporting.progress import NARROW_WIDTH, UTILISATION
from .work import Encoder, Tokens, Work

# Of a forward rate measured here: backward, optimizer and data cost some; the plan's kernels and packing gain some.
MEASURED_SHARES = (0.5, 1.5)
STEP_SECONDS = (0.003, 0.02)  # Python and launches of one step of Trainer, beside the products


@dataclass(frozen=True)
class Rate:
    """FLOP/s, from the least to the most, and what says so."""

    low: float
    high: float
    basis: str


@dataclass(frozen=True)
class Schedule:
    """How often rows are read: micro-batches and passes over the data, evaluations and checkpoints."""

    batch_rows: float
    steps: int
    epochs: float
    evaluations: float
    evaluated_share: float
    saves: int


def make_schedule(args: Any, plan: Plan, work: Work) -> Schedule | None:
    """From the arguments as the plan will leave them; None where the length of the run is not known."""
    changed = plan["batch_size"].settings if plan.applied("batch_size") else {}
    rows = changed.get("per_device_train_batch_size", args.per_device_train_batch_size) * args.world_size
    accumulation = changed.get("gradient_accumulation_steps", args.gradient_accumulation_steps)
    num_rows = work.num_rows.get("train", 0)
    if plan.applied("token_budget") and num_rows:
        rows = max(1.0, args.max_tokens_per_batch * num_rows / work.num_train_tokens) * args.world_size
    if args.max_steps > 0:
        steps = args.max_steps
        epochs = steps * rows * accumulation / num_rows if num_rows else 0.0
    elif num_rows and not work.is_stream:
        epochs = args.num_train_epochs
        steps = math.ceil(epochs * math.ceil(num_rows / (rows * accumulation)))
    else:
        return None
    evaluations = _occasions(args.eval_strategy, args.eval_steps, steps, epochs) / (args.eval_every_epochs or 1)
    wanted, validation = args.eval_subset, work.num_rows.get("validation", 0)
    share = 1.0 if not wanted or not validation else min(1.0, wanted if wanted <= 1 else wanted / validation)
    saves = math.ceil(_occasions(args.save_strategy, args.save_steps, steps, epochs))
    return Schedule(rows, steps * accumulation, epochs, evaluations, share, saves)


def _occasions(strategy: Any, every: float | None, steps: int, epochs: float) -> float:
    name = getattr(strategy, "value", str(strategy))
    if name == "epoch":
        return max(1.0, epochs)
    if name != "steps" or not every:
        return 1.0 if name == "best" else 0.0
    return 1 / every if every < 1 else steps / every


def encoder_dtype(plan: Plan, encoder: Encoder) -> str:
    """ "bf16", "fp16", "tf32" or "fp32": what the plan lets this encoder compute in."""
    name, key = ("encoder_precision", "dtype") if encoder.training == "frozen" else ("precision", "mixed_precision")
    if plan.applied(name):
        return plan[name].settings[key]
    return "tf32" if plan.applied("tf32") else "fp32"


def published_rate(hardware: Hardware, dtype: str, width: int) -> Rate | None:
    """From the hardware table, or None where it has no peak for this precision."""
    peak = hardware.peak_tflops.get(dtype)
    if peak is None:
        return None
    low, high = UTILISATION["narrow" if width <= NARROW_WIDTH else "wide"]
    basis = (
        f"{low:.0%} to {high:.0%} of {hardware.name}'s {peak:g} TFLOP/s in {dtype} (published; the share is assumed)"
    )
    return Rate(low * peak * 1e12, high * peak * 1e12, basis)


def measured_rate(flops_per_second: float, dtype: str, what: str = "one layer, forward") -> Rate:
    """From `measuring.measure_rate`, or of something else that was measured."""
    low, high = MEASURED_SHARES
    basis = (
        f"{low:.0%} to {high:.0%} of {flops_per_second / 1e9:,.0f} GFLOP/s in {dtype}, measured here on {what} "
        "(the share is assumed)"
    )
    return Rate(low * flops_per_second, high * flops_per_second, basis)


def estimate_seconds(
    plan: Plan, work: Work, schedule: Schedule, rates: list[Rate]
) -> list[tuple[str, tuple[float, float]]]:
    """Seconds of encoding once and of training with evaluations; the scores on the test split at the end are left out.

    Args:
        rates: one per encoder.
    """
    cached = plan.applied("embedding_cache")
    padding = 0.0 if plan.applied("packing") else (plan.facts.get("data", {}).get("padding_share_random") or 0.0)
    once, training, num_once = [0.0, 0.0], [0.0, 0.0], 0
    for encoder, rate in zip(work.encoders, rates):
        if cached and encoder.training == "frozen":
            flops, target = count_flops(encoder.forward_flops, encoder.distinct), once
            num_once += encoder.num_distinct
        else:
            seen = count_flops(encoder.flops, encoder.train) * schedule.epochs
            evaluated = schedule.evaluations * schedule.evaluated_share
            checked = count_flops(encoder.forward_flops, encoder.evaluated) * evaluated
            flops, target = (seen + checked) / (1 - padding), training
        target[0] += flops / rate.high
        target[1] += flops / rate.low
    head = 6.0 * work.num_heads * work.head_parameters * work.num_rows.get("train", 0) * schedule.epochs
    slowest, fastest = min(rate.low for rate in rates), max(rate.high for rate in rates)
    steps = schedule.steps * work.num_heads
    training[0] += head / fastest + steps * STEP_SECONDS[0]
    training[1] += head / slowest + steps * STEP_SECONDS[1]
    lines = [(f"encoding {num_once:,} distinct inputs once", (once[0], once[1]))] if num_once else []
    return [*lines, (f"training, {steps:,} passes", (training[0], training[1]))]


def count_flops(coefficients: tuple[float, float], tokens: Tokens) -> float:
    """FLOPs of these tokens, from FLOPs per token, and per token and token attended to."""
    return coefficients[0] * tokens.total + coefficients[1] * tokens.squares


def money(seconds: tuple[float, float] | None, dollars_per_hour: float | None) -> tuple[float, float] | None:
    """Hours times the price, or None where either is not known."""
    if seconds is None or dollars_per_hour is None:
        return None
    return seconds[0] / 3600 * dollars_per_hour, seconds[1] / 3600 * dollars_per_hour
