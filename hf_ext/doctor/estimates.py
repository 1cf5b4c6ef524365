"""How long a run would take, as a range with what it rests on; and how many bytes, on the device and on disks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .. import speedups
from ..checkpoints import SMALL_FILES_BYTES, Sizes, bound_sizes, export_bytes, needed_bytes, read_policy
from ..hardware import Hardware
from ..memory import MemoryModel, MemoryReport, report_memory
from ..plan import Plan
from ..speedups import best_precision
from ..tasks import Part, Span, Stage, Step

# Share of the published dense peak that whole encoders reach. Assumed but for one point (frozen ESM-2 650M and ESM C
# 300M on an H100: 0.21): wide ones as in PaLM (46 %, arXiv:2204.02311, table 3) down to what plain PyTorch reaches;
# products of width 512 and less do about as many FLOPs per byte as a card's memory can feed (width / 2), so they wait.
UTILISATION = {"wide": (0.15, 0.45), "narrow": (0.03, 0.20)}
NARROW_WIDTH = 512
# Of a rate measured here: backward, optimizer and data cost some; packing gains some. On a CPU four kinds of runs took
# 0.88 to 1.08 times the middle of what was said (benchmarks/README.md, `doctor_times`).
MEASURED_SHARES = {"cpu": (0.7, 1.3)}
ASSUMED_SHARES = (0.5, 1.5)
STEP_SECONDS = {"cpu": (0.001, 0.004)}  # Python of one step of Trainer, beside the products
LAUNCH_SECONDS = (0.003, 0.02)  # with launches of kernels
OTHER_SECONDS = (5.0, 25.0)  # imports, and linear baselines of up to 50,000 rows
SPLIT = "not counted: weights are split over processes"
PASSES = {"frozen": 1, "lora": 2, "full": 3}  # of a row in training, each as costly as forward
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
    kept_epochs: int


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
        least, most = map(sum, zip(*(span for _, span in self.lines)))
        return least, most


def make_schedule(plan: Plan, stage: Stage) -> Schedule | None:
    """Makes a schedule from the arguments as the plan will leave them.

    None where the length of the run is not known.
    """
    args = stage.args
    num_rows = stage.num_rows.get("train", 0)
    costs = plan.count_costs(args)
    accumulation = costs.passes
    rows: float = costs.rows * args.world_size
    if costs.max_tokens is not None and num_rows:
        rows = max(1.0, costs.max_tokens * num_rows / stage.num_tokens) * args.world_size
    if args.max_steps > 0:
        updates = args.max_steps
        epochs = updates * rows * accumulation / num_rows if num_rows else 0.0
    elif num_rows and not stage.lengths.is_stream:
        epochs = args.num_train_epochs
        updates = math.ceil(epochs * math.ceil(num_rows / (rows * accumulation)))
    else:
        return None
    evaluations = _occasions(args.eval_strategy, args.eval_steps, updates, epochs) / (args.eval_every_epochs or 1)
    wanted = args.eval_subset or 1.0
    share = wanted if wanted <= 1 else min(1.0, wanted / (stage.num_rows.get("validation") or wanted))
    kept = int(epochs / args.keep_every_epochs) if args.keep_every_epochs else 0
    saves = math.ceil(_occasions(args.save_strategy, args.save_steps, updates, epochs)) + kept
    return Schedule(rows, updates * accumulation, updates, epochs, evaluations, share, saves, kept)


def _occasions(strategy: Any, every: float | None, steps: int, epochs: float) -> float:
    name = getattr(strategy, "value", str(strategy))
    if name == "epoch":
        return max(1.0, epochs)
    if name != "steps" or not every:
        return 1.0 if name == "best" else 0.0
    return 1 / every if every < 1 else steps / every


def estimate_times(
    plan: Plan,
    stage: Stage,
    schedule: Schedule | None,
    hardware: Hardware,
    measure_seconds: float,
    read_seconds: float | None,
) -> Times:
    """Estimates seconds of a stage: encoding once, training with its evaluations, and reading and scoring rows.

    Args:
        measure_seconds: how long to time parts on this machine; 0 takes published peaks.
        read_seconds: what reading the rows took here; None where the stage reads and scores none of its own.
    """
    if schedule is None or not stage.num_rows:
        return Times((), "without data and a number of epochs or steps, what would pass is not known")
    rates = []
    costs = plan.count_costs(stage.args)
    share = measure_seconds / len(stage.parts)
    for part in stage.parts:
        half = costs.frozen_dtype if part.training == "frozen" else costs.trained_dtype
        dtype = part.dtype or half or costs.float32
        published = published_rate(hardware, dtype, part.width)
        rate = measure_rate(part, hardware, dtype, share, plan.speed_up) if measure_seconds else published
        if rate is None:
            return Times(
                (), f"no {dtype} peak of {hardware.name} is published; --measure_seconds 2 measures this machine"
            )
        rates.append(rate)
    lines = sum_seconds(plan, stage, schedule, rates)
    if read_seconds is not None:
        scored = [(part.flops * part.num_scored, rate) for part, rate in zip(stage.parts, rates)]
        least = OTHER_SECONDS[0] + read_seconds + sum(flops / rate.high for flops, rate in scored)
        most = OTHER_SECONDS[1] + 1.3 * read_seconds + sum(flops / rate.low for flops, rate in scored)
        lines.append(("starting, rows and scores", (least * stage.num_runs, most * stage.num_runs)))
    return Times(tuple(lines), "; ".join(dict.fromkeys(rate.basis for rate in rates)))


def published_rate(hardware: Hardware, dtype: str, width: int) -> Rate | None:
    """Reads the published rate from the hardware table; None where it has no peak for this precision."""
    peak = hardware.peak_tflops.get(dtype)
    if peak is None:
        return None
    low, high = UTILISATION["narrow" if width <= NARROW_WIDTH else "wide"]
    basis = (
        f"{low:.0%} to {high:.0%} of {hardware.name}'s {peak:g} TFLOP/s in {dtype} (published; the share is assumed)"
    )
    return Rate(low * peak * 1e12, high * peak * 1e12, basis)


def measure_rate(
    part: Part, hardware: Hardware, dtype: str, seconds: float, change: Callable[[nn.Module], None]
) -> Rate:
    """Measures FLOP/s of a part's steps on this machine, of 1, 2, 4, ... inputs as far as the time allows.

    Args:
        change: what the plan does to a model.

    Cost: about twice `seconds`, or two of the smallest steps where these take longer; the memory of a step.
    """
    device = "cuda" if hardware.kind in ("cuda", "rocm") else hardware.kind
    half = torch.autocast(device, dtype=DTYPES[dtype]) if dtype in DTYPES else nullcontext()
    with torch.random.fork_rng(devices=[]), half:
        num = 1
        step = part.make_step(device, 1)
        assert step is not None  # there is a smallest
        while True:
            change(step.model)
            elapsed = time_passes(step, device)
            if 4 * elapsed >= seconds or (larger := part.make_step(device, 2 * num)) is None:
                break
            num = 2 * num
            step = larger
    speed = num * step.share * part.flops * (3 if step.trains else 1) / elapsed
    low, high = MEASURED_SHARES.get(hardware.kind, ASSUMED_SHARES)
    basis = f"{low:.0%} to {high:.0%} of {speed / 1e9:,.0f} GFLOP/s in {dtype} (the share is assumed)"
    return Rate(low * speed, high * speed, f"{basis}, measured here on a batch of {num} for {part.name}")


def time_passes(step: Step, device: str) -> float:
    """Measures seconds of a step, the faster of two: the first warms up."""
    elapsed = []
    for _ in range(2):
        start = time.perf_counter()
        with torch.set_grad_enabled(step.trains):
            output = step.model(**step.batch)
        if step.trains:
            output.loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        elapsed.append(time.perf_counter() - start)
    return min(elapsed)


def row_flops(part: Part, stage: Stage, schedule: Schedule) -> tuple[float, float]:
    """Counts FLOPs for training and evaluation if outputs were not cached."""
    rows = part.flops * part.inputs_per_row if part.is_read_while_training else 0.0
    trained = rows * PASSES[part.training] * stage.num_rows.get("train", 0) * schedule.epochs
    evaluations = schedule.evaluations * schedule.evaluated_share
    return trained, rows * stage.num_rows.get("validation", 0) * evaluations


def sum_seconds(plan: Plan, stage: Stage, schedule: Schedule, rates: list[Rate]) -> list[tuple[str, Span]]:
    """Sums seconds of encoding once and of training with evaluations; `rates` has one per part."""
    padding = plan.facts.get("data", {}).get("padding_share_random") or 0.0
    if not plan.count_costs(stage.args).pads:
        padding = 0.0
    once = [0.0, 0.0]
    training = [0.0, 0.0]
    for part, rate in zip(stage.parts, rates):
        trained, evaluated = (flops / (1 - padding) for flops in row_flops(part, stage, schedule))
        flops, target = (
            (part.flops * part.num_distinct, once) if part.is_kept(plan) else (trained + evaluated, training)
        )
        target[0] += flops / rate.high
        target[1] += flops / rate.low
    steps = schedule.steps
    step_seconds = STEP_SECONDS.get(plan.hardware.kind, LAUNCH_SECONDS)
    head = 6.0 * stage.num_head_parameters * stage.num_rows["train"] * schedule.epochs
    training[0] += head / max(rate.high for rate in rates) + steps * step_seconds[0]
    training[1] += head / min(rate.low for rate in rates) + steps * step_seconds[1]
    num_once = sum(part.num_distinct for part in stage.parts if part.is_kept(plan))
    lines = [(f"encoding {num_once:,} distinct inputs once", (once[0], once[1]))] if num_once else []
    runs = f" in each of {stage.num_runs} runs" if stage.num_runs > 1 else ""
    return [*lines, (f"training, {steps:,} passes{runs}", (training[0] * stage.num_runs, training[1] * stage.num_runs))]


# --- bytes ------------------------------------------------------------------------------------------------------------


def predict_memory(stage: Stage, plan: Plan, rows: int, capacity: int | None) -> MemoryReport | str:
    """Predicts what a step takes on one device; or says why that is not known.

    Args:
        rows: of one pass, of the longest.
        capacity: bytes of the device; None where not known.

    Cost: a tenth of a second for each switch that there is.
    """
    args = stage.args
    if args.world_size > 1 and (args.fsdp or args.deepspeed):
        return SPLIT
    model, make_batch = stage.as_trained(plan)
    costs = plan.count_costs(args)
    if costs.max_tokens is not None:
        rows = max(1, costs.max_tokens // stage.longest)
    memory = MemoryModel(
        model.train(),
        make_batch,
        kind="cpu" if plan.hardware.kind == "cpu" else "cuda",
        change=lambda traced: plan.speed_up_traced(traced, costs),
        sends_gradients=args.world_size > 1,
        has_half=best_precision(plan.hardware) != "fp32",
    )
    offers = [speedup.offer for speedup in speedups.REGISTRY]
    return report_memory(memory, replace(costs, rows=rows), stage.longest, capacity, offers)


def predict_disk(stage: Stage, plan: Plan, schedule: Schedule | None) -> tuple[Sizes, int, int]:
    """Bounds of one checkpoint, of the model that is saved at the end, and of the output folder at its fullest."""
    model, _ = stage.as_trained(plan)
    checkpoint = bound_sizes(model, stage.args, SMALL_FILES_BYTES, plan.count_costs(stage.args).is_muon)
    policy = read_policy(stage.args)
    exported = export_bytes(model) + SMALL_FILES_BYTES
    if schedule is None or schedule.saves == 0:
        return checkpoint, exported, exported
    needed = needed_bytes(checkpoint, policy, exported)
    kept = schedule.saves
    if policy.limit and policy.limit > 0:
        kept = min(kept, policy.limit) + 1 + schedule.kept_epochs
    total = max(needed if schedule.saves > 1 else 0, kept * checkpoint.full_bytes + exported)
    return checkpoint, exported, min(total, policy.budget_bytes) if policy.budget_bytes else total
