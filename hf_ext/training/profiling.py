"""A few steps of a run under `torch.profiler` (`--torch_profiler`): a trace, and what its operations cost."""

from __future__ import annotations

import gzip
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
from ..reporting.throughput import ThroughputCallback
from ..training_args import FastTrainingArguments
from ..whole_files import replacing

TRACE = "profile_trace.json.gz"  # for chrome://tracing and ui.perfetto.dev
MAX_TRACE_BYTES = 1 << 28  # as JSON, which packs to a twentieth; viewers take no more either
_SIGN = "hf_ext_profile.json"  # the name inside the packed file, by which a run knows its own

logger = logging.getLogger(__name__)


class Profiling(TrainerCallback):
    """Profiles `torch_profiler` optimizer steps, once in a run, after those in which kernels are loaded.

    The window begins after the steps that no rate includes and one that only warms the profiler up. It ends
    before an evaluation or a save, with the steps it has, and without any where an exception or a stop ends it; the
    next session then profiles. All processes count the steps, the main one records. Rates leave the window out;
    Trainer's own `train_runtime` has it. Nothing that training computes or draws is changed.
    Cost: steps of the window take longer, which no rate counts, and writing the trace takes seconds.

    Args:
        args: of the run.
        throughput: leaves the steps of the window out.

    Attributes:
        found: `steps` (first and last), `seconds` of each, `operations` (see `costly_operations`), `device`, and
            `trace`, the file's name, or None with `why_no_trace`; None before there is a profile. In checkpoints.
    """

    name = "torch_profiler"

    def __init__(self, args: FastTrainingArguments, throughput: ThroughputCallback):
        self._args, self._throughput = args, throughput
        self.found: dict[str, Any] | None = None
        self._forget()

    def _forget(self) -> None:
        self._profiler: Any = None  # on the main process, until the window has ended
        self._range: Any = None  # that of the step at hand
        self._first = self._last = 0  # steps of the window, its warm-up before them
        self._seen: list[int] = []  # steps that were recorded
        self._is_open = False

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint."""
        return self.found

    def load(self, tree: dict[str, Any] | None) -> None:
        """A run that goes on has its profile already; None where it has none, or the checkpoint is older."""
        self.found = tree
        if tree is not None:
            self.leave()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decides which steps; says so where the run has fewer than were asked for."""
        self.leave()
        self.found = None
        asked, warm = self._args.torch_profiler, self._throughput.warmup_steps + 1
        if asked is None:
            return
        left = state.max_steps - state.global_step
        num_steps = min(asked, left - warm)
        if num_steps < asked:
            fewer = f"{num_steps} of them are profiled" if num_steps > 0 else "none is profiled"
            logger.warning(
                "--torch_profiler %d: after %d steps of warm-up the %d that are left to train have too few, so %s.",
                *(asked, warm, left, fewer),
            )
        if num_steps < 1:
            return
        self._first, self._last = state.global_step + warm + 1, state.global_step + warm + num_steps
        self._is_open = True
        if state.is_world_process_zero:
            self._profiler = self._make_profiler(warm - 1, num_steps)
            self._profiler.start()

    def _make_profiler(self, skipped: int, num_steps: int) -> Any:
        kind = torch.device(self._args.device).type
        activities: list[Any] = ["cpu", *([kind] if kind in ("cuda", "xpu") else [])]
        schedule = {"skip_first": skipped, "wait": 0, "warmup": 1, "active": num_steps, "repeat": 1}
        return ProfileKwargs(activities=activities, schedule_option=schedule, on_trace_ready=self._keep).build()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step of the window is none of the throughput's."""
        step = state.global_step + 1
        if not self._is_open or step < self._first - 1:
            return
        self._throughput.leave_out_step()
        if step >= self._first:
            self._seen.append(step)
            if self._profiler is not None:
                self._range = torch.profiler.record_function(STEP)
                self._range.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the window after its last step, and where something else than a step comes next."""
        if not self._is_open:
            return
        self._end_range()
        is_last = state.global_step >= self._last or control.should_training_stop
        is_cut = control.should_evaluate or control.should_save
        if self._seen and (is_last or is_cut):
            self._close()
        elif self._profiler is not None:
            self._profiler.step()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An evaluation that nothing announced."""
        if self._is_open and self._seen:
            self._close()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training ended before the window did."""
        self._close() if self._is_open and self._seen else self.leave()

    def leave(self) -> None:
        """Ends a window that is open, and forgets what it recorded: an exception ends the run."""
        profiler, self._seen = self._profiler, []
        self._end_range()
        self._forget()
        if profiler is not None:
            profiler.stop()

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _close(self) -> None:
        profiler = self._profiler
        if profiler is not None:
            profiler.stop()  # calls `_keep`
        self._forget()
        self._throughput.resume()

    def _keep(self, profiler: Any) -> None:
        if not self._seen:  # left
            return
        events = profiler.events()
        ranges = [event.time_range for event in events if event.name == STEP]
        why = self._write(profiler)
        self.found = {
            "steps": [self._seen[0], self._seen[-1]],
            "seconds": [round(span.elapsed_us() / 1e6, 6) for span in ranges],
            "device": torch.device(self._args.device).type,
            "operations": costly_operations(events),
            "trace": None if why else TRACE,
            "why_no_trace": why,
        }
        place = f"no trace: {why}" if why else f"{TRACE} in {self._args.output_dir} opens in ui.perfetto.dev"
        logger.info("Profiled steps %d to %d; %s.", self._seen[0], self._seen[-1], place)

    def _write(self, profiler: Any) -> str | None:
        """Writes the trace, whole or not at all; why not, where it is not."""
        path = Path(str(self._args.output_dir)) / TRACE
        if self._args.save_total_size_gb is not None:
            return "--save_total_size_gb has no room set aside for it"
        try:
            if path.exists() and not is_own_trace(path):
                return f"{TRACE} is there already, and no run of ours wrote it"
            with tempfile.TemporaryDirectory() as folder:
                plain = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(plain))
                if plain.stat().st_size > MAX_TRACE_BYTES:
                    return f"{plain.stat().st_size >> 20} MiB are too many: profile fewer steps"
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as draft, plain.open("rb") as trace:
                    _pack(trace, draft)
        except OSError as error:
            return describe_failure(error, str(path))
        return None


def _pack(trace: Any, path: Path) -> None:
    with path.open("wb") as file, gzip.GzipFile(_SIGN, "wb", 6, file, mtime=0) as packed:
        shutil.copyfileobj(trace, packed)


def is_own_trace(path: Path) -> bool:
    """Whether `Profiling` wrote a file. Cost: reads its first bytes."""
    with path.open("rb") as file:
        return _SIGN.removesuffix(".json").encode() in file.read(64)
