"""What a run says of its speed while it trains: how fast it is, what is off, what the host holds."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from html import escape
from typing import Any

from transformers import TrainerCallback

from ..models.host_optimizer import find_host_optimizer
from ..reporting.progress import LiveProgress, describe_speed
from ..reporting.shortfall import SpeedFacts, encoder_width, find_shortfall

REFRESH_S = 5.0
LINE_S = 60.0  # between lines of their own
JUDGED_STEPS = 10  # after the warm-up, before anything is said to be too slow

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
    """Keeps in the plan what a `HostOptimizer` has saved: bytes of states that the card did not hold."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Writes it down."""
        if (found := find_host_optimizer(optimizer)) is not None:
            self._trainer._ext_planned.record("cpu_offload", device_bytes_saved=found.state_bytes())
