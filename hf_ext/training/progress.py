"""What a run says of its speed and its memory while it trains: how fast it is, what is off, what a step takes."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from html import escape
from typing import Any

import torch
from transformers import TrainerCallback

from ..data.random_states import kept_random_states
from ..memory.forecast import model_on_batch
from ..memory.report import MemoryReport, format_memory, format_savings, report_run
from ..models.activation_checkpointing import is_recomputed
from ..models.host_optimizer import HostTimes, find_host_optimizer
from ..optional import import_problem
from ..reporting import units
from ..reporting.progress import LiveProgress, describe_speed
from ..reporting.shortfall import Shortfall, SpeedFacts, encoder_width, find_shortfall
from ..reporting.throughput import WARMUP_STEPS, peak_bytes
from ..speedups.base import optimizer_name
from ..speedups.sample import longest_rows

REFRESH_S = 5.0
LINE_S = 60.0  # between lines of their own
JUDGED_STEPS = 10  # after the warm-up, before anything is said to be too slow
SAMPLES = 12  # of how busy the card is; one per refresh
LARGEST_SHARE = 0.1  # of the time of a step, above which leaving the optimizer on the card is worth a thought

logger = logging.getLogger(__name__)


class SpeedLine(TrainerCallback):
    """Says on the main process how fast the last steps were, how long is left, and what is off.

    In the progress bar, above a notebook's table, or on lines of its own where there is neither. First with the first
    logged loss or after a few seconds, then again every few. Nothing is synchronised for it.
    Cost: one look at the clock per step, and a few milliseconds per refresh.

    Args:
        trainer: whose `throughput` measures the steps.
        clock: seconds that only grow.
    """

    def __init__(self, trainer: Any, clock: Callable[[], float] = time.monotonic):
        self._trainer, self._clock = trainer, clock
        self._due, self._is_shown = math.inf, False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Starts afresh."""
        self._width, self._is_shown = encoder_width(model), False
        self._said: set[str] = set()
        self._gpu_use: deque[float] = deque(maxlen=SAMPLES)
        self._first_judged = state.global_step + self._trainer.throughput.warmup_steps + JUDGED_STEPS
        self._due = self._clock() + REFRESH_S if state.is_world_process_zero else math.inf

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Shows it for the first time."""
        if not self._is_shown and state.is_world_process_zero and "loss" in (logs or {}):
            self._refresh(args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Shows it again, when it is time."""
        if self._clock() >= self._due:
            self._refresh(args, state)

    def _refresh(self, args: Any, state: Any) -> None:
        numbers = self._trainer.throughput.live(args, state)
        if not numbers:  # still warming up
            return
        shortfall = self._judge(args, numbers) if state.global_step >= self._first_judged else None
        text, causes = describe_speed(numbers, shortfall), shortfall.names if shortfall else ""
        callbacks = self._trainer.callback_handler.callbacks
        bars = [callback for callback in callbacks if isinstance(callback, LiveProgress)]
        tables = [c.training_tracker for c in callbacks if getattr(c, "training_tracker", None) is not None]
        self._due, self._is_shown = self._clock() + (REFRESH_S if bars or tables else LINE_S), True
        for bar in bars:
            bar.show_speed(numbers, causes, args, state)
        for table in tables:
            table.prefix = f"{escape(text)}<br>"  # Trainer's table shows it with its next step
        if not (bars or tables) or (bars and causes and causes not in self._said):  # a bar has no room for the sentence
            self._said.add(causes)
            logger.info("Speed: %s", text)

    def _judge(self, args: Any, numbers: dict[str, float]) -> Shortfall | None:
        use = gpu_use(args.device)
        if use is not None:
            self._gpu_use.append(use)
        mean_use = sum(self._gpu_use) / len(self._gpu_use) if self._gpu_use else None
        return find_shortfall(SpeedFacts(self._trainer.throughput.device, numbers, self._width, mean_use))


def gpu_use(device: torch.device) -> float | None:
    """Share of the last moment in which a CUDA device computed anything, by NVML; None where that is not there."""
    if device.type != "cuda" or import_problem("pynvml") is not None:
        return None
    import pynvml

    try:
        return torch.cuda.utilization(device) / 100
    except (RuntimeError, pynvml.NVMLError):  # no driver library, or a device that does not tell (MIG)
        return None


