"""Cheap evaluations that can be trusted: a fixed subset while training, all rows before anything is decided."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers.trainer_utils import EvalLoopOutput

from ..evaluation.dataset_subset import ChosenRows, choose_rows
from .evaluation_passes import (
    Evaluation,
    NotingMetrics,
    Pass,
    check_number,
    choose_metrics,
    full_key,
    join_passes,
    last_prediction,
    make_comparable,
    predictions_of,
    prefix_metrics,
)
from .evaluation_record import EvaluationRecord
from .evaluation_schedule import EvaluationSchedule, check_schedule, check_subset, subset_size

__all__ = ["Evaluation", "EvaluationMixin"]

FEW_ROWS = 50

logger = logging.getLogger(__name__)


@dataclass
class EvalParts:
    """An evaluation set in two parts: the subset, and the rest, whose loader is made when it is needed first."""

    dataset: Any
    settings: tuple[Any, ...]  # that the choice and its loaders were made with
    chosen: ChosenRows
    subset: Any
    rest: Any = None


class EvaluationMixin:
    """Where `max_eval_samples` is set, evaluations while training look at a fixed subset of each evaluation set.

    The rest of the rows follows, so that nothing is computed twice, when a decision hangs on it: where the subset's
    `metric_for_best_model` beats the subset's of the best model so far, in every `eval_full_every`-th evaluation, and
    at the end of the run, also where early stopping ends it. `eval_*` are the subset's metrics, always; `eval_full_*`
    those of all rows (`eval_full_NAME_*` where there are several sets). Only these make a model the best, and the last
    of them the objective of a hyperparameter search.

    Metrics are computed over all rows at once. Without `max_eval_samples` all is as in Trainer. Of a stream the subset
    is kept in memory, and a full evaluation reads all of it again.

    Raises (from the constructor):
        ArgumentError: an argument that does nothing, or `max_eval_samples` with `batch_eval_metrics`,
            `dataloader_drop_last` or without `eval_do_concat_batches`, or with an evaluation set called "full".
    Raises (when training starts):
        ArgumentError: with `max_eval_samples`, an `EarlyStoppingCallback`, which would compare other rows.
        DataError: see `choose_rows`.
    """

    args: Any
    state: Any
    control: Any
    model: Any
    eval_dataset: Any
    compute_metrics: Any
    callback_handler: Any
    is_in_train: bool
    stop_reason: str | None  # of StoppingMixin
    num_loss_items: float | None  # of ExactLossMixin

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.compared_evaluation: Evaluation | None = None
        self._set_name: str | None = None  # of the evaluation at hand; None where the rows are not the run's own
        self._best_set = ""  # the one that `metric_for_best_model` is of
        self._eval_parts: dict[str, EvalParts] = {}
        self._left_out: dict[str, tuple[Pass, tuple[Any, ...]]] = {}  # sets of which only the subset was looked at
        check_schedule(self.args, self.eval_dataset)
        if self.args.max_eval_samples is not None:
            check_subset(self.args, self.eval_dataset)
        self.add_callback(EvaluationRecord())  # type: ignore[attr-defined]
        self.add_callback(EvaluationSchedule(self))  # type: ignore[attr-defined]

    @property
    def evaluation_record(self) -> EvaluationRecord:
        """Counts and seconds of the run; resuming replaces the object."""
        return next(c for c in self.callback_handler.callbacks if isinstance(c, EvaluationRecord))

    def evaluation_facts(self) -> dict[str, Any]:
        """What evaluations of the run looked at and took, for JSON; {} where there was none.

        Returns:
            `subset_rows` (with `max_eval_samples`), `full_rows`, `num_evaluations` and `num_full` (of them, those of
            all rows), each summed over the evaluation sets; `seconds` of passes and metrics; `seconds_saved`: the
            passes over the rest that were not made, at the mean time of those that were (absent where none was made).
            Those before a resume count too.
        """
        return self.evaluation_record.facts()

    def is_at_end(self) -> bool:
        """Whether training ends with the step at hand, other than by a signal or a time limit."""
        return self.state.global_step >= self.state.max_steps or (
            self.control.should_training_stop and self.stop_reason is None
        )

    # --- which rows -------------------------------------------------------------------------------------------------

    def choose_eval_rows(self) -> None:
        """Chooses the subset of every evaluation set, so that what is wrong with one is said before training."""
        for name in self.eval_dataset if isinstance(self.eval_dataset, Mapping) else [""]:
            self._parts_of(name)

    def _parts_of(self, name: str) -> EvalParts:
        dataset = self.eval_dataset[name] if name else self.eval_dataset
        args = self.args
        seed = args.seed if args.data_seed is None else args.data_seed
        settings = (subset_size(args), args.eval_group_column, seed, args.eval_batch_size)
        known = self._eval_parts.get(name)
        if known is not None and known.dataset is dataset and known.settings == settings:
            return known
        chosen = choose_rows(dataset, size=settings[0], group_column=args.eval_group_column, seed=seed)
        if len(chosen.rows) < FEW_ROWS and not chosen.are_all and args.process_index == 0:
            logger.warning(
                "max_eval_samples=%g leaves %d of %d evaluation rows%s: scores of so few swing by chance, and with "
                "them which model counts as the best. Give %d or more, or leave it out.",
                *(args.max_eval_samples, len(chosen.rows), chosen.num_rows, f" ({name})" if name else "", FEW_ROWS),
            )
        given = (dataset, chosen.rows) if chosen.kept is None else (chosen.kept,)
        self._eval_parts[name] = EvalParts(dataset, settings, chosen, self._make_eval_loader(*given))
        return self._eval_parts[name]

    def _make_eval_loader(self, dataset: Any, rows: Any = None) -> Any:
        # Made once and kept: Accelerate holds on to every loader it prepared, and so to its persistent workers.
        trainer: Any = self
        given = {"sampler_fn": trainer._get_eval_sampler, "rows": rows}
        return trainer._get_dataloader(dataset, "Evaluation", self.args.eval_batch_size, **given)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """As in Trainer; for an evaluation while training, of the subset."""
        if self._looks_at_subset():
            return self._parts_of(self._set_name or "").subset
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]

    def _looks_at_subset(self) -> bool:
        return self.args.max_eval_samples is not None and self.is_in_train and self._set_name is not None

    # --- an evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As in Trainer; see the class. Other rows than the run's own are looked at in full."""
        sets = self.eval_dataset if eval_dataset is None else eval_dataset
        self.compared_evaluation = None
        if not isinstance(sets, Mapping):  # of several sets, Trainer comes back here with each
            own = "" if eval_dataset is None else eval_dataset
            self._set_name = own if isinstance(own, str) else None
        try:
            return super().evaluate(eval_dataset, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._set_name = None

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As in Trainer; with `max_eval_samples`, `dataloader` is of the subset, and the rest follows where due."""
        given = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
        name = self._set_name
        if name is None or not self.is_in_train:
            return super().evaluation_loop(dataloader, *given)  # type: ignore[misc]
        first = self._run_pass(dataloader, given)
        num_rows = first.output.num_samples
        parts = self._parts_of(name) if self.args.max_eval_samples is not None else None
        is_full = parts is None or parts.chosen.are_all
        self.compared_evaluation = make_comparable(first.prediction, name, is_full)
        record = self.evaluation_record
        if parts is None:
            record.add_pass(name, 0, num_rows, is_full, first.seconds)
            return first.output
        record.add_pass(name, num_rows, parts.chosen.num_rows, is_full, first.seconds)
        check_number(first, num_rows)
        if self._best_metric_key() in first.output.metrics:
            self._best_set = name
        if not is_full and not self._needs_all_rows(name, first.output.metrics):
            self._left_out[name] = (first, given)
            return first.output
        return self._look_at_rest(name, first, given)

    def _run_pass(self, loader: Any, given: tuple[Any, ...], with_metrics: bool = True) -> Pass:
        """One pass by Trainer's loop; of a part of the rows, what `compute_metrics` gets is kept to be joined."""
        compute: Any = self.compute_metrics
        is_called = compute is not None and not self.args.batch_eval_metrics
        noting = NotingMetrics(compute, with_metrics) if is_called and self.args.max_eval_samples is not None else None
        began = time.perf_counter()
        if noting is not None:
            self.compute_metrics = noting
        try:
            output = super().evaluation_loop(loader, *given)  # type: ignore[misc]
        finally:
            if noting is not None:
                self.compute_metrics = compute
        prediction = predictions_of(output) if is_called and noting is None else last_prediction(noting)
        weight = output.num_samples if self.num_loss_items is None else self.num_loss_items
        return Pass(output, prediction, weight, time.perf_counter() - began)

    def _needs_all_rows(self, name: str, metrics: dict[str, float]) -> bool:
        record, every = self.evaluation_record, self.args.eval_full_every
        if self.is_at_end() or (every is not None and record.of(name).num_evaluations % every == 0):
            return True
        key = self._best_metric_key()
        if self.state.global_step == 0 or key not in metrics or not np.isfinite(metrics[key]):
            return False  # nothing is decided before the first step, nor by a number that is none
        if record.best_on_subset is None or record.best_is_of != self._subset_identity(name):
            return True
        return self._beats(metrics[key], record.best_on_subset)

    def _look_at_rest(self, name: str, first: Pass, given: tuple[Any, ...]) -> EvalLoopOutput:
        """Adds the metrics of all rows to what the pass over the subset gave."""
        parts = self._parts_of(name)
        began, num_more, whole = time.perf_counter(), 0, first
        if not parts.chosen.are_all:
            is_stream = parts.chosen.kept is not None
            if parts.rest is None:
                parts.rest = self._make_eval_loader(parts.dataset, None if is_stream else parts.chosen.rest)
            rest = self._run_pass(parts.rest, given, with_metrics=is_stream)
            self.callback_handler.eval_dataloader = parts.subset
            num_more = rest.output.num_samples
            whole = rest if is_stream else join_passes(first, rest, parts.chosen, given[-1])
            if not is_stream and whole.prediction is not None:
                whole.output.metrics.update(prefix_metrics(self.compute_metrics(whole.prediction), given[-1]))
            self.evaluation_record.add_rest(name, time.perf_counter() - began)
        metrics = {**first.output.metrics, **{full_key(k): v for k, v in whole.output.metrics.items()}}
        return whole.output._replace(metrics=metrics, num_samples=first.output.num_samples + num_more)

    def _evaluate(self, trial: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._left_out.clear()
        metrics = super()._evaluate(trial, *args, **kwargs)  # type: ignore[misc]
        if self._left_out and self.is_at_end():  # a callback has just ended the run
            full: dict[str, float] = {}
            for name, (first, given) in self._left_out.items():
                both: Any = self._look_at_rest(name, first, given).metrics
                full.update({key: value for key, value in both.items() if key not in first.output.metrics})
            self.log(full)  # type: ignore[attr-defined]
            metrics.update(full)
            self._report_to_hp_search(trial, self.state.global_step, metrics)
        self._left_out.clear()
        return metrics

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        if self.args.max_eval_samples is not None:  # else trials would be compared by sums over different metrics
            metrics = choose_metrics(metrics, are_full=self.is_at_end())
        super()._report_to_hp_search(trial, step, metrics)  # type: ignore[misc]

    # --- the best model ---------------------------------------------------------------------------------------------

    def _best_metric_key(self) -> str:
        name = self.args.metric_for_best_model or ""
        return name if name.startswith("eval_") else f"eval_{name}"

    def _beats(self, value: float, best: float) -> bool:
        return value > best if self.args.greater_is_better else value < best

    def _subset_identity(self, name: str) -> str:
        return f"{self._best_metric_key()} {self.args.greater_is_better} {self._parts_of(name).chosen.digest()}"

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As in Trainer, on all rows: an evaluation of the subset alone makes nothing the best."""
        key = self._best_metric_key()
        if self.args.max_eval_samples is None or key not in metrics:
            return super()._determine_best_metric(metrics, trial)  # type: ignore[misc]
        if full_key(key) not in metrics:
            return False
        is_best = super()._determine_best_metric({key: metrics[full_key(key)]}, trial)  # type: ignore[misc]
        if is_best:
            record = self.evaluation_record
            record.best_on_subset = metrics[key]
            record.best_is_of = self._subset_identity(self._best_set)
        return is_best
