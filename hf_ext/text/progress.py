"""What a person watches while a run trains, a bar on a terminal or lines elsewhere; and what `run.log` keeps."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback
from transformers.utils import is_in_notebook
from transformers.utils.logging import disable_progress_bar

from ..errors import show_text
from .units import estimated, rounded

# Without tqdm's time left, which jumps after every evaluation: ours counts evaluation and saving as they were so far.
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"
NOT_SHOWN = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
MAX_METRICS = 5  # in a line; TensorBoard, the report and trainer_state.json have all
MUCH_WAITING = 0.2  # of the time of a step
MUCH_IDLE = 0.2  # of the time of a GPU
MUCH_ROOM = 0.5  # of the memory of a GPU

LOGGER = logging.getLogger("hf_ext")

Logs = dict[str, Any]


def is_watched() -> bool:
    """Returns whether a person sees a bar move: on a terminal or in a notebook, not in a file or a pipe."""
    return sys.stderr.isatty() or is_in_notebook()


class LiveProgress(ProgressCallback):
    """Trainer's bar with the text that `show` gets behind it, and a line per evaluation above it.

    Where nobody watches, the lines alone.
    """

    _loader: object = None

    @property
    def has_bar(self) -> bool:
        """Whether there is a bar that can be seen."""
        return self.training_bar is not None and not self.training_bar.disable

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Begins a resumed run's bar where the run is."""
        self.current_step = state.global_step
        if state.is_world_process_zero:
            look: Logs = {"dynamic_ncols": True, "bar_format": BAR, "unit": " steps", "disable": not is_watched()}
            self.training_bar = tqdm(total=state.max_steps, initial=state.global_step, **look)

    def on_prediction_step(self, *event: object, **kwargs: Any) -> None:
        """Gives rows of another loader, such as those outside a subset, a bar of their own."""
        loader = kwargs.get("eval_dataloader")
        if self.prediction_bar is not None and loader is not self._loader:
            self.prediction_bar.close()
            self.prediction_bar = None
        self._loader = loader
        if is_watched():
            super().on_prediction_step(*event, **kwargs)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Logs | None = None,
        **kwargs: object,
    ) -> None:
        """Writes a line for an evaluation."""
        metrics = {name: value for name, value in (logs or {}).items() if name.startswith("eval_")}
        if self.training_bar is not None and metrics:
            text = describe_metrics(metrics, args.metric_for_best_model)
            self.training_bar.write(f"Step {state.global_step:,} of {state.max_steps:,}, validation: {text}")

    def show(self, text: str) -> None:
        """Puts a text behind the bar."""
        if self.training_bar is not None:
            self.training_bar.set_postfix_str(text)

    def on_train_end(self, *event: object, **kwargs: object) -> None:
        """Closes bars, also that of an evaluation that was given up, or of rows that were looked at after it."""
        super().on_evaluate(*event, **kwargs)
        super().on_train_end(*event, **kwargs)


def show_live(callbacks: list[TrainerCallback]) -> None:
    """Puts `LiveProgress` where Trainer has its progress bar, if it has one, in place.

    As in Trainer, `disable_tqdm` prints the logs instead, and a notebook has its table.
    """
    callbacks[:] = [LiveProgress() if type(callback) is ProgressCallback else callback for callback in callbacks]


def messages_above_bars(callbacks: list[TrainerCallback]) -> AbstractContextManager[None]:
    """Shows what hf_ext logs to the terminal above the bars of `callbacks`, while it lasts."""
    has_bar = any(isinstance(callback, LiveProgress) for callback in callbacks)
    terminals = (sys.stdout, sys.stderr)
    prints = any(isinstance(h, logging.StreamHandler) and h.stream in terminals for h in LOGGER.handlers)
    # Without a handler of ours the messages are the application's to print; tqdm would print them a second time.
    return logging_redirect_tqdm([LOGGER]) if has_bar and prints else nullcontext()