class MemoryWatch(TrainerCallback):
    """Predicts the fullest moment of a step on a card, before the first, and measures the run's.

    `plan.json` holds both, as `facts.memory`. In runs that use speed-ups: there the answer counts, and a tenth of a
    second per switch does not. On a CPU the doctor has it.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._report: MemoryReport | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Says what a step will take, and whether it fits."""
        planned = self._trainer._ext_planned
        is_asked = planned.keeps_records and planned.plan.hardware.kind == "cuda"
        self._report = self._predict(args, given["model"], given.get("train_dataloader")) if is_asked else None
        if self._report is None:
            return
        planned.plan.facts["memory"] = self._report.to_dict()
        planned.save()
        if state.is_world_process_zero:
            say = logger.info if self._report.fits else logger.warning
            say("%s", "\n".join([*format_memory(self._report), format_savings(self._report)]))

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Puts what was measured, the peak of torch's allocator, beside what was predicted."""
        if self._report is None:
            return
        planned, measured = self._trainer._ext_planned, peak_bytes(args.device)
        planned.plan.facts["memory"]["measured_peak_bytes"] = measured
        planned.save()
        if state.is_world_process_zero:
            predicted = units.memory(self._report.forecast.peak)
            logger.info("memory: %s at the fullest moment, %s predicted", units.memory(measured), predicted)

    def _predict(self, args: Any, model: Any, loader: Any) -> MemoryReport | None:
        """The report; None where the model or its rows do not lend themselves to it."""
        plan, rows = self._trainer.plan, args.train_batch_size
        dataset, collator = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
        if collator is None or not hasattr(dataset, "__len__") or self._trainer._ext_backend.is_spread:
            return None
        try:
            with kept_random_states(dataset, collator):
                batch = copy.copy(collator)(longest_rows(dataset, collator, args.length_column_name, rows))
            memory, length = model_on_batch(model, dict(batch))
            has_recomputing = any(is_recomputed(part) for part in model.modules())
            passes, optimizer = args.gradient_accumulation_steps, optimizer_name(args)
            gib = plan.hardware.memory_gib
            capacity = None if gib is None else round(gib * 2**30)
            given = {"policy": None if has_recomputing else "none", "passes": passes, "optimizer": optimizer}
            return report_run(memory, args, plan, rows, length, capacity, **given)
        except Exception:  # a user's model, on tensors without values; training goes on as it would have
            logger.debug("no prediction of memory", exc_info=True)
            return None


class HostSteps(TrainerCallback):
    """Measures a `HostOptimizer`, keeps in the plan what its steps take, and warns once where that is much.

    The first steps do not count: memory is pinned in them. The time of a step is that of its passes and of the
    optimizer, without waiting for rows.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts afresh."""
        self._num_seen, self._seconds, self._before = 0, 0.0, HostTimes()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An accumulation cycle begins."""
        self._began_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Adds the step, and judges after as many as are enough."""
        found = find_host_optimizer(optimizer)
        if found is None:
            return
        self._num_seen += 1
        if self._num_seen <= WARMUP_STEPS:
            self._before = replace(found.times)
            return
        self._seconds += time.perf_counter() - self._began_s
        took = self._measure(found)
        is_due = self._num_seen == WARMUP_STEPS + JUDGED_STEPS and state.is_world_process_zero
        if is_due and took["share_of_step"] > LARGEST_SHARE:
            logger.warning(
                "Steps in host memory take %.0f %% of the time of a step (copies %.3g s, %s %.3g s). More rows in "
                "a step hide them (--gradient_accumulation_steps, --per_device_train_batch_size), and more threads "
                "shorten them (OMP_NUM_THREADS); where the card has room for the states, leave out --optim_ext "
                "cpu_offload.",
                100 * took["share_of_step"],
                took["copy_s"],
                type(found.wrapped).__name__,
                took["host_step_s"],
            )

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Writes down what was measured."""
        found = find_host_optimizer(optimizer)
        if found is not None:
            took = self._measure(found) if self._num_seen > WARMUP_STEPS else {}
            rounded = {name: float(f"{value:.3g}") for name, value in took.items()}
            self._trainer._ext_planned.record("cpu_offload", device_bytes_saved=found.state_bytes(), **rounded)

    def _measure(self, optimizer: Any) -> dict[str, float]:
        """Seconds of a step that copies and the optimizer take, in the mean, and their share of it."""
        last, first = optimizer.times, self._before
        num = max(1, last.num_steps - first.num_steps)  # a loss scale may have left some out
        copies, steps = (last.copy_s - first.copy_s) / num, (last.step_s - first.step_s) / num
        share = (copies + steps) * (self._num_seen - WARMUP_STEPS) / self._seconds
        return {"copy_s": copies, "host_step_s": steps, "share_of_step": share}
