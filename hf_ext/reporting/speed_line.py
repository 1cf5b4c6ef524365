"""What a run says of its speed while it trains: how fast it is, against what, what is off, which operations take it."""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from torch.profiler import profile, schedule
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import ArgumentError
from ..files import Json, describe_failure, replacing
from ..text import LiveProgress, describe_training, find_shortfall
from .record import Throughput
from .run_files import read_record
from .throughput import COLUMNS, FILE_NAME, ThroughputCallback

REFRESH_S = 5.0
LINE_S = 60.0  # between lines of their own
QUIET_STEPS = 10  # after the warm-up, before anything is said to be too slow
PROFILED = range(10, 14)  # steps since the start: kernels are loaded and compiled by then
TRACE = "profile_trace.json.gz"
MAX_TRACE_BYTES = 2**26  # packed; viewers take no more either
NUM_OPERATIONS = 10
COMPARED_BATCHES = 500  # that are measured before a run in progress is held against a baseline

logger = logging.getLogger(__name__)


def read_baseline(given: str | None) -> dict[str, float]:
    """Reads what a speed is held against, by its name: `batches_per_s`, or `rows_per_s` of the run in a folder.

    Raises:
        ArgumentError: neither a number above 0 nor the folder of a run that measured steps.
    """
    if given is None:
        return {}
    record = read_record(Throughput, Path(given) / FILE_NAME)
    try:
        rate = float(record.rates["sequences_per_s"] if record else given)
    except (KeyError, ValueError):
        rate = 0.0
    if 0 < rate < math.inf:
        return {"rows_per_s" if record else "batches_per_s": rate}
    raise ArgumentError(
        f"--baseline_rate {given}: give batches per second, such as 1.59, or the folder of a run that measured steps "
        f"after its warm-up (as {FILE_NAME} there says)."
    )


