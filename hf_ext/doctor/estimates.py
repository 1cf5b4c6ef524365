"""How long a run would take and what that costs: ranges, each with what it rests on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..hardware import Hardware
from ..plan import Plan
from ..reporting.progress import NARROW_WIDTH, UTILISATION
from ..tasks.sketch import Part, Span, Stage, Step

# Of a rate measured here: backward, optimizer and data cost some; the plan's kernels and packing gain some.
MEASURED_SHARES = (0.5, 1.5)
STEP_SECONDS = (0.003, 0.02)  # Python and launches of one step of Trainer, beside the products
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
    updates: int
    epochs: float
    evaluations: float
    evaluated_share: float
    saves: int


@dataclass(frozen=True)
class Times:
    """(what, from the least to the most seconds) and what they rest on; nothing where `basis` says why not."""

    lines: tuple[tuple[str, Span], ...]
    basis: str

    @property
    def total(self) -> Span | None:
        """Of all lines."""
        if not self.lines:
            return None
        return sum(least for _, (least, _) in self.lines), sum(most for _, (_, most) in self.lines)


def make_schedule(plan: Plan, stage: Stage) -> Schedule | None:
    """From the arguments as the plan will leave them; None where the length of the run is not known."""
    args, num_rows = stage.args, stage.num_rows.get("train", 0)
    changed = plan["batch_size"].settings if plan.applied("batch_size") else {}
    rows = changed.get("per_device_train_batch_size", args.per_device_train_batch_size) * args.world_size
    accumulation = changed.get("gradient_accumulation_steps", args.gradient_accumulation_steps)
    if plan.applied("token_budget") and num_rows:
        rows = max(1.0, args.max_tokens_per_batch * num_rows / stage.num_tokens) * args.world_size
    if args.max_steps > 0:
        updates = args.max_steps
        epochs = updates * rows * accumulation / num_rows if num_rows else 0.0
    elif num_rows and not stage.is_stream:
        epochs = args.num_train_epochs
        updates = math.ceil(epochs * math.ceil(num_rows / (rows * accumulation)))
    else:
        return None
    evaluations = _occasions(args.eval_strategy, args.eval_steps, updates, epochs) / (args.eval_every_epochs or 1)
    wanted, validation = args.eval_subset, stage.num_rows.get("validation", 0)
    share = 1.0 if not wanted or not validation else min(1.0, wanted if wanted <= 1 else wanted / validation)
    saves = math.ceil(_occasions(args.save_strategy, args.save_steps, updates, epochs))
    return Schedule(rows, updates * accumulation, updates, epochs, evaluations, share, saves)


def _occasions(strategy: Any, every: float | None, steps: int, epochs: float) -> float:
    name = getattr(strategy, "value", str(strategy))
    if name == "epoch":
        return max(1.0, epochs)
    if name != "steps" or not every:
        return 1.0 if name == "best" else 0.0
    return 1 / every if every < 1 else steps / every


def estimate_times(
    plan: Plan, stage: Stage, schedule: Schedule | None, hardware: Hardware, measure_seconds: float
) -> Times:
    """Seconds of a stage: encoding once, and training with its evaluations; what comes after training is left out.

    Args:
        measure_seconds: how long to time parts on this machine; 0 takes published peaks.
    """
    if schedule is None or not stage.num_rows:
        return Times((), "without data and a number of epochs or steps, what would pass is not known")
    rates, share = [], measure_seconds / len(stage.parts)
    for part in stage.parts:
        dtype = part_dtype(plan, part)
        published = published_rate(hardware, dtype, part.width)
        rate = measure_rate(part, hardware, dtype, share) if measure_seconds else published
        if rate is None:
            return Times(
                (), f"no {dtype} peak of {hardware.name} is published; --measure_seconds 2 measures this machine"
            )
        rates.append(rate)
    lines = sum_seconds(plan, stage, schedule, rates, waits=hardware.kind != "cpu")
    return Times(tuple(lines), "; ".join(dict.fromkeys(rate.basis for rate in rates)))


def part_dtype(plan: Plan, part: Part) -> str:
    """ "bf16", "fp16", "tf32" or "fp32": what the plan lets this part compute in."""
    if part.dtype is not None:
        return part.dtype
    name, key = ("encoder_precision", "dtype") if part.training == "frozen" else ("precision", "mixed_precision")
    if plan.applied(name):
        return str(plan[name].settings[key])
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


def measure_rate(part: Part, hardware: Hardware, dtype: str, seconds: float) -> Rate:
    """FLOP/s of a part's steps on this machine, in sizes 1, 2, 4, ... as far as the time allows.

    Cost: about twice `seconds`, or two of the smallest steps where these take longer; the memory of a step.
    """
    device = "cuda" if hardware.kind in ("cuda", "rocm") else hardware.kind
    half = torch.autocast(device, dtype=DTYPES[dtype]) if dtype in DTYPES else nullcontext()
    with torch.random.fork_rng(devices=[]), half:
        size, step = 1, part.make_step(device, 1)
        assert step is not None  # there is a smallest
        elapsed = time_passes(step, device, 0.0)
        while 4 * elapsed < seconds and (larger := part.make_step(device, 2 * size)):
            size, step = 2 * size, larger
            elapsed = time_passes(step, device, 0.0)
        if elapsed < seconds:
            elapsed = time_passes(step, device, seconds / 2)
    speed, (low, high) = step.flops / elapsed, MEASURED_SHARES
    basis = f"{low:.0%} to {high:.0%} of {speed / 1e9:,.0f} GFLOP/s in {dtype}, measured here on {step.what}"
    return Rate(low * speed, high * speed, f"{basis} (the share is assumed)")


def time_passes(step: Step, device: str, seconds: float) -> float:
    """Seconds of a step, after one to warm up, on average over so many seconds, at least one."""

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    run: Callable[[], Any] = step.run
    run()
    passes, start, elapsed = 0, now(), 0.0
    while passes == 0 or elapsed < seconds:
        run()
        passes, elapsed = passes + 1, now() - start
    return elapsed / passes


def sum_seconds(
    plan: Plan, stage: Stage, schedule: Schedule, rates: list[Rate], waits: bool = True
) -> list[tuple[str, Span]]:
    """Seconds of encoding once and of training with evaluations.

    Args:
        rates: one per part.
        waits: whether kernels that wait for each other cost their time, as on a GPU; a rate measured on a CPU has it.
    """
    padding = 0.0 if plan.applied("packing") else (plan.facts.get("data", {}).get("padding_share_random") or 0.0)
    once, training = [0.0, 0.0], [0.0, 0.0]
    for part, rate in zip(stage.parts, rates):
        evaluated = schedule.evaluations * schedule.evaluated_share
        passed = part.train_flops * schedule.epochs + part.eval_flops * evaluated
        flops, target = (part.once_flops, once) if part.is_kept(plan) else (passed / (1 - padding), training)
        target[0] += flops / rate.high
        target[1] += flops / rate.low
    steps, head = schedule.steps, stage.head_flops * schedule.epochs
    serial = stage.serial_seconds if waits else (0.0, 0.0)
    training[0] += head / max(rate.high for rate in rates) + steps * (STEP_SECONDS[0] + serial[0])
    training[1] += head / min(rate.low for rate in rates) + steps * (STEP_SECONDS[1] + serial[1])
    num_once = sum(part.num_distinct for part in stage.parts if part.is_kept(plan))
    lines = [(f"encoding {num_once:,} distinct inputs once", (once[0], once[1]))] if num_once else []
    return [*lines, (f"training, {steps:,} passes", (training[0], training[1]))]


def money(seconds: Span | None, dollars_per_hour: float | None) -> Span | None:
    """Hours times the price, or None where either is not known."""
    if seconds is None or dollars_per_hour is None:
        return None
    return seconds[0] / 3600 * dollars_per_hour, seconds[1] / 3600 * dollars_per_hour