def describe_training(numbers: Logs, args: TrainingArguments, state: TrainerState) -> str:
    """Describes how the training goes, in a line: of logs and live rates what is known."""
    parts = [f"loss {numbers['loss']:.4g}"] if "loss" in numbers else []
    parts += [f"lr {numbers['learning_rate']:.3g}"] if "learning_rate" in numbers else []
    for name, unit in (("residues_per_s", "residues/s"), ("tokens_per_s", "tokens/s"), ("batches_per_s", "batches/s")):
        parts += [f"{rounded(numbers[name])} {unit}"] if name in numbers else []
    parts += [f"GPU {numbers['gpu_utilization']:.0%} busy"] if "gpu_utilization" in numbers else []
    parts += [f"{numbers['speed_vs_baseline']:.3g}x the baseline"] if "speed_vs_baseline" in numbers else []
    best = state.best_metric
    if best is not None and math.isfinite(best):
        # Of a checkpoint, where the arguments name no metric any more.
        name = (args.metric_for_best_model or "").removeprefix("eval_")
        parts.append(f"best {name} {best:.4g}" if name else f"best {best:.4g}")
    parts += [f"{estimated(3600 * numbers['hours_left'])} left"] if "hours_left" in numbers else []
    return ", ".join(parts)


def describe_metrics(metrics: Logs, chosen_by: str | None = None) -> str:
    """Describes an evaluation's scores in a line, at most 5; what has no value reads "undefined".

    Args:
        metrics: as logged.
        chosen_by: the name of the one that chooses the best model, which comes first; then the loss.
    """
    shown = {name.removeprefix("eval_"): v for name, v in metrics.items() if not name.endswith(NOT_SHOWN)}
    scores = [name for name in shown if not name.startswith("num_")]
    first = [name for name in ((chosen_by or "").removeprefix("eval_"), "loss") if name in shown]
    named = [*dict.fromkeys([*first, *scores])][:MAX_METRICS]
    return ", ".join(f"{name} {_value(shown[name])}" for name in named)


def _value(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return "undefined" if math.isnan(value) else f"{value:.4g}"


def find_shortfall(rates: Mapping[str, float]) -> str:
    """Says what keeps a run from being fast, by its rates: its data, small steps, the host; "" where nothing does."""
    waiting = rates.get("data_wait_share", 0.0)
    idle = 1 - rates.get("gpu_utilization", 1.0)
    is_idle = idle > MUCH_IDLE
    if waiting >= MUCH_WAITING or (is_idle and waiting > idle / 2):
        return f"it waits for data {waiting:.0%} of the time (--dataloader_num_workers)"
    if not is_idle:
        return ""
    cause = "the host cannot keep up: --speedups all compiles, --profile true shows what takes the time"
    if rates.get("memory_share", 1.0) < MUCH_ROOM:
        cause = "steps are small, and memory has room: a larger --per_device_train_batch_size"
    return f"the GPU is busy {1 - idle:.0%} of the time ({cause})"


# --- the log ----------------------------------------------------------------------------------------------------------


class _Shown(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Names and values of foreign files neither drive the terminal nor show tokens."""
        return show_text(super().format(record))


class RunLog(logging.FileHandler):
    """A log file that, on a disk that takes no more, says so once instead of a traceback per line."""

    has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Reports once that the file cannot be written, in place of logging's error."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_failed:
            self.has_failed = True
            print(f"{self.baseFilename} could not be written: {error.strerror}. Lines are missing.", file=sys.stderr)

    def close(self) -> None:
        """Closes as logging does; lines for which there is still no room are given up."""
        with suppress(OSError):
            super().close()


def start_run_log(folder: str | os.PathLike[str] | None, is_main_process: bool = True) -> logging.Logger:
    """Sends hf_ext's messages to the terminal and appends them to `<folder>/run.log`; other processes only warn.

    Warnings of transformers, accelerate and datasets go to the file too. With no folder there is no file.
    """
    disable_progress_bar()  # of loading and saving; training and embedding keep theirs
    for handler in list(LOGGER.handlers):
        LOGGER.removeHandler(handler)
        handler.close()
    LOGGER.propagate = False
    LOGGER.setLevel(logging.INFO if is_main_process else logging.WARNING)
    terminal = logging.StreamHandler(sys.stdout)
    terminal.setFormatter(_Shown("%(message)s"))
    LOGGER.addHandler(terminal)
    for own in logging.getLogger("transformers").handlers:  # that names what config.json says
        own.setFormatter(_Shown(own.formatter._fmt if own.formatter else None))
    if is_main_process and folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = RunLog(Path(folder) / "run.log", encoding="utf-8")
        file.setFormatter(_Shown("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        for name in ("hf_ext", "transformers", "accelerate", "datasets", "py.warnings"):
            logging.getLogger(name).addHandler(file)
        logging.captureWarnings(True)
    return LOGGER
