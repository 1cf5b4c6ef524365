"""The progress bar with the numbers a person watches."""

from __future__ import annotations

import logging
import math
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from .shortfall import Shortfall
from .units import rounded

# Without tqdm's time left, which jumps after every evaluation: ours counts evaluation and saving as they were so far.
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"
SPEED_UNITS = {"residues_per_s": "residues/s", "tokens_per_s": "tokens/s"}
NOT_SHOWN = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")

LOGGER = logging.getLogger("hf_ext")

Logs = dict[str, Any]


class LiveProgress(ProgressCallback):
    """Behind the bar: last loss, learning rate, real residues per second, best metric so far, time left.

    One line is printed per evaluation, with its metrics; other logs only move the bar.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._numbers: Logs = {}
        self._loader: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A resumed run's bar begins where the run is."""
        self._numbers = {}
        self.current_step = state.global_step
        if state.is_world_process_zero:
            self.training_bar = tqdm(
                total=state.max_steps, initial=state.global_step, dynamic_ncols=True, bar_format=BAR, unit=" steps"
            )

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Rows of another loader, such as those outside a subset, get a bar of their own."""
        if self.prediction_bar is not None and eval_dataloader is not self._loader:
            self.prediction_bar.close()
            self.prediction_bar = None
        self._loader = eval_dataloader
        super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Logs | None = None, **kwargs: Any) -> None:
        """Shows a training log in the bar, and an evaluation's metrics above it."""
        if self.training_bar is None or not logs:
            return
        if "loss" in logs:
            self._numbers.update(logs)
        self.training_bar.set_postfix_str(describe_training(self._numbers, args, state), refresh="loss" in logs)
        metrics = {name: value for name, value in logs.items() if name.startswith("eval_")}
        if metrics:
            self.training_bar.write(f"step {state.global_step}: {describe_metrics(metrics)}")

    def show_speed(self, rates: Logs, slow_because: str, args: Any, state: Any) -> None:
        """Takes rates of the last steps, and what makes them low, into what stands behind the bar."""
        self._numbers.update({**rates, "slow_because": slow_because})
        if self.training_bar is not None:
            self.training_bar.set_postfix_str(describe_training(self._numbers, args, state), refresh=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Also closes the bar of an evaluation that was given up, or of rows that were looked at after it."""
        super().on_evaluate(args, state, control, **kwargs)
        super().on_train_end(args, state, control, **kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """By now Trainer knows whether the last evaluation was the best."""
        if self.training_bar is not None:
            self.training_bar.set_postfix_str(describe_training(self._numbers, args, state))


def show_live(callbacks: list[TrainerCallback]) -> None:
    """Puts `LiveProgress` where Trainer has its progress bar, if it has one, in place.

    As in Trainer, `disable_tqdm` prints the logs instead, and a notebook has its table.
    """
    callbacks[:] = [LiveProgress() if type(callback) is ProgressCallback else callback for callback in callbacks]


def messages_above_bars(callbacks: list[TrainerCallback]) -> AbstractContextManager[None]:
    """While it lasts, what hf_ext logs to the terminal stands above the bars of `callbacks`."""
    has_bar = any(isinstance(callback, LiveProgress) for callback in callbacks)
    terminals = (sys.stdout, sys.stderr)
    prints = any(isinstance(h, logging.StreamHandler) and h.stream in terminals for h in LOGGER.handlers)
    # Without a handler of ours the messages are the application's to print; tqdm would print them a second time.
    return logging_redirect_tqdm([LOGGER]) if has_bar and prints else nullcontext()


def describe_training(numbers: Logs, args: Any, state: Any) -> str:
    """What stands behind the bar; without what is not known yet."""
    parts = [f"loss {numbers['loss']:.4g}"] if "loss" in numbers else []
    parts += [f"lr {numbers['learning_rate']:.3g}"] if "learning_rate" in numbers else []
    parts += [f"{_short(numbers[name])} {unit}" for name, unit in SPEED_UNITS.items() if name in numbers]
    best = state.best_metric
    if best is not None and math.isfinite(best):
        # Of a checkpoint, where the arguments name no metric any more.
        name = (args.metric_for_best_model or "").removeprefix("eval_")
        parts.append(f"best {name} {best:.4g}" if name else f"best {best:.4g}")
    parts += _speed_parts(numbers)
    parts += [f"{_time(numbers['hours_left'])} left"] if "hours_left" in numbers else []
    parts += [f"slow: {numbers['slow_because']}"] if numbers.get("slow_because") else []
    return ", ".join(parts)


def describe_speed(rates: Logs, shortfall: Shortfall | None) -> str:
    """Rates of the last steps in a line, and what makes them low."""
    parts = _speed_parts(rates)
    parts += [f"{_time(rates['hours_left'])} left"] if "hours_left" in rates else []
    return ", ".join(parts) + (f"; {shortfall}" if shortfall else "")


def _speed_parts(numbers: Logs) -> list[str]:
    return [f"{rounded(numbers['batches_per_s'])} batches/s"] if "batches_per_s" in numbers else []


def describe_metrics(metrics: Logs) -> str:
    """An evaluation's metrics in a line, without its speed; what has no value reads "undefined"."""
    shown = {name.removeprefix("eval_"): v for name, v in metrics.items() if not name.endswith(NOT_SHOWN)}
    return ", ".join(f"{name} {_value(value)}" for name, value in shown.items())


def _value(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return "undefined" if math.isnan(value) else f"{value:.4g}"


def _short(rate: float) -> str:
    return f"{rate / 1000:.4g}k" if rate >= 10_000 else f"{rate:.0f}"


def _time(hours: float) -> str:
    minutes = hours * 60
    if minutes < 1:
        return f"{minutes * 60:.0f} s"
    return f"{minutes:.0f} min" if minutes < 60 else f"{hours:.1f} h"
