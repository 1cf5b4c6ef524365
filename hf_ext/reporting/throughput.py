"""Live throughput of any Trainer: real residues per second, padding, waiting, MFU, memory, hours left.

    trainer.add_callback(ThroughputCallback(model, tokenizer))   # transformers.Trainer; FastTrainer brings its own

Evaluation, saving, logging and the first steps (compilation, warm-up) are not part of any rate. Cost: a few
element-wise operations on token ids per batch; the device is waited for where Trainer logs. Trainer's own
`include_num_input_tokens_seen` knows neither residues nor padding, and waits for the device with each batch. MFU: PaLM,
arXiv:2204.02311, appendix B.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate.utils import gather
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..files import write_text
from ..hardware import Device, detect_hardware
from .batch_counts import COUNTS, BatchCounter
from .record import Throughput, to_json

logger = logging.getLogger(__name__)

WARMUP_STEPS = 3  # kernels are loaded and graphs compiled in these; a second shape compiles again
FILE_NAME = "throughput.json"
COLUMNS = ("steps", "seconds", "data_wait_seconds", *COUNTS, "gpu_busy", "gpu_samples")


class ThroughputCallback(TrainerCallback):
    """Adds rates to the Trainer's logs and to the metrics of `train()`; writes `throughput.json` into `output_dir`.

    A step lasts from the moment the loop was free for it to its end; until its batches are there, it waits for data.
    Numbers are of all processes together; times are their mean, memory is their largest. Logged (since the last log):
    `residues_per_s` (`tokens_per_s` where framing tokens cannot be told), `padded_tokens_per_s`, `sequences_per_s`,
    `padding_share` (of what is computed: none where the model packs), `data_wait_share`, `mfu` (model FLOPs use, where
    the peak is known), `gpu_utilization` (share of the time in which a kernel ran, by NVML), `peak_memory_gib` (of the
    device; on a CPU of the process), `hours_left` (with evaluation and saving as they were). In the metrics of
    `train()` the same for the whole run, with `train_` in front.

    Args:
        model: that trains, unwrapped. tokenizer: tells residues from framing tokens. None takes the Trainer's.
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
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.packs = False  # whether the model leaves out the padding of its batches
        self.writes_file = True
        self.warmup_steps = warmup_steps
        self.device: Any = None
        self._clock = clock
        self._counter: Any = None  # but while a run trains
        self._extended: object = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Starts afresh: a Trainer that retries with a smaller batch begins again."""
        model: Any = self.model if self.model is not None else kwargs["model"]
        if self._counter is not None:
            self._counter.detach()
        tokenizer = self.tokenizer or kwargs.get("processing_class")
        hardware = detect_hardware(args.device)
        index = torch.cuda.current_device() if hardware.kind == "cuda" else None
        self.device = Device(hardware, _compute_dtype(args, model), args.world_size, index)
        self._counter = BatchCounter(model, tokenizer if hasattr(tokenizer, "pad_token_id") else None)
        self._left_to_warm_up = self.warmup_steps
        self._num_left_out = 0
        self._warmup_seconds = 0.0
        self._peak_bytes = 0
        self._seconds_before = time.time() - psutil.Process().create_time()
        self._window = np.zeros(len(COLUMNS))
        self._totals = np.zeros(len(COLUMNS))
        self._begun = self._measured_since = self._free = self._clock()
        self._num_measured = 0

    def on_step_begin(self, *event: object, **kwargs: object) -> None:
        self._begun = self._clock()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Adds the step's times to those since the last log."""
        if self._left_to_warm_up:
            self._left_to_warm_up -= 1
            self._num_left_out += 1
            self._num_measured = 0
            self._counter.take()
            if args.device.type == "cuda":
                torch.cuda.synchronize(args.device)
            self._measured_since = self._clock()
            self._warmup_seconds += self._measured_since - self._free
        else:
            end = self._clock()
            self._num_measured += 1
            self._window[:3] += 1, end - self._free, self._begun - self._free
        self.resume()

    def on_evaluate(self, *event: object, **kwargs: object) -> None:
        self.resume()

    on_save = on_evaluate

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **kwargs: object,
    ) -> None:
        """Adds to the logs, unless `extend_logs` did before."""
        if logs is not self._extended and state.log_history:
            state.log_history[-1].update(self.extend_logs(logs, args, state))
        self._extended = None
        self.resume()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Writes `throughput.json` and stops watching the model."""
        if self.writes_file and state.is_world_process_zero:
            path = Path(str(args.output_dir)) / FILE_NAME
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, json.dumps(to_json(self.summarize(state)), indent=1) + "\n")
            except OSError as error:  # a full disk must not cost the model that was just trained
                logger.error("%s was not written: %s.", path, error.strerror)
        self._counter.detach()
        self._counter = None

    def leave_out(self, num_steps: int, args: TrainingArguments) -> None:
        """Leaves the next steps out of all rates, as those of the warm-up; to be called by all processes."""
        self._end_steps(args)
        self._left_to_warm_up += num_steps

    def resume(self) -> None:
        """Says that evaluation, saving or logging is over and the loop goes on."""
        self._free = self._clock()

    def extend_logs(self, logs: dict[str, Any], args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """Adds this callback's values to a training log or to the final metrics; returns what it added.

        Evaluation's logs stay as they are. All processes must call it, as it gathers from all of them.
        """
        self._extended = logs
        if self._counter is None or not ("loss" in logs or "train_loss" in logs):
            return {}
        window = self._gather(args)
        self._totals += window
        memory = {"peak_memory_gib": self._peak_bytes / 2**30}
        if "train_loss" in logs:
            rates = {**self._rates(self._totals), "warmup_seconds": self._warmup_seconds, **memory}
            added = {f"train_{name}": value for name, value in rates.items()}
        else:
            added = {**self._rates(window), **memory, **self._hours_left(state)}
        added = {name: float(f"{value:.5g}") for name, value in added.items()}
        logs.update(added)
        return added

    def live(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """Rates since the last log, for a line that is shown while it trains; {} in the warm-up.

        `batches_per_s` (passes through the model, of one process), `hours_left`, and the rates of the logs. Waits for
        the device, and for no other process: these are taken to do as much.
        """
        measured = self.measure()
        sums = measured - self._totals if self._window[0] else measured
        if sums[1] <= 0:
            return {}
        batches = sums[0] * args.gradient_accumulation_steps / sums[1]
        live = {"batches_per_s": batches, **self._rates(sums), **self._hours_left(state)}
        if "gpu_utilization" in live:
            live["memory_share"] = peak_bytes(args.device) / 2**30 / (self.device.hardware.memory_gib or math.inf)
        return live

    def measure(self) -> np.ndarray:
        """Sums `COLUMNS` over this session's steps after the warm-up; of those since the last log, as in `live`."""
        self._read()
        return self._totals + self._window * ([1] * 3 + [self.device.num_processes] * (len(COLUMNS) - 3))

    def summarize(self, state: TrainerState) -> Throughput:
        """Returns what `throughput.json` holds."""
        return Throughput(
            unit=self._counter.unit,
            device=self.device.hardware.name,
            compute_dtype=self.device.dtype,
            num_processes=self.device.num_processes,
            measured_steps=int(self._totals[0]),
            warmup_steps=self._num_left_out,
            warmup_seconds=self._warmup_seconds,
            seconds_before_training=round(self._seconds_before, 3),
            steps_per_epoch=state.global_step / state.epoch if state.epoch else None,
            rates=self._rates(self._totals),
            totals=dict(zip(COLUMNS, self._totals.tolist())),
            peak_memory_gib=self._peak_bytes / 2**30,
            no_mfu_because=self.device.why_no_mfu(self._counter.flops_unknown) or None,
            log_history=state.log_history,
        )

    def _read(self) -> None:
        """Moves what was counted from the device into the window; before it is waited for, looks how busy it is."""
        if not self._left_to_warm_up:
            busy = self.device.utilization()
            counts = self._counter.take().cpu().double().numpy()
            self._window[3:-2] += counts
            self._window[-2:] += (busy, 1) if busy is not None and counts.any() else (0, 0)

    def _end_steps(self, args: TrainingArguments) -> None:
        """Reads, and adds the time of steps that were still under way when the loop went on."""
        self._read()
        if args.device.type == "cuda" and self._window[0]:
            self._window[1] += self._clock() - self._free

    def _gather(self, args: TrainingArguments) -> np.ndarray:
        """Gathers what all processes did since the last call; the one place where they wait for each other."""
        self._end_steps(args)
        window = self._window
        self._window = np.zeros(len(COLUMNS))
        self._peak_bytes = max(self._peak_bytes, peak_bytes(args.device))
        if args.world_size > 1:
            own = torch.tensor([[*window, self._peak_bytes]], dtype=torch.float64)
            world = gather(own.to(args.device)).cpu().numpy()
            window = np.concatenate([world[:, :3].mean(0), world[:, 3:-1].sum(0)])
            self._peak_bytes = int(world[:, -1].max())
        if self.packs:
            window[COLUMNS.index("padded_tokens")] = window[COLUMNS.index("tokens")]
        return window

    def _rates(self, sums: np.ndarray) -> dict[str, float]:
        """Rates per second and shares from sums over steps; empty where no time was measured."""
        unit = self._counter.unit
        of = dict(zip(COLUMNS, sums.tolist()))
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
        if of["gpu_samples"]:
            rates["gpu_utilization"] = of["gpu_busy"] / of["gpu_samples"]
        return rates

    def _hours_left(self, state: TrainerState) -> dict[str, float]:
        if not self._num_measured:
            return {}
        wall_per_step = (self._clock() - self._measured_since) / self._num_measured
        return {"hours_left": (state.max_steps - state.global_step) * wall_per_step / 3600}


def _compute_dtype(args: TrainingArguments, model: nn.Module) -> str:
    """Returns what the matrix products of this run are computed in: a key of `Hardware.peak_tflops`."""
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    largest = max(model.parameters(), key=lambda parameter: parameter.numel()).dtype
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(largest) or ("tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32")


def peak_bytes(device: torch.device) -> int:
    """Measures the most memory that was in use at once: tensors on CUDA; elsewhere, what this process held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage's maximum would be the parent's, where a larger process started this one
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
