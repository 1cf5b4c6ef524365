"""When a run is evaluated beyond what Trainer knows: every few epochs, and always at its end."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..errors import ArgumentError
from .stopper import Stopper

SCHEDULED_BY = ("eval_subset", "eval_every_epochs")

logger = logging.getLogger(__name__)


class EvaluationSchedule(TrainerCallback):
    """Asks for evaluations that Trainer's own callback does not, and takes back some of those it asks for.

    Without one of `SCHEDULED_BY` it changes nothing.
    """

    def __init__(self, stopper: Stopper):
        self._stopper = stopper
        self._evaluated_step: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nothing is evaluated yet."""
        self._evaluated_step = None

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Epochs between two evaluations are passed over; the run's end never is."""
        is_by_epoch = args.eval_strategy == IntervalStrategy.EPOCH
        is_between = args.eval_every_epochs is not None and round(state.epoch) % args.eval_every_epochs != 0
        if is_by_epoch and is_between:
            control.should_evaluate = False
        is_asked_for = any(getattr(args, name) is not None for name in SCHEDULED_BY) and is_evaluated(args)
        is_last = is_asked_for and self._stopper.is_at_end(state, control)
        if is_last and self._evaluated_step != state.global_step:
            control.should_evaluate = True
            # Else the best model would be one of which there is no checkpoint.
            control.should_save |= args.load_best_model_at_end and args.save_strategy != SaveStrategy.BEST

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A user's own evaluation is none of the run's."""
        if self._stopper.is_evaluating:
            self._evaluated_step = state.global_step


def is_evaluated(args: Any) -> bool:
    """Whether a run with these arguments is evaluated while it trains."""
    return bool(args.eval_strategy != IntervalStrategy.NO)


def check_callbacks(args: Any, callbacks: Iterable[Any]) -> None:
    """Raises ArgumentError where one of them compares rows that `eval_subset` makes different ones."""
    if args.eval_subset is not None and any(isinstance(callback, EarlyStoppingCallback) for callback in callbacks):
        raise ArgumentError(
            "EarlyStoppingCallback compares the score of a subset with the best score of all rows: with "
            "--eval_subset use --early_stopping_patience, which compares the same rows."
        )


def check_schedule(args: Any, eval_dataset: Any) -> None:
    """Refuses explicit requests that would do nothing; those of a preset are passed over, with a line.

    Raises:
        ArgumentError: `eval_every_epochs` without evaluation by epoch, or `eval_subset` without any evaluation.
    """
    idle = []
    if eval_dataset is None or not is_evaluated(args):
        idle.append(("eval_subset", "an evaluation set and --eval_strategy"))
    if args.eval_every_epochs is not None and args.eval_strategy != IntervalStrategy.EPOCH:
        idle.append(("eval_every_epochs", "--eval_strategy epoch"))
    for name, needed in idle:
        value = getattr(args, name)
        if value is None:
            continue
        if name in args.explicit_fields:
            raise ArgumentError(f"{name}={value}: does nothing without {needed}. Give that, or leave this out.")
        logger.info("%s=%s is passed over: it needs %s.", name, value, needed)


def check_subset(args: Any, eval_dataset: Any) -> None:
    """Raises ArgumentError where `eval_subset` contradicts other arguments; see `Evaluator`."""
    subset_size(args)
    for name, value in (
        ("batch_eval_metrics", True),
        ("dataloader_drop_last", True),
        ("eval_do_concat_batches", False),
    ):
        if getattr(args, name) is value:
            raise ArgumentError(
                f"{name}={value}: with eval_subset={args.eval_subset} all predictions are needed, in order "
                "of the rows. Leave one of the two out."
            )
    if (args.metric_for_best_model or "").removeprefix("eval_").startswith("full_"):
        raise ArgumentError(
            f"metric_for_best_model={args.metric_for_best_model}: leave out full_; with eval_subset the best "
            "model is always that of all rows."
        )
    names = list(eval_dataset) if isinstance(eval_dataset, Mapping) else []
    taken = [name for name in names if name == "full" or str(name).startswith("full_")]
    if taken:
        raise ArgumentError(f"Evaluation set {taken[0]!r}: eval_full_* are the metrics of all rows. Call it otherwise.")


def subset_size(args: Any) -> int | float:
    """`eval_subset` as `choose_subset` takes it: a count (int) above 1, else a share (float).

    Raises:
        ArgumentError: a count that is not whole.
    """
    value = args.eval_subset
    if value <= 1:
        return float(value)
    if value != int(value):
        raise ArgumentError(f"eval_subset={value}: give a whole number of rows (500) or a share up to 1.0 (0.05).")
    return int(value)
