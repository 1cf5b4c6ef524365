"""Live throughput of any Trainer: real residues per second, padding, waiting, MFU, memory, hours left.

    trainer.add_callback(ThroughputCallback(model, tokenizer))   # transformers.Trainer; FastTrainer brings its own

Evaluation, saving, logging and the first steps (compilation, warm-up) are not part of any rate. Cost: a few
element-wise operations on token ids per batch; the device is waited for where Trainer logs, and at least every 100
steps. Trainer's own `include_num_input_tokens_seen` knows neither residues nor padding, and waits for the device with
each batch. MFU: PaLM, arXiv:2204.02311, appendix B.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate.utils import gather
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from ..files import write_text
from ..hardware import Hardware, detect_hardware
from .batch_counts import COUNTS, BatchCounter

logger = logging.getLogger(__name__)

WARMUP_STEPS = 3  # kernels are loaded and graphs compiled in these; a second shape compiles again
MAX_STEPS_WRITTEN = 5000
READ_EVERY = 100  # steps, where Trainer logs more rarely; early in a run more often
RECENT_S = 30.0  # so many seconds of steps count as now
FILE_NAME = "throughput.json"
TIMES = ("seconds", "data_wait_seconds", "cpu_seconds")
COLUMNS = (*TIMES, *COUNTS)  # of one step


@dataclass(frozen=True)
class Device:
    """What a run computes on: `dtype` is a key of `hardware.peak_tflops`."""

    hardware: Hardware
    dtype: str
    num_processes: int

    def why_no_mfu(self, flops_unknown: str = "") -> str:
        """Why MFU is not given; empty where it is."""
        if self.dtype not in self.hardware.peak_tflops:
            return f"no published {self.dtype} peak for {self.hardware.name}"
        return flops_unknown

    def mfu(self, flops_per_s: float) -> float:
        """Share of the peak of all processes together, where that is known."""
        return flops_per_s / (self.hardware.peak_tflops[self.dtype] * 1e12 * self.num_processes)


class StepTimer:
    """Times the steps of one training loop: of the clock, waiting for data, of the processor.

    A step lasts from the moment the loop was free for it (the end of the step before, or of what came between) to its
    own end. Its first part, up to `begin`, is waiting for data. On CUDA both ends are events in the stream: no step
    waits for the device, and time in which the device was still busy with the step before does not count as waiting.
    Seconds of the processor are those of this process and its threads, without data workers.

    Args:
        device: where training runs.
        clock: seconds that only grow; given in tests. Without it CUDA devices are timed by events, others by
            `time.perf_counter`.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] | None = None) -> None:
        self._uses_events = clock is None and device.type == "cuda"
        self._clock = clock or time.perf_counter
        self._steps: list[tuple[Any, Any, Any, float]] = []
        self._begin: Any = None
        self.resume()

    def resume(self) -> None:
        """Evaluation, saving or logging ends: from here on the loop is waiting for data."""
        self._free, self._cpu = self._mark(), time.process_time()

    def begin(self) -> None:
        """A step's batches are there."""
        self._begin = self._mark()

    def end(self) -> None:
        """The step ends."""
        end, cpu = self._mark(), time.process_time()
        self._steps.append((self._free, self._begin, end, cpu - self._cpu))
        self._free, self._cpu = end, cpu

    def read(self) -> list[tuple[float, float, float]]:
        """`TIMES` of each step since the last call. Waits for the device once."""
        steps, self._steps = self._steps, []
        if self._uses_events and steps:
            steps[-1][2].synchronize()
        return [(self._between(free, end), self._between(free, begin), cpu) for free, begin, end, cpu in steps]

    def _mark(self) -> Any:
        if not self._uses_events:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1000 if self._uses_events else second - first


