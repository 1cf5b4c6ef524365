"""What steps in host memory take of a run: measured while it trains, kept in the plan, and said where it is much."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import TrainerCallback

from ..models.host_optimizer import HostOptimizer, HostTimes, find_host_optimizer
from ..reporting.throughput import WARMUP_STEPS
from ..training_args import FastTrainingArguments

LARGEST_SHARE = 0.1  # of the time of a step, above which leaving the optimizer on the card is worth a thought
JUDGED_STEPS = 10

logger = logging.getLogger(__name__)


class HostSteps(TrainerCallback):
    """Measures a `HostOptimizer`, from the step on in which there is one; of other optimizers it takes no notice.

    The first steps do not count: memory is pinned in them. The time of a step is that of its passes and of the
    optimizer, without waiting for rows.

    Args:
        record: adds evidence to the plan.
    """

    def __init__(self, args: FastTrainingArguments, record: Callable[..., None]):
        self._args, self._record = args, record
        self._forget()

    def _forget(self) -> None:
        self._optimizer: HostOptimizer | None = None
        self._num_seen = self._num_measured = 0
        self._begin_s = self._seconds = 0.0
        self._first = HostTimes()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts afresh."""
        self._forget()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An accumulation cycle begins."""
        self._begin_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Adds the step; warns once, after as many as are enough to judge."""
        found = find_host_optimizer(optimizer)
        if found is None:
            return
        if found is not self._optimizer:
            self._forget()
            self._optimizer = found
        else:
            self._num_seen += 1
        if self._num_seen < WARMUP_STEPS:
            self._first = replace(found.times)
            return
        self._seconds += time.perf_counter() - self._begin_s
        self._num_measured += 1
        if self._num_measured == JUDGED_STEPS and self._args.process_index == 0:
            self._judge()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes down what was measured."""
        if self._optimizer is None:
            return
        evidence: dict[str, Any] = {"device_bytes_saved": self._optimizer.state_bytes()}
        if self._num_measured:
            copies, steps = self._parts()
            evidence |= {"copy_s": copies, "host_step_s": steps, "share_of_step": (copies + steps) / self._step_s()}
        self._record(**{name: float(f"{v:.3g}") if isinstance(v, float) else v for name, v in evidence.items()})
        self._forget()

    def _step_s(self) -> float:
        return self._seconds / self._num_measured

    def _parts(self) -> tuple[float, float]:
        """Seconds of a step that copies and the optimizer take, in the mean."""
        assert self._optimizer is not None
        last, first = self._optimizer.times, self._first
        num = max(1, last.num_steps - first.num_steps)  # a loss scale may have left some out
        return (last.copy_s - first.copy_s) / num, (last.step_s - first.step_s) / num

    def _judge(self) -> None:
        (copies, steps), whole = self._parts(), self._step_s()
        if (copies + steps) / whole > LARGEST_SHARE:
            logger.warning(
                "Steps in host memory take %.0f %% of the time of a step (copies %.3g s, %s %.3g s, of %.3g s). More "
                "rows in a step hide them (--gradient_accumulation_steps, --per_device_train_batch_size), and more "
                "threads shorten them (OMP_NUM_THREADS); where the card has room for the states, leave out "
                "--optim_ext cpu_offload.",
                100 * (copies + steps) / whole,
                copies,
                type(self._optimizer.wrapped).__name__ if self._optimizer else "",
                steps,
                whole,
            )
