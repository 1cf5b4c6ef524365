"""The live line on speed: in the progress bar, above a notebook's, or on lines of its own where there is neither."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import torch
from transformers import TrainerCallback

from ..hardware import detect_hardware
from ..optional import import_problem
from ..reporting.progress import LiveProgress, describe_speed
from ..reporting.rates import find_baseline
from ..reporting.shortfall import Shortfall, SpeedFacts, encoder_width, find_shortfall
from ..reporting.throughput import ThroughputCallback
from ..speedups.compile import count_graphs
from ..training_args import FastTrainingArguments
from .planned import PlannedRun

REFRESH_S = 5.0
LINE_S = 60.0  # between lines of their own
JUDGED_STEPS = 10  # after the warm-up, before anything is said to be too slow
SAMPLES = 12  # of how busy the card is; one per refresh

logger = logging.getLogger(__name__)


class SpeedLine(TrainerCallback):
    """Says on the main process how fast the last steps were, against which baseline, how long is left, and what is off.

    First with the first logged loss or after a few seconds, then again every few. Nothing is synchronised for it.
    Cost: one look at the clock per step, and a few milliseconds per refresh.

    Args:
        args: of the run.
        throughput: which measures the steps.
        planned: says what is compiled.
        clock: seconds that only grow.
        read_gpu_use: share of the time in which a device is busy; None where nobody can tell.

    Raises:
        ArgumentError: as `find_baseline`, before anything long begins.
    """

    def __init__(
        self,
        args: FastTrainingArguments,
        throughput: ThroughputCallback,
        planned: PlannedRun,
        clock: Callable[[], float] = time.monotonic,
        read_gpu_use: Callable[[torch.device], float | None] | None = None,
    ):
        find_baseline(args, detect_hardware(args.device).name)
        self._args, self._throughput, self._planned, self._clock = args, throughput, planned, clock
        self._read_gpu_use = read_gpu_use or gpu_use
        self._callbacks: Sequence[Any] = ()
        self._forget()

    def _forget(self) -> None:
        self._due, self._is_shown, self._first_judged = math.inf, False, 0
        self._said: set[str] = set()
        self._gpu_use: deque[float] = deque(maxlen=SAMPLES)
        self._graphs: tuple[float, Callable[[], dict[str, float]]] | None = None

    def shown_by(self, callbacks: Sequence[Any]) -> None:
        """Says which callbacks there are; a bar among them, Trainer's table in a notebook too, shows the line."""
        self._callbacks = callbacks

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts afresh: rates are those of this process."""
        self._forget()
        self._width = encoder_width(self._throughput.model)
        self._first_judged = state.global_step + self._args.throughput_warmup_steps + JUDGED_STEPS
        if state.is_world_process_zero:
            self._due = self._clock() + REFRESH_S

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Shows it for the first time."""
        if not self._is_shown and state.is_world_process_zero and "loss" in (logs or {}):
            self._refresh(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Shows it again, when it is time."""
        if self._clock() >= self._due:
            self._refresh(state)

    def _refresh(self, state: Any) -> None:
        numbers = self._throughput.live(self._args, state)
        if not numbers:  # still warming up
            return
        shortfall = self._judge(numbers) if state.global_step >= self._first_judged else None
        bars = [callback for callback in self._callbacks if isinstance(callback, LiveProgress)]
        tables = [c.training_tracker for c in self._callbacks if getattr(c, "training_tracker", None) is not None]
        self._due, self._is_shown = self._clock() + (REFRESH_S if bars or tables else LINE_S), True
        text = describe_speed(numbers, shortfall)
        for bar in bars:
            bar.show_speed(numbers, shortfall.names if shortfall else "", self._args, state)
        for table in tables:
            table.prefix = f"{escape(text)}<br>"  # Trainer's table shows it with its next step
        if not (bars or tables):
            logger.info("Speed: %s", text)
        elif bars and shortfall and shortfall.names not in self._said:  # a bar has no room for it
            self._said.add(shortfall.names)
            logger.info("Speed: %s", text)

    def _judge(self, numbers: dict[str, float]) -> Shortfall | None:
        device = self._throughput.device
        use = self._read_gpu_use(torch.device(self._args.device))
        if use is not None:
            self._gpu_use.append(use)
        compiling = self._planned.plan["compile"]
        failed = compiling.status == "skipped" and compiling.reason.startswith("compilation failed")
        facts = SpeedFacts(
            device,
            numbers,
            self._width,
            sum(self._gpu_use) / len(self._gpu_use) if self._gpu_use else None,
            self._measure_compiling(),
            compiling.reason if failed else "",
        )
        return find_shortfall(facts)

    def _measure_compiling(self) -> float:
        """Share of the time since the last refresh in which torch compiled."""
        if not (self._planned.applied("compile") or self._args.torch_compile):
            return 0.0
        now, before = self._clock(), self._graphs
        self._graphs = now, count_graphs("graphs", "seconds")
        return 0.0 if before is None or now <= before[0] else before[1]()["seconds"] / (now - before[0])


def gpu_use(device: torch.device) -> float | None:
    """Share of the last moment in which a CUDA device computed anything, by NVML; None where that is not there."""
    if device.type != "cuda" or import_problem("pynvml") is not None:
        return None
    import pynvml

    try:
        return torch.cuda.utilization(device) / 100
    except (RuntimeError, pynvml.NVMLError):  # no driver library, or a device that does not tell (MIG)
        return None