class ThroughputCallback(TrainerCallback):
    """Adds rates to the Trainer's logs and to the metrics of `train()`; writes `throughput.json` into `output_dir`.

    Numbers are of all processes together; times are their mean, memory is their largest. Logged (since the last log):
    `residues_per_s` (`tokens_per_s` where framing tokens cannot be told), `padded_tokens_per_s`, `sequences_per_s`,
    `padding_share` (of what is computed: none where the model packs), `data_wait_share`, `mfu` (model FLOPs
    utilisation; left out where the peak is not known), `peak_memory_gib` (of the device; on a CPU of the process),
    `hours_left` (with evaluation and saving as they were so far). In the metrics of `train()` the
    same for the whole run, with `train_` in front.

    Args:
        model: the model that trains, unwrapped; None takes the Trainer's.
        tokenizer: tells residues from framing tokens; None takes the Trainer's `processing_class`.
        warmup_steps: first steps that are in no rate; it counts when training begins.
        clock: seconds that only grow; for tests.

    Attributes:
        device: what the run computes on; known once training has begun.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        tokenizer: Any = None,
        warmup_steps: int = WARMUP_STEPS,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.packs = False  # whether the model leaves out the padding of its batches
        self.writes_file = True
        self.warmup_steps = warmup_steps
        self.device: Any = None
        self._clock = clock
        self._counter: Any = None  # but while a run trains
        self._extended: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts afresh: a Trainer that retries with a smaller batch begins again."""
        model: Any = self.model if self.model is not None else kwargs["model"]
        if self._counter is not None:
            self._counter.detach()
        tokenizer, loader = self.tokenizer or kwargs.get("processing_class"), kwargs.get("train_dataloader")
        self.device = Device(detect_hardware(args.device), _compute_dtype(args, model), args.world_size)
        self._warmup_steps = self.warmup_steps
        self._counter = BatchCounter(model, tokenizer if hasattr(tokenizer, "pad_token_id") else None)
        self._timer, self._now = StepTimer(args.device, self._clock), self._clock or time.perf_counter
        self._pending: list[torch.Tensor] = []
        self._num_steps, self._warmup_seconds, self._peak_bytes = 0, 0.0, 0
        self._seconds_before = time.time() - psutil.Process().create_time()
        dataset = getattr(loader, "dataset", None)  # a user's own loader may have none
        self._rows_per_epoch = len(dataset) if dataset is not None and has_length(dataset) else None
        self._steps_per_epoch: float | None = None
        self._window, self._totals = np.zeros(len(COLUMNS)), np.zeros(len(COLUMNS))
        self._last: deque[np.ndarray] = deque(maxlen=MAX_STEPS_WRITTEN)
        self._wall_start = self._now() if self._warmup_steps == 0 else None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._timer.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reads what was measured after 1, 2, 4, 8, ... and every 100 steps: the same ones on all processes."""
        self._timer.end()
        self._pending.append(self._counter.take())
        measured = self._num_steps + len(self._pending) - self._warmup_steps
        if measured > 0 and (measured & (measured - 1) == 0 or measured % READ_EVERY == 0):
            self._read(args)
        if measured == 0:
            self._wall_start = self._now()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.resume()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.resume()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Adds to the logs, unless `extend_logs` did before."""
        if logs is not self._extended and state.log_history:
            state.log_history[-1].update(self.extend_logs(logs, args, state))
        self._extended = None
        self.resume()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes `throughput.json` and stops watching the model."""
        self._steps_per_epoch = state.global_step / state.epoch if state.epoch else None
        if self.writes_file and state.is_world_process_zero:
            path = Path(args.output_dir) / FILE_NAME
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, json.dumps(self.summarize(state.log_history), indent=1) + "\n")
            except OSError as error:  # a full disk must not cost the model that was just trained
                logger.error("%s was not written: %s.", path, error.strerror)
        self._counter.detach()
        self._counter = None

    def see_labels(self, labels: Any) -> None:
        """Labels of the next batch, for Trainers that take them out of what the model is called with."""
        if self._counter is not None:
            self._counter.labels = labels

    def begin_again(self) -> None:
        """Says that the step at hand is computed again from its beginning: what was counted of it is forgotten."""
        if self._counter is not None:
            self._counter.take()

    def resume(self) -> None:
        """Says that evaluation, saving or logging is over and the loop goes on."""
        if self._counter is not None:
            self._timer.resume()

    def extend_logs(self, logs: dict[str, Any], args: Any, state: Any) -> dict[str, float]:
        """Adds this callback's values to a training log or to the final metrics; returns what it added.

        Evaluation's logs stay as they are. All processes must call it, as it gathers from all of them.
        """
        self._extended = logs
        if self._counter is None or not ("loss" in logs or "train_loss" in logs):
            return {}
        self._read(args)
        memory = {"peak_memory_gib": self._peak_bytes / 2**30}
        if "train_loss" in logs:
            rates = {**self._rates(self._totals), "warmup_seconds": self._warmup_seconds, **memory}
            added = {f"train_{name}": value for name, value in rates.items()}
        else:
            added = {**self._rates(self._window), **memory, **self._hours_left(state)}
        self._window = np.zeros(len(COLUMNS))
        added = {name: float(f"{value:.5g}") for name, value in added.items()}
        logs.update(added)
        return added

    def live(self, args: Any, state: Any) -> dict[str, float]:
        """Rates of the last half minute of what was read, for a line that is shown while it trains; {} in the warm-up.

        `batches_per_s` (passes through the model, of one process), `hours_left`, and the rates of the logs. Changes
        nothing, and waits for nothing.
        """
        recent = np.zeros(len(COLUMNS))
        num_recent = 0
        for row in reversed(self._last):
            recent, num_recent = recent + row, num_recent + 1
            if recent[0] >= RECENT_S:
                break
        if recent[0] <= 0:
            return {}
        batches = num_recent * args.gradient_accumulation_steps / recent[0]
        return {"batches_per_s": batches, **self._rates(recent), **self._hours_left(state)}

    def summarize(self, log_history: list[dict[str, Any]]) -> dict[str, Any]:
        """What `throughput.json` holds; `steps` are the last 5,000 measured ones, seconds of this process's loop."""
        counter, steps = self._counter, np.array(self._last).reshape(-1, len(COLUMNS))
        quartiles = np.quantile(steps[:, 0], [0.25, 0.5, 0.75]).tolist() if len(steps) else [None] * 3
        return {
            "format": 1,
            "unit": counter.unit,
            "device": self.device.hardware.name,
            "compute_dtype": self.device.dtype,
            "num_processes": self.device.num_processes,
            "measured_steps": max(self._num_steps - self._warmup_steps, 0),
            "warmup_steps": min(self._num_steps, self._warmup_steps),
            "warmup_seconds": self._warmup_seconds,
            "seconds_before_training": round(self._seconds_before, 3),
            "rows_per_epoch": self._rows_per_epoch,
            "steps_per_epoch": self._steps_per_epoch,
            "rates": self._rates(self._totals),
            "totals": dict(zip(COLUMNS, self._totals.tolist())),
            "step_seconds": dict(zip(("q1", "median", "q3"), quartiles)),
            "peak_memory_gib": self._peak_bytes / 2**30,
            "no_mfu_because": self.device.why_no_mfu(counter.flops_unknown) or None,
            "steps": dict(zip(COLUMNS, steps.T.tolist())),
            "log_history": log_history,
        }

    def _read(self, args: Any) -> None:
        """Moves what was measured since the last call from the device into totals; the one place that waits."""
        times = torch.tensor(self._timer.read(), dtype=torch.float64).reshape(-1, len(TIMES))
        self._peak_bytes = max(self._peak_bytes, peak_bytes(args.device))
        peak = torch.tensor([self._peak_bytes], dtype=torch.float64)
        rows = times.new_zeros(0, len(COLUMNS))
        if self._pending:
            counts = torch.stack([count.to(self._pending[-1].device) for count in self._pending]).cpu().double()
            rows = torch.cat([times, counts], dim=1)
        if args.world_size > 1:
            world = gather(rows.to(args.device)).cpu().reshape(args.world_size, *rows.shape)
            num_times = len(TIMES)
            rows = torch.cat([world[..., :num_times].mean(0), world[..., num_times:].sum(0)], dim=1)
            peak = gather(peak.to(args.device)).cpu().max()
        self._peak_bytes = int(peak)
        self._pending = []
        if self.packs:
            rows[:, COLUMNS.index("padded_tokens")] = rows[:, COLUMNS.index("tokens")]
        for row in rows.numpy():
            self._num_steps += 1
            if self._num_steps <= self._warmup_steps:
                self._warmup_seconds += float(row[0])
            else:
                self._totals += row
                self._window += row
                self._last.append(row)

    def _rates(self, sums: np.ndarray) -> dict[str, float]:
        """Rates per second and shares from sums over steps; empty where no time was measured."""
        unit, of = self._counter.unit, dict(zip(COLUMNS, sums.tolist()))
        seconds = of["seconds"]
        if seconds <= 0:
            return {}
        rates = {f"{unit}_per_s": of[unit] / seconds, "sequences_per_s": of["sequences"] / seconds}
        if of["padded_tokens"] and unit != "sequences":
            rates["padded_tokens_per_s"] = of["padded_tokens"] / seconds
            rates["padding_share"] = 1 - of["tokens"] / of["padded_tokens"]
        rates["data_wait_share"] = of["data_wait_seconds"] / seconds
        if of["flops"] and not self.device.why_no_mfu(self._counter.flops_unknown):
            rates["mfu"] = self.device.mfu(of["flops"] / seconds)
        return rates

    def _hours_left(self, state: Any) -> dict[str, float]:
        measured = self._num_steps + len(self._pending) - self._warmup_steps
        if measured <= 0 or self._wall_start is None:
            return {}
        wall_per_step = (self._now() - self._wall_start) / measured
        return {"hours_left": (state.max_steps - state.global_step) * wall_per_step / 3600}


def _compute_dtype(args: Any, model: nn.Module) -> str:
    """What the matrix products of this run are computed in: a key of `Hardware.peak_tflops`."""
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    largest = max(model.parameters(), key=lambda parameter: parameter.numel()).dtype
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(largest) or ("tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32")


def peak_bytes(device: torch.device) -> int:
    """Most memory that was in use at once: tensors on a CUDA device; elsewhere this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage's maximum would be the parent's, where a larger process started this one
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
