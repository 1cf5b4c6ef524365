"""A few steps of a run under `torch.profiler` (`--torch_profiler`): a trace, and what its operations cost."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import ProfileKwargs
from torch.autograd import DeviceType
from transformers import TrainerCallback

from ..files import describe_failure

TRACE = "profile_trace.json.gz"  # for chrome://tracing and ui.perfetto.dev
NUM_SHOWN = 10
STEP = "hf_ext step"  # the range that marks a step among what was recorded

logger = logging.getLogger(__name__)


class Profiling(TrainerCallback):
    """Profiles `torch_profiler` optimizer steps, once in a session, after those in which kernels are loaded.

    The window begins after the steps that no rate includes and one that only warms the profiler up. It ends before an
    evaluation or a save, with the steps it has, and without any where an exception ends it. All processes count the
    steps, the main one records. Rates leave the window out; Trainer's own `train_runtime` has it. Nothing that training
    computes or draws is changed.
    Cost: steps of the window take longer, which no rate counts, and writing the trace takes seconds.

    Attributes:
        found: `steps` (first and last), `seconds` of each, `operations` (see `costly_operations`), `device`, and
            `trace`, the file's name, or None where it was not written; None before there is a profile.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.found: dict[str, Any] | None = None
        self._window = range(0)  # steps
        self._profiler: Any = None  # on the main process, within the window
        self._recording, self._step = ExitStack(), ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decides which steps; says so where the run has fewer than were asked for."""
        self.found, asked = None, args.torch_profiler or 0
        first = state.global_step + self._trainer.throughput.warmup_steps + 2
        self._window = range(first, min(first + asked, state.max_steps + 1))
        if len(self._window) < asked:
            logger.warning("--torch_profiler %d: after warm-up only %d are left to train.", asked, len(self._window))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step of the window is none of the throughput's, nor is the one before it."""
        step = state.global_step + 1
        if not self._window or not self._window[0] - 1 <= step <= self._window[-1]:
            return
        self._trainer.throughput.leave_out_step()
        if not state.is_world_process_zero:
            return
        if self._profiler is None:
            kinds: list[Any] = ["cpu", *{args.device.type} & {"cuda", "xpu"}]
            self._profiler = self._recording.enter_context(ProfileKwargs(activities=kinds).build())
        if step in self._window:
            self._step.enter_context(torch.profiler.record_function(STEP))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the window after its last step, and where something else than a step comes next."""
        self._step.close()
        step, window = state.global_step, self._window
        is_cut = control.should_evaluate or control.should_save or control.should_training_stop
        if step not in window or not (is_cut or step == window[-1]):
            return
        profiler = self._profiler
        self.leave()
        if profiler is not None:
            self._keep(args, profiler, [window[0], step])
        self._trainer.throughput.resume()

    def leave(self) -> None:
        """Ends a window that is open, and forgets what it recorded: an exception ends the run."""
        self._window, self._profiler = range(0), None
        self._step.close()
        self._recording.close()

    def _keep(self, args: Any, profiler: Any, steps: list[int]) -> None:
        events, folder = profiler.events(), Path(args.output_dir)
        self.found = {
            "steps": steps,
            "seconds": [round(e.time_range.elapsed_us() / 1e6, 6) for e in events if e.name == STEP],
            "device": args.device.type,
            "operations": costly_operations(events),
            "trace": None,
        }
        place = ""
        if args.save_total_size_gb is None:  # which has no room set aside for it
            try:
                folder.mkdir(parents=True, exist_ok=True)
                profiler.export_chrome_trace(str(folder / TRACE))
                self.found["trace"], place = TRACE, f"; {TRACE} in {folder} opens in ui.perfetto.dev"
            except OSError as error:
                logger.warning("%s was not written: %s", TRACE, describe_failure(error, str(folder / TRACE)))
        logger.info("Profiled steps %d to %d%s.", *steps, place)


def costly_operations(events: Iterable[Any]) -> list[dict[str, Any]]:
    """The `NUM_SHOWN` operations with most time of their own, inside the ranges named `STEP`; JSON-able.

    Time on the device where there was any, else on the CPU; what an operation calls counts for that, not for it. What
    is recorded outside the ranges (an evaluation, waiting for rows) does not count.

    Args:
        events: `torch.profiler.profile.events()`; kernels count with the operation that launched them.

    Returns:
        Per operation `name`, `calls`, `self_cpu_ms`, `self_device_ms`, and `share` of the time of all of them.
    """
    found = [event for event in events if event.device_type == DeviceType.CPU]
    steps = [event.time_range for event in found if event.name == STEP]
    sums: dict[str, dict[str, float]] = defaultdict(lambda: {"calls": 0, "self_cpu_ms": 0.0, "self_device_ms": 0.0})
    for event in found:
        inside = any(step.start <= event.time_range.start <= step.end for step in steps)
        if inside and not event.is_user_annotation:
            row = sums[event.name]
            row["calls"] += event.count
            row["self_cpu_ms"] += event.self_cpu_time_total / 1000  # recorded in microseconds
            row["self_device_ms"] += event.self_device_time_total / 1000
    time = "self_device_ms" if any(row["self_device_ms"] for row in sums.values()) else "self_cpu_ms"
    whole = sum(row[time] for row in sums.values()) or math.inf
    ranked = sorted(sums.items(), key=lambda item: -item[1][time])[:NUM_SHOWN]
    return [{"name": name, **row, "share": round(row[time] / whole, 4)} for name, row in ranked]
