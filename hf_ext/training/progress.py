"""What a run says of its speed while it trains: how fast it is, what is off, what the host takes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from html import escape
from typing import Any

from transformers import TrainerCallback

from ..models.host_optimizer import HostTimes, find_host_optimizer
from ..reporting.progress import LiveProgress, describe_speed
from ..reporting.shortfall import SpeedFacts, encoder_width, find_shortfall
from ..reporting.throughput import WARMUP_STEPS

REFRESH_S = 5.0
LINE_S = 60.0  # between lines of their own
JUDGED_STEPS = 10  # after the warm-up, before anything is said to be too slow
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
        facts = SpeedFacts(self._trainer.throughput.device, numbers, self._width)
        shortfall = find_shortfall(facts) if state.global_step >= self._first_judged else None
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


class HostSteps(TrainerCallback):
    """Measures a `HostOptimizer`: keeps in the plan what its steps take, and warns at the end where that is much.

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
        """Adds the step."""
        self._num_seen += 1
        if self._num_seen > WARMUP_STEPS:
            self._seconds += time.perf_counter() - self._began_s
        elif (found := find_host_optimizer(optimizer)) is not None:
            self._before = replace(found.times)

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Writes down what was measured."""
        found = find_host_optimizer(optimizer)
        if found is None:
            return
        took: dict[str, float] = {}
        last, first = found.times, self._before
        num = last.num_steps - first.num_steps  # a loss scale may have left some out
        if num and self._seconds:
            copy_s, step_s = (last.copy_s - first.copy_s) / num, (last.step_s - first.step_s) / num
            share = (copy_s + step_s) * (self._num_seen - WARMUP_STEPS) / self._seconds
            took = {"copy_s": copy_s, "host_step_s": step_s, "share_of_step": share}
        rounded = {name: float(f"{value:.3g}") for name, value in took.items()}
        self._trainer._ext_planned.record("cpu_offload", device_bytes_saved=found.state_bytes(), **rounded)
        if state.is_world_process_zero and took.get("share_of_step", 0.0) > LARGEST_SHARE:
            logger.warning(
                "Steps in host memory took %.0f %% of the time of a step. More rows in a step hide them "
                "(--gradient_accumulation_steps, --per_device_train_batch_size), and more threads shorten them "
                "(OMP_NUM_THREADS); where the card has room for the states, leave out --optim_ext cpu_offload.",
                100 * took["share_of_step"],
            )
