"""Cheap evaluations that can be trusted: a fixed subset while training, all rows before anything is decided."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import TrainerControl, TrainerState
from transformers.trainer_utils import EvalLoopOutput

from ..distributed import Team
from .comparable import check_metric_on_rows, name_undefined
from .evaluation_passes import (
    Evaluation,
    NotingMetrics,
    Pass,
    check_number,
    choose_metrics,
    full_key,
    join_passes,
    knowing_rows,
    last_prediction,
    make_comparable,
    predictions_of,
    prefix_metrics,
)
from .evaluation_record import EvaluationRecord, record_of
from .evaluation_rows import EvalParts, EvaluationRows, MakeLoader
from .evaluation_schedule import check_callbacks, check_schedule, check_subset, is_evaluated
from .now import Training
from .resuming import Resumed
from .stopper import Stopper
from .watcher import Watcher, load_watching

FULL_EVERY = 5  # evaluations; the best model so far may owe its subset's score to luck

logger = logging.getLogger(__name__)

Given = tuple[Any, ...]  # to Trainer's loop, after the loader; the prefix of the metrics' names comes last


@dataclass(frozen=True)
class Means:
    """What Trainer has and does for an evaluation; handed to the Evaluator with each call, since any may be replaced.

    Attributes:
        sets: the run's evaluation set, or several by name.
        compute_metrics: the user's, or None.
        one_pass: Trainer's loop over a loader, with a stand-in for `compute_metrics` if one is given; returns what the
            loop returns, and how many items its loss is the mean of, or None: as many as rows.
        make_loader: see `MakeLoader`.
    """

    sets: Any
    compute_metrics: Any
    one_pass: Callable[[Any, Given, NotingMetrics | None], tuple[EvalLoopOutput, float | None]]
    make_loader: MakeLoader


class Evaluator:
    """Where `eval_subset` is set, evaluations while training look at a fixed subset of each evaluation set.

    The rest of the rows follows, so that nothing is computed twice, when a decision hangs on it: where the subset's
    `metric_for_best_model` beats the subset's of the best model so far, in every fifth evaluation, and at the end of
    the run, also where early stopping ends it. `eval_*` are the subset's metrics, always; `eval_full_*` those of all
    rows (`eval_full_NAME_*` where there are several sets). Only these make a model the best, and the last of them the
    objective of a hyperparameter search.

    Metrics are computed over all rows at once. Without `eval_subset` all is as in Trainer. Of a stream the subset
    is kept in memory, and a full evaluation reads all of it again.

    Args:
        sets: the evaluation set that the run begins with, or several by name.
        watchers: what sees each evaluation of the run; what they log comes in this order.

    Attributes:
        compared: the last evaluation, if its predictions can be compared with those of another step.
        rows: the subsets.

    Raises (from the constructor):
        ArgumentError: an argument that does nothing, or `eval_subset` with `batch_eval_metrics`,
            `dataloader_drop_last` or without `eval_do_concat_batches`, or with an evaluation set called "full".
    """

    name = "evaluation_seconds"

    def __init__(self, args: Any, team: Team, stopper: Stopper, sets: Any, watchers: Sequence[Watcher] = ()):
        check_schedule(args, sets)
        if args.eval_subset is not None:
            check_subset(args, sets)
        self.watchers = tuple(watchers)
        self.rows = EvaluationRows(args, team)
        self.compared: Evaluation | None = None
        self._args, self._stopper, self._is_main = args, stopper, team.is_main
        self._seconds: dict[str, dict[str, float]] = {}  # of the record's sets
        self._seen: Evaluation | None = None  # by the watchers
        self._set_name: str | None = None  # of the evaluation at hand; None where the rows are not the run's own
        self._dataset: Any = None  # of the evaluation at hand
        self._best_set = ""  # the one that `metric_for_best_model` is of
        self._left_out: dict[str, tuple[Pass, Given]] = {}  # sets of which only the subset was looked at

    def begin(self, callbacks: Sequence[Any], resumed: Resumed | None) -> None:
        """Training begins: afresh, or from a checkpoint (`resumed`: one of ours).

        Raises:
            ArgumentError: with `eval_subset`, an `EarlyStoppingCallback`, which would compare other rows.
        """
        check_callbacks(self._args, callbacks)
        if not self._stopper.is_resumed:
            record_of(callbacks).clear()
            self._seconds = {}
        self._seen = None
        load_watching(self.watchers, resumed)

    def record(self, callbacks: Sequence[Any]) -> EvaluationRecord:
        """What the run remembers of its evaluations. Resuming puts another object among the callbacks, with counts."""
        record = record_of(callbacks)
        record.seconds = self._seconds
        return record

    # --- which rows -------------------------------------------------------------------------------------------------

    def choose_rows(self, means: Means) -> None:
        """Chooses the subset of every evaluation set, so that what is wrong with one is said before training.

        Raises:
            DataError: see `choose_rows` of `evaluation.dataset_subset`; or `metric_for_best_model` has no value on
                these rows, see `check_metric_on_rows`.
        """
        if means.sets is None or not is_evaluated(self._args):
            return
        for name in means.sets if isinstance(means.sets, Mapping) else [""]:
            is_part = self._args.eval_subset is not None
            rows = self._parts(name, means).chosen.rows if is_part else None
            compute, dataset = means.compute_metrics, means.sets[name] if name else means.sets
            check_metric_on_rows(self._args, compute, dataset, name, rows)
            for problem in name_undefined(compute, dataset, rows) if self._is_main else []:
                logger.warning("While training %s", problem)

    def _parts(self, name: str, means: Means) -> EvalParts:
        group_column = getattr(means.compute_metrics, "group_column", None)  # `RowMetrics` scores by it
        return self.rows.parts(name, means.sets, group_column, means.make_loader)

    @contextmanager
    def looking_at(self, asked_for: Any, sets: Any) -> Iterator[None]:
        """While an evaluation of `asked_for` is under way: None, the run's own `sets`; a name, one of them.

        Other rows than the run's own are looked at in full.
        """
        self.compared = None
        if not isinstance(sets if asked_for is None else asked_for, Mapping):  # of several, Trainer asks for each
            own = "" if asked_for is None else asked_for
            self._set_name = own if isinstance(own, str) else None
            self._dataset = asked_for if self._set_name is None else sets[own] if own else sets
        try:
            yield
        finally:
            self._set_name = self._dataset = None

    @property
    def looks_at_own(self) -> bool:
        """Whether the evaluation at hand is of an evaluation set of the run."""
        return self._set_name is not None

    def for_all_rows(self, compute: Any) -> Any:
        """The stand-in for a `compute_metrics` that can know the rows of the evaluation at hand, all of its set.

        None where there is none, as in `predict`.
        """
        knowing = compute if self._dataset is None else knowing_rows(compute, self._dataset)
        return None if knowing is compute else knowing

    def loader(self, means: Means) -> Any:
        """Of the subset, where the evaluation at hand looks at that; else None."""
        if self._args.eval_subset is None or self._set_name is None:
            return None
        return self._parts(self._set_name, means).subset

    # --- an evaluation ----------------------------------------------------------------------------------------------

    def run(self, loader: Any, given: Given, means: Means, now: Training) -> EvalLoopOutput:
        """An evaluation of a set of the run, over what `loader` is of, and over the rest where that is due."""
        name = self._set_name
        assert name is not None
        parts = self._parts(name, means) if self._args.eval_subset is not None else None
        compute = knowing_rows(means.compute_metrics, self._dataset, None if parts is None else parts.chosen.rows)
        first = self._pass(loader, given, means, compute)
        num_rows = first.output.num_samples
        is_full = parts is None or parts.chosen.are_all
        self.compared = make_comparable(first.prediction, name, is_full, getattr(compute, "groups", None))
        record = self.record(now.callback_handler.callbacks)
        if parts is None:
            record.add_pass(name, 0, num_rows, is_full, first.seconds)
            return first.output
        record.add_pass(name, num_rows, parts.chosen.num_rows, is_full, first.seconds)
        check_number(first, num_rows)
        if self.best_metric_key in first.output.metrics:
            self._best_set = name
        if is_full or self._needs_all_rows(name, first.output.metrics, means, now):
            return self._look_at_rest(name, first, given, means, now)
        self._left_out[name] = (first, given)
        return first.output

    def _pass(self, loader: Any, given: Given, means: Means, compute: Any, with_metrics: bool = True) -> Pass:
        """One pass by Trainer's loop; of a part of the rows, what `compute_metrics` gets is kept to be joined.

        Args:
            compute: `compute_metrics`, as far as it can knowing the rows.
        """
        args = self._args
        is_called = compute is not None and not args.batch_eval_metrics
        noting = NotingMetrics(compute, with_metrics) if is_called and args.eval_subset is not None else None
        stand_in = compute if noting is None and compute is not means.compute_metrics else noting
        began = time.perf_counter()
        output, num_items = means.one_pass(loader, given, stand_in)
        prediction = predictions_of(output) if is_called and noting is None else last_prediction(noting)
        weight = output.num_samples if num_items is None else num_items
        return Pass(output, prediction, weight, time.perf_counter() - began)  # type: ignore[arg-type]

    def _needs_all_rows(self, name: str, metrics: dict[str, float], means: Means, now: Training) -> bool:
        record = self.record(now.callback_handler.callbacks)
        is_at_end = self._stopper.is_at_end(now.state, now.control)
        if is_at_end or record.of(name).num_evaluations % FULL_EVERY == 0:
            return True
        key = self.best_metric_key
        if now.state.global_step == 0 or metrics.get(key) is None or not np.isfinite(metrics[key]):
            return False  # nothing is decided before the first step, nor by a number that is not finite
        if record.best_on_subset is None or record.best_is_of != self._subset_identity(name, means):
            return True
        return self.beats(metrics[key], record.best_on_subset)

    def _look_at_rest(self, name: str, first: Pass, given: Given, means: Means, now: Training) -> EvalLoopOutput:
        """Adds the metrics of all rows to what the pass over the subset gave."""
        parts = self._parts(name, means)
        began, num_more, whole = time.perf_counter(), 0, first
        if not parts.chosen.are_all:
            is_stream = parts.chosen.kept is not None
            compute = means.compute_metrics  # of the rest alone nothing is computed, and streams have no groups
            rest = self._pass(parts.rest_loader(means.make_loader), given, means, compute, with_metrics=is_stream)
            now.callback_handler.eval_dataloader = parts.subset
            num_more = rest.output.num_samples
            whole = rest if is_stream else join_passes(first, rest, parts.chosen, given[-1])
            if not is_stream and whole.prediction is not None:
                of_all = knowing_rows(means.compute_metrics, parts.dataset)
                whole.output.metrics.update(prefix_metrics(of_all(whole.prediction), given[-1]))
            self.record(now.callback_handler.callbacks).add_rest(name, time.perf_counter() - began)
        metrics = {**first.output.metrics, **{full_key(k): v for k, v in whole.output.metrics.items()}}
        return whole.output._replace(metrics=metrics, num_samples=first.output.num_samples + num_more)

    def watch(self, logs: Mapping[str, float], state: TrainerState, control: TrainerControl) -> dict[str, float]:
        """Shows the evaluation whose metrics are `logs` to the watchers; returns what they want logged with them."""
        evaluation = self.compared if self._stopper.is_evaluating else None
        if evaluation is None or evaluation is self._seen:
            return {}
        self._seen, added = evaluation, {}
        for watcher in self.watchers:
            added.update(watcher.see(evaluation, logs, state, control))
        return added

    def forget_left_out(self) -> None:
        """To be called before each evaluation that the loop asks for."""
        self._left_out.clear()

    def finish_left_out(self, means: Means, now: Training) -> dict[str, float] | None:
        """Metrics of all rows of the sets of which only the subset was looked at, where a callback then ended the run.

        None where the run goes on, or nothing was left out.
        """
        full: dict[str, float] = {}
        is_due = bool(self._left_out) and self._stopper.is_at_end(now.state, now.control)
        if is_due:
            for name, (first, given) in self._left_out.items():
                both: Any = self._look_at_rest(name, first, given, means, now).metrics
                full.update({key: value for key, value in both.items() if key not in first.output.metrics})
        self._left_out.clear()
        return full if is_due else None

    def objective(self, metrics: dict[str, float], state: TrainerState, control: TrainerControl) -> dict[str, float]:
        """The metrics that a hyperparameter search sees: of one kind, else trials would be summed over several."""
        if self._args.eval_subset is None:
            return metrics
        return choose_metrics(metrics, are_full=self._stopper.is_at_end(state, control))

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, float]]:
        """The seconds of the record, which stand apart from its counts: two runs that learn the same have the same."""
        return self._seconds

    def load(self, tree: dict[str, dict[str, float]] | None) -> None:
        """Goes on counting from these."""
        self._seconds = tree or {}

    # --- the best model ---------------------------------------------------------------------------------------------

    @property
    def best_metric_key(self) -> str:
        """`metric_for_best_model` as it is logged."""
        name = self._args.metric_for_best_model or ""
        return name if name.startswith("eval_") else f"eval_{name}"

    def beats(self, value: float, best: float) -> bool:
        """Whether a value of `metric_for_best_model` is better than another."""
        return value > best if self._args.greater_is_better else value < best

    def _subset_identity(self, name: str, means: Means) -> str:
        return f"{self.best_metric_key} {self._args.greater_is_better} {self._parts(name, means).chosen.digest()}"

    def decisive(self, metrics: dict[str, float]) -> dict[str, float] | None:
        """The metrics by which a model may be the best: those of all rows. None where only the subset's are there."""
        key = self.best_metric_key
        if self._args.eval_subset is None or key not in metrics:
            return metrics
        return {key: metrics[full_key(key)]} if full_key(key) in metrics else None

    def note_best(self, metrics: dict[str, float], means: Means, now: Training) -> None:
        """That the model with these metrics is the best so far: what others have to beat on the subset."""
        key = self.best_metric_key
        if self._args.eval_subset is not None and key in metrics:
            record = self.record(now.callback_handler.callbacks)
            record.best_on_subset = metrics[key]
            record.best_is_of = self._subset_identity(self._best_set, means)
