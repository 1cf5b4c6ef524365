"""Cheap evaluations that can be trusted: a fixed subset while training, all rows before anything is decided."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput

from ..data import kept_random_states
from ..errors import ArgumentError
from ..evaluation import ChosenRows, choose_rows
from ..files import Json
from ..models import replaced
from ..processes import Team
from ..training_args import FastTrainingArguments, evaluates_apart
from .checks import CollapseAlarm
from .early_stopping import EarlyStopping, check_metric_on_rows, make_comparable
from .host import Host
from .nan_guard import can_be_best
from .stop import EvaluationGivenUp, Stopper

FULL_EVERY = 5  # evaluations; the best model so far may owe its subset's score to luck
FEW_ROWS = 50

logger = logging.getLogger(__name__)

Given = tuple[Any, ...]  # to Trainer's loop, after the loader; the prefix of the metrics' names comes last

OnePass = Callable[[DataLoader, Given, object], EvalLoopOutput]
MakeLoader = Callable[..., DataLoader]


@dataclass
class Subset:
    """The chosen rows of an evaluation set, what they were chosen by, and their loader and that of all rows.

    Loaders are kept, since Accelerate holds on to every loader that it prepared, and so to its persistent workers.
    """

    dataset: Any
    settings: tuple[Any, ...]
    chosen: ChosenRows
    loader: DataLoader
    whole: DataLoader | None = None


class Evaluator(TrainerCallback):
    """Where `eval_subset` is set, evaluations while training look at a fixed subset of each evaluation set.

    A pass over all rows follows when a decision hangs on it: where the subset's `metric_for_best_model` beats the
    subset's of the best model so far, in every fifth evaluation, and at the end of the run, also where early stopping
    ends it. `eval_*` are the subset's metrics, always; `eval_full_*` those of all rows (`eval_full_NAME_*` where there
    are several sets). Only these make a model the best: to Trainer, an evaluation of the subset alone is as good as
    the best so far. Without `eval_subset` all is as in Trainer, but that only a finite number can be the best.

    It also asks for evaluations every few epochs and at the run's end. Of a stream the subset is kept in memory.

    Args:
        trainer: the `FastTrainer`.
        callbacks: whose `see(evaluation)` is called in each evaluation that Trainer's loop asks for; what it
            returns is logged with it. `state` and `load` put them back where one is given up.
        one_pass: Trainer's loop over a loader, with what it is given and `compute_metrics`.
        make_loader: makes the loader of a set, or of the rows with some numbers. save: makes a checkpoint.

    Attributes:
        is_due: whether an evaluation that Trainer's loop asked for is under way.

    Raises (from the constructor):
        ArgumentError: an argument that does nothing, or `eval_subset` with `dataloader_drop_last` or with an
            evaluation set called "full".
    """

    name = "evaluations"

    def __init__(
        self,
        trainer: Host,
        team: Team,
        stopper: Stopper,
        callbacks: Sequence[EarlyStopping | CollapseAlarm],
        one_pass: OnePass,
        make_loader: MakeLoader,
        save: Callable[[], None],
    ):
        self._trainer = trainer
        self._team = team
        self._stopper = stopper
        self._callbacks = callbacks
        self._one_pass = one_pass
        self._make_loader = make_loader
        self._save = save
        check_schedule(trainer.args, trainer.eval_dataset)
        self.is_due = False
        self._subsets: dict[str, Subset] = {}
        self._at_hand: str | None = None  # name of the run's own set; None for other rows
        self._added: set[str] = set()  # what callbacks logged
        self._left_out: dict[str, Given] = {}  # sets of which only the subset was looked at
        self._num_begun = 0  # sets
        self._evaluated_step: int | None = None
        self.load(None)

    # --- counts, for checkpoints -----------------------------------------------------------------------------------

    def state(self) -> Json:
        """Returns how often each set was looked at, and what the best model so far scored on its subset."""
        return {"num_evaluations": self._num_evaluations, "best": self._best_on_subset}

    def load(self, tree: Json | None) -> None:
        """Goes on from these; None: as before the first evaluation."""
        tree = tree or {"num_evaluations": {}, "best": None}
        self._num_evaluations: dict[str, int] = tree["num_evaluations"]  # of each set
        self._best_on_subset: float | None = tree["best"]

    # --- which rows -------------------------------------------------------------------------------------------------

    def choose_rows(self) -> None:
        """Chooses the subset of every evaluation set, so that what is wrong with one is said before training.

        Raises:
            DataError: see `choose_rows` of `evaluation.row_metrics`; or `metric_for_best_model` has no value on
                these rows, see `check_metric_on_rows`.
        """
        trainer = self._trainer
        sets = trainer.eval_dataset
        if sets is None or trainer.args.eval_strategy == "no":
            return
        for name, dataset in sets.items() if isinstance(sets, Mapping) else [("", sets)]:
            rows = None if trainer.args.eval_subset is None else self._subset(name).chosen.rows
            check_metric_on_rows(trainer.args, trainer.compute_metrics, dataset, name, rows)

    def _subset(self, name: str) -> Subset:
        """Chooses the subset of a set ("" where there is but one), once as long as what decides it is the same."""
        trainer = self._trainer
        args = trainer.args
        dataset = trainer.eval_dataset[name] if name else trainer.eval_dataset
        group_column = getattr(trainer.compute_metrics, "group_column", None)  # `RowMetrics` scores by it
        seed = args.seed if args.data_seed is None else args.data_seed
        size = args.eval_subset or 1.0
        size = int(size) if size > 1 and size == int(size) else float(size)  # a count, or a fraction
        settings = size, group_column, seed, args.eval_batch_size
        known = self._subsets.get(name)
        if known is not None and known.dataset is dataset and known.settings == settings:
            return known
        chosen = choose_rows(dataset, size=size, group_column=group_column, seed=seed)
        if len(chosen.rows) < FEW_ROWS and not chosen.are_all and self._team.is_main:
            logger.warning(
                "eval_subset=%g leaves %d of %d evaluation rows%s: scores of so few swing by chance, and with "
                "them which model counts as the best. Give %d or more, or leave it out.",
                *(args.eval_subset, len(chosen.rows), chosen.num_rows, f" ({name})" if name else "", FEW_ROWS),
            )
        rows = (dataset, chosen.rows) if chosen.kept is None else (chosen.kept, None)
        self._subsets[name] = Subset(dataset, settings, chosen, self._make_loader(*rows))
        return self._subsets[name]

    def loader(self) -> DataLoader | None:
        """Returns the loader of the subset, where the evaluation at hand looks at that; else None."""
        name = self._at_hand
        if name is None or self._trainer.args.eval_subset is None or not self._trainer.is_in_train:
            return None
        return self._subset(name).loader

    # --- an evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, asked_for: object, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Runs `run`, Trainer's own `evaluate`, on the rows that were asked for: see `Trainer.evaluate`.

        Other rows than the run's own are looked at in full. An evaluation of Trainer's loop that a stop gives up is as
        if it had not begun, but that as many random numbers are drawn; the run stops, and has saved.
        """
        trainer = self._trainer
        at_hand = None
        if asked_for is None:
            at_hand = ""
        elif isinstance(asked_for, str):
            at_hand = asked_for
        is_asked_for = trainer.control.should_evaluate or (
            trainer.args.eval_on_start and trainer.state.global_step == 0
        )
        is_due = trainer.is_in_train and asked_for is None and is_asked_for
        with replaced(self, _at_hand=at_hand):
            return self._evaluate_due(run) if is_due else run()

    def _evaluate_due(self, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        trainer = self._trainer
        state = trainer.state
        num_logs = len(state.log_history)
        parts = (self, *self._callbacks)
        stateful = [c for c in trainer.callback_handler.callbacks if isinstance(c, ExportableState)]
        exported = copy.deepcopy([callback.state()["attributes"] for callback in stateful])
        before = copy.deepcopy([part.state() for part in parts])
        self._added = set()
        self._left_out = {}
        self._num_begun = 0
        try:
            self._stopper.check_evaluation()
            with replaced(self, is_due=True), self._stopper.during_evaluation():
                metrics = run()
                if self._left_out and self._stopper.is_at_end():  # a callback has just ended the run
                    full: dict[str, float] = {}
                    for name, given in self._left_out.items():
                        full.update(self._look_at_all(name, given).metrics or {})
                    trainer.log(full)
                    metrics.update(full)
        except EvaluationGivenUp:
            # With several sets, some were evaluated, logged and shown to early stopping.
            del state.log_history[num_logs:]
            for callback, attributes in zip(stateful, exported, strict=True):
                vars(callback).update(attributes)
            for part, tree in zip(parts, before, strict=True):
                part.load(tree)
            self._leave_evaluation()
            return self._decide({})
        self._evaluated_step = state.global_step
        return self._decide(metrics)

    def _leave_evaluation(self) -> None:
        """Does the rest of what the run does before it stops."""
        trainer = self._trainer
        sets = trainer.eval_dataset
        end = getattr(trainer.callback_handler.eval_dataloader, "end", None)
        if end is not None:
            end()  # else Accelerate takes the loader for the one in use
        num_sets = len(sets) if isinstance(sets, Mapping) else 1
        for _ in range(num_sets - self._num_begun):
            torch.empty((), dtype=torch.int64).random_()  # as a loader does that begins; no dropout then is another
        trainer.control.should_training_stop = True
        trainer.control.should_evaluate = False
        self._save()  # with save_strategy best, Trainer would not
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

    def run(self, loader: DataLoader, given: Given) -> EvalLoopOutput:
        """Evaluates the rows of `loader`, and all rows where `loader` is of the subset and a decision is due."""
        trainer = self._trainer
        name = None if given[0] == "Prediction" else self._at_hand
        if name is None or not trainer.is_in_train:
            return self._one_pass(loader, given, trainer.compute_metrics)
        subset = self._subset(name) if trainer.args.eval_subset is not None else None
        is_full = subset is None or subset.chosen.are_all
        self._num_begun += 1
        output = self._one_pass(loader, given, trainer.compute_metrics)
        self._num_evaluations[name] = self._num_evaluations.get(name, 0) + 1
        compared = make_comparable(output, name, trainer.compute_metrics) if self.is_due else None
        assert output.metrics is not None  # Trainer's loop makes them
        metrics = dict(output.metrics)
        if compared is not None:
            for callback in self._callbacks:
                added = callback.see(compared)
                self._added |= added.keys()
                output.metrics.update(added)
        if subset is None:
            return output
        if is_full:
            output.metrics.update({full_key(key): value for key, value in metrics.items()})
        elif self.is_due and self._needs_all_rows(name, metrics):
            whole = self._look_at_all(name, given)
            both = {**output.metrics, **(whole.metrics or {})}
            return output._replace(metrics=both, num_samples=(output.num_samples or 0) + (whole.num_samples or 0))
        else:
            self._left_out[name] = given
        return output

    def _needs_all_rows(self, name: str, metrics: dict[str, float]) -> bool:
        value = metrics.get(self.best_metric_key)
        if self._stopper.is_at_end() or self._num_evaluations[name] % FULL_EVERY == 0:
            return True
        if self._trainer.state.global_step == 0 or value is None or not math.isfinite(value):
            return False  # nothing is decided before the first step, nor by a number that is not finite
        return self._beats(value, self._best_on_subset)

    def _look_at_all(self, name: str, given: Given) -> EvalLoopOutput:
        """Evaluates all rows of a set, under names that say so; no random number of the run is drawn for it."""
        subset = self._subset(name)
        if subset.whole is None:
            subset.whole = self._make_loader(subset.dataset)
        with kept_random_states():
            given = (*given[:-1], full_key(given[-1]))
            output = self._one_pass(subset.whole, given, self._trainer.compute_metrics)
        return output

    # --- what Trainer decides by it ---------------------------------------------------------------------------------

    @property
    def best_metric_key(self) -> str:
        """`metric_for_best_model` as it is logged."""
        name = self._trainer.args.metric_for_best_model or ""
        return name if name.startswith("eval_") else f"eval_{name}"

    def _beats(self, value: float, best: float | None) -> bool:
        if best is None:
            return True
        return value > best if self._trainer.args.greater_is_better else value < best

    def _decide(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns what Trainer is to take for the evaluation: no metric under two names, those of all rows first.

        Where only the subset was looked at, or there is no finite number, `metric_for_best_model` is the best so far.
        """
        trainer = self._trainer
        key = self.best_metric_key
        best = trainer.state.best_metric
        full = {full_key(name) for name in metrics}
        decided = {name: metrics.get(full_key(name), value) for name, value in metrics.items() if name not in full}
        decided = {name: value for name, value in decided.items() if name not in self._added}
        is_of_subset = trainer.args.eval_subset is not None and full_key(key) not in metrics
        if trainer.args.metric_for_best_model is None or (metrics and key not in metrics):
            return decided  # Trainer says what there is
        if not metrics or is_of_subset or not can_be_best(key, decided, trainer.state.global_step):
            return {**decided, key: math.nan if best is None else best}
        if self._beats(decided[key], best):
            self._best_on_subset = metrics[key]
            trainer.control.should_save |= trainer.args.load_best_model_at_end and evaluates_apart(trainer.args)
        return decided

    # --- when -------------------------------------------------------------------------------------------------------

    def on_train_begin(self, *event: object, **kwargs: object) -> None:
        """Forgets the evaluations before.

        Raises:
            ArgumentError: with `eval_subset`, an `EarlyStoppingCallback`, which would compare other rows.
        """
        self._evaluated_step = None
        trainer = self._trainer
        compares = any(isinstance(one, EarlyStoppingCallback) for one in trainer.callback_handler.callbacks)
        if trainer.args.eval_subset is not None and compares:
            raise ArgumentError(
                "EarlyStoppingCallback compares the score of a subset with the best score of all rows: with "
                "--eval_subset use --early_stopping_patience, which compares the same rows."
            )

    def on_train_end(self, *event: object, **kwargs: object) -> None:
        """Clears a best metric that is not finite, such as what Trainer began to look for the best from."""
        state = self._trainer.state
        if state.best_metric is not None and not math.isfinite(state.best_metric):
            state.best_metric = None

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Skips the evaluations of epochs between, but never that of the run's end."""
        every = self._trainer.args.eval_every_epochs
        if args.eval_strategy == "epoch" and every is not None and round(state.epoch) % every != 0:
            control.should_evaluate = False
        is_asked_for = args.eval_strategy != "no" and (self._trainer.args.eval_subset is not None or every is not None)
        is_last = is_asked_for and self._stopper.is_at_end()
        if is_last and self._evaluated_step != state.global_step:
            control.should_evaluate = True
            # Else the best model would be one of which there is no checkpoint.
            control.should_save |= args.load_best_model_at_end and args.save_strategy != "best"


def full_key(key: str) -> str:
    """Names a metric of all rows: `eval_full_spearman`, or `eval_full_NAME_spearman` of one of several sets."""
    head, *tail = key.split("_", 1)
    return "_".join([head, "full", *tail])


def check_schedule(args: FastTrainingArguments, eval_dataset: object) -> None:
    """Refuses explicit requests that would do nothing or wrong; idle ones of a preset are passed over, with a line.

    Raises:
        ArgumentError: `eval_every_epochs` without evaluation by epoch, `eval_subset` without any evaluation or with
            what contradicts it.
    """
    idle = []
    if eval_dataset is None or args.eval_strategy == "no":
        idle.append(("eval_subset", "an evaluation set and --eval_strategy"))
    if args.eval_strategy != "epoch":
        idle.append(("eval_every_epochs", "--eval_strategy epoch"))
    for name, needed in idle:
        value = getattr(args, name)
        if value is not None and name in args.explicit_fields:
            raise ArgumentError(f"{name}={value}: does nothing without {needed}. Give that, or leave this out.")
        if value is not None:
            logger.info("%s=%s is passed over: it needs %s.", name, value, needed)
    if args.eval_subset is None:
        return
    if args.dataloader_drop_last:
        raise ArgumentError(
            f"dataloader_drop_last=True: with eval_subset={args.eval_subset} all rows of the subset are needed, also "
            "those of the last batch. Leave one of the two out."
        )
    names = eval_dataset if isinstance(eval_dataset, Mapping) else ()
    taken = [name for name in names if f"{name}_".startswith("full_")]
    if taken:
        raise ArgumentError(f"Evaluation set {taken[0]!r}: eval_full_* are the metrics of all rows. Call it otherwise.")