class SpeedLine(TrainerCallback):
    """Says on the main process how training goes: loss, rates of the last steps, time left, and what is off.

    Behind the progress bar, above a notebook's table, or once a minute on lines of its own where there is neither.
    Nothing is synchronised for it. Cost: one look at the clock per step, and a few milliseconds per refresh.
    To the final metrics it adds, of all sessions and without their warm-ups, `train_batches_per_s` (passes of one
    process) and `train_rows_per_s` (of all), and with `--baseline_rate` the factor, `train_speed_vs_baseline`.

    Args:
        throughput: measures the steps. list_callbacks: all of the trainer, among them bars and tables.
        clock: seconds that only grow.
    """

    name = "speed"

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
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Starts afresh."""
        self._passes = args.gradient_accumulation_steps
        self._baseline = read_baseline(getattr(args, "baseline_rate", None))
        self.load(None)
        self._logs = {}
        self._is_shown = False
        self._said: set[str] = set()
        self._first_said = state.global_step + self._throughput.warmup_steps + QUIET_STEPS
        self._due = self._clock() + REFRESH_S if state.is_world_process_zero else math.inf

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: object
    ) -> None:
        """Shows each loss behind a bar, in lines the first; adds to the final metrics, of all processes alike."""
        if "train_loss" in (logs or {}):
            logs |= {f"train_{name}": value for name, value in self._compare(1).items()}
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
        text = describe_training({**self._logs, **self._compare(COMPARED_BATCHES), **rates}, args, state)
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

    def _compare(self, least: int) -> Json:
        """Returns how fast the run was, once `least` batches are measured; the first time it says so in the log."""
        batches, rows, seconds = self._measure()
        if batches < least:
            return {}
        speeds = {"batches_per_s": batches / seconds, "rows_per_s": rows / seconds}
        for name, rate in self._baseline.items():
            speeds["speed_vs_baseline"] = speeds[name] / rate
            if name not in self._said:
                self._said.add(name)
                text = f"{speeds['speed_vs_baseline']:.2f}x the baseline's {rate:.3g} {name.replace('_per_', '/')}"
                logger.info("%s batches of %.3g rows: %s.", f"{batches:,.0f}", rows / batches, text)
        return speeds

    def _measure(self) -> np.ndarray:
        """Sums passes of this process, rows of all, and seconds over all sessions, without their warm-ups."""
        sums = self._throughput.measure()
        return self._before + np.array([sums[0] * self._passes, sums[COLUMNS.index("sequences")], sums[1]])

    def state(self) -> Json:
        """Returns what a checkpoint keeps, JSON-able."""
        return {"measured": self._measure().tolist()}

    def load(self, tree: Json | None) -> None:
        """Goes on from the `state` of a checkpoint; None where it does not say."""
        self._before = np.array(tree["measured"] if tree else [0.0, 0.0, 0.0])


class StepProfiler(TrainerCallback):
    """Runs a few steps under `torch.profiler` where `args.profile` says so: a trace, and a table in the log.

    Steps 10 to 13 since the start, on the main process; a run that continues is profiled again, and its trace takes the
    place of the one before. No rate has these steps, nor the one before them, in which the profiler warms up; what
    training computes and draws is the same. An evaluation or a save between them is in trace and table.
    Cost: these steps take longer, and writing takes some seconds.

    Args:
        throughput: leaves these steps out, on all processes.
    """

    def __init__(self, throughput: ThroughputCallback):
        self._throughput = throughput
        self._profiler: Any = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Says so where there are too few steps to come."""
        self._begun = state.global_step
        num_left = state.max_steps - state.global_step
        self._is_on = args.profile and num_left >= PROFILED[-1]
        if args.profile and not self._is_on and state.is_world_process_zero:
            which = f"steps {PROFILED[0]} to {PROFILED[-1]} since the start"
            logger.warning("--profile: nothing is profiled. It takes %s, and there are %d.", which, num_left)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Begins, goes on or ends."""
        if not self._is_on:
            return
        step = state.global_step - self._begun
        if step == PROFILED[0] - 2:
            self._throughput.leave_out(len(PROFILED) + 1, args)
            if state.is_world_process_zero:
                self._profiler = profile(schedule=schedule(wait=0, warmup=1, active=len(PROFILED), repeat=1))
                self._profiler.start()
        elif self._profiler is not None:
            self._profiler.step()
            if step == PROFILED[-1]:
                self._finish(args)

    def leave(self) -> None:
        """Ends a profile that the end of training cut short; nothing is written."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
            logger.warning("--profile: training ended within the profiled steps, so nothing is written.")

    def _finish(self, args: Any) -> None:
        profiler = self._profiler
        self._profiler = None
        profiler.stop()
        kind = "device" if args.device.type == "cuda" else "cpu"
        table = profiler.key_averages().table(f"self_{kind}_time_total", row_limit=NUM_OPERATIONS)
        place = self._write(profiler, args)
        logger.info("Profiled steps %d to %d since the start; %s.\n%s", PROFILED[0], PROFILED[-1], place, table)
        self._throughput.resume()

    def _write(self, profiler: profile, args: Any) -> str:
        """Writes the trace, whole or not at all; returns what became of it."""
        if args.save_total_size_gb is not None:
            return "no trace: --save_total_size_gb has no room set aside for it"
        path = Path(args.output_dir) / TRACE
        try:
            with tempfile.TemporaryDirectory() as folder:
                packed = Path(folder) / TRACE
                profiler.export_chrome_trace(str(packed))
                num_bytes = packed.stat().st_size
                if num_bytes > MAX_TRACE_BYTES:
                    return f"no trace: it takes {num_bytes:,} bytes, more than {MAX_TRACE_BYTES:,}"
                with replacing(path) as draft:
                    shutil.copyfile(packed, draft)
        except OSError as error:  # a full disk must not cost the run
            return f"no trace: {describe_failure(error, path)}"
        return f"{path} ({num_bytes:,} bytes) opens in ui.perfetto.dev"
