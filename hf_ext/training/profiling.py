"""A few steps of a run under `torch.profiler` (`--torch_profiler`): a trace, and what its operations cost."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import ProfileKwargs
from transformers import TrainerCallback

from ..disk import describe_failure
from ..reporting.operations import STEP, costly_operations
from ..whole_files import replacing

TRACE = "profile_trace.json.gz"  # for chrome://tracing and ui.perfetto.dev

logger = logging.getLogger(__name__)


class Profiling(TrainerCallback):
    """Profiles `torch_profiler` optimizer steps, once in a run, after those in which kernels are loaded.

    The window begins after the steps that no rate includes and one that only warms the profiler up. It ends before an
    evaluation or a save, with the steps it has, and without any where an exception ends it; the next session then
    profiles. All processes count the steps, the main one records. Rates leave the window out; Trainer's own
    `train_runtime` has it. Nothing that training computes or draws is changed.
    Cost: steps of the window take longer, which no rate counts, and writing the trace takes seconds.

    Attributes:
        found: `steps` (first and last), `seconds` of each, `operations` (see `costly_operations`), `device`, and
            `trace`, the file's name, or None where it was not written; None before there is a profile. In checkpoints.
    """

    name = "torch_profiler"

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.found: dict[str, Any] | None = None
        self._window = range(0)  # steps
        self._seen: list[int] = []
        self._profiler: Any = None  # on the main process, within the window
        self._range: Any = None  # that of the step at hand

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint."""
        return self.found

    def load(self, tree: dict[str, Any] | None) -> None:
        """A run that goes on has its profile already; None where it has none."""
        self.found = tree
        if tree is not None:
            self._window = range(0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decides which steps; says so where the run has fewer than were asked for."""
        self.found, self._seen, asked = None, [], args.torch_profiler or 0
        first = state.global_step + self._trainer.throughput.warmup_steps + 2
        self._window = range(first, min(first + asked, state.max_steps + 1))
        if len(self._window) < asked:
            few = f"{len(self._window)} of them are profiled" if self._window else "none is profiled"
            logger.warning("--torch_profiler %d: after warm-up too few steps are left to train, so %s.", asked, few)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step of the window is none of the throughput's, nor is the one before it."""
        step = state.global_step + 1
        if not self._window or not self._window[0] - 1 <= step <= self._window[-1]:
            return
        self._trainer.throughput.leave_out_step()
        if self._profiler is None and state.is_world_process_zero:
            kind = torch.device(args.device).type
            activities: list[Any] = ["cpu", *([kind] if kind in ("cuda", "xpu") else [])]
            self._profiler = ProfileKwargs(activities=activities).build()
            self._profiler.start()
        if step in self._window:
            self._seen.append(step)
            if self._profiler is not None:
                self._range = torch.profiler.record_function(STEP)
                self._range.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the window after its last step, and where something else than a step comes next."""
        self._end_range()
        is_cut = control.should_evaluate or control.should_save or control.should_training_stop
        if not self._seen or not self._window or not (is_cut or state.global_step == self._window[-1]):
            return
        self._window = range(0)
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            self._keep(args, profiler)
        self._trainer.throughput.resume()

    def leave(self) -> None:
        """Ends a window that is open, and forgets what it recorded: an exception ends the run."""
        self._window = range(0)
        self._end_range()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _keep(self, args: Any, profiler: Any) -> None:
        events, trace = profiler.events(), None
        path = Path(str(args.output_dir)) / TRACE
        if args.save_total_size_gb is None:  # which has no room set aside for it
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory() as folder, replacing(path) as draft:
                    profiler.export_chrome_trace(f"{folder}/{TRACE}")  # packs what ends in .gz
                    shutil.copyfile(f"{folder}/{TRACE}", draft)
                trace = TRACE
            except OSError as error:
                logger.warning("%s was not written: %s", TRACE, describe_failure(error, str(path)))
        self.found = {
            "steps": [self._seen[0], self._seen[-1]],
            "seconds": [round(e.time_range.elapsed_us() / 1e6, 6) for e in events if e.name == STEP],
            "device": torch.device(args.device).type,
            "operations": costly_operations(events),
            "trace": trace,
        }
        place = f"; {TRACE} in {args.output_dir} opens in ui.perfetto.dev" if trace else ""
        logger.info("Profiled steps %d to %d%s.", self._seen[0], self._seen[-1], place)
