"""What a run says of its speed while it trains: how fast it is, what is off, what the host holds."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..text import LiveProgress, describe_training, find_shortfall
from .throughput import ThroughputCallback

REFRESH_S = 5.0
LINE_S = 60.0  # between lines of their own
QUIET_STEPS = 10  # after the warm-up, before anything is said to be too slow

logger = logging.getLogger(__name__)


class SpeedLine(TrainerCallback):
    """Says on the main process how training goes: loss, rates of the last steps, time left, and what is off.

    Behind the progress bar, above a notebook's table, or once a minute on lines of its own where there is neither.
    Nothing is synchronised for it. Cost: one look at the clock per step, and a few milliseconds per refresh.

    Args:
        throughput: measures the steps. list_callbacks: all of the trainer, among them bars and tables.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        throughput: ThroughputCallback,
        list_callbacks: Callable[[], Sequence[TrainerCallback]],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._throughput = throughput
        self._list_callbacks = list_callbacks
        self._clock = clock
        self._due = math.inf
        self._logs: dict[str, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: object
    ) -> None:
        """Starts afresh."""
        self._logs = {}
        self._is_shown = False
        self._said: set[str] = set()
        self._first_said = state.global_step + self._throughput.warmup_steps + QUIET_STEPS
        self._due = self._clock() + REFRESH_S if state.is_world_process_zero else math.inf

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: object
    ) -> None:
        """Shows each loss behind a bar, in lines the first."""
        if state.is_world_process_zero and "loss" in (logs or {}):
            self._logs = dict(logs)
            self._refresh(args, state, is_due=not self._is_shown)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Shows it again, when it is time."""
        if self._clock() >= self._due:
            self._refresh(args, state)

    def _refresh(self, args: TrainingArguments, state: TrainerState, is_due: bool = True) -> None:
        callbacks = self._list_callbacks()
        rates = self._throughput.live(args, state)
        text = describe_training({**self._logs, **rates}, args, state)
        bars = [callback for callback in callbacks if isinstance(callback, LiveProgress) and callback.has_bar]
        trackers = [getattr(callback, "training_tracker", None) for callback in callbacks]
        tables = [tracker for tracker in trackers if tracker is not None]
        for bar in bars:
            bar.show(text)
        if not rates:  # still warming up
            return
        for table in tables:
            table.prefix = f"{escape(text)}<br>"  # Trainer's table shows it with its next step
        shortfall = ""
        if state.global_step >= self._first_said:
            shortfall = find_shortfall(rates)
        if not (bars or tables) and is_due:
            why = f"; {shortfall}" if shortfall else ""
            logger.info("Step %s of %s: %s%s", f"{state.global_step:,}", f"{state.max_steps:,}", text, why)
        elif bars and shortfall and (kind := shortfall.partition("%")[2]) not in self._said:
            self._said.add(kind)  # once, whatever the share is: a bar has no room for a sentence
            logger.info("Slow: %s", shortfall)
        if is_due:
            self._due = self._clock() + (REFRESH_S if bars or tables else LINE_S)
            self._is_shown = True
