"""What every run does alike, whatever it trains: holds its folder, leaves its pages."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import TrainOutput

from ..arguments import FastArgumentParser
from ..checkpoints import run_folder
from ..data import MaskingEpochCallback, reads_text
from ..errors import ArgumentError, DataError, NotFiniteError
from ..evaluation import describe_failed, format_checked, raise_failed
from ..files import Facts, Json
from ..reporting import (
    ThroughputCallback,
    absolute_if_local,
    page_record,
    plot_loss,
    record_run,
    to_json,
    write_card,
    write_report,
)
from ..startup import phase
from ..text import start_run_log, write_json
from ..trainer import FastTrainer
from ..training_args import OWN_FIELDS, FastTrainingArguments, evaluates_apart

logger = logging.getLogger(__name__)


class Run:
    """One run of a task: its arguments, and what is done alike whatever it trains.

    Entered with `with`, it holds the output folder against other runs, writes `run.log` there, and sets the seed.

    Args:
        task: see `hf_ext.tasks`.
        parser: after parsing; it knows the command line and where each argument came from.
        parsed: an instance of each of `task.all_arguments`.

    Attributes:
        model_args: those of the task's first dataclass, of the model.
        data_args: `DataArguments`; None of a task that has none.
        args: `FastTrainingArguments`.
        explicit: names of the arguments that the user set.
        stage: which run this is, of a command that makes several.
        test_dataset: rows that the task will score; None until its `load` or `build` says them.
        is_last: False where another run of the command follows, so that its processes stay connected.
        shared: what several runs of a command have in common, by name.
        log: prints, and appends to `run.log`; only of the main process.
    """

    def __init__(self, task: Any, parser: FastArgumentParser, parsed: Sequence[Any]):
        self.task = task
        self.parser = parser
        self.explicit = parser.explicit
        self.model_args, *rest, self.args = parsed
        self.data_args: Any = rest[0] if rest else None
        self.stage = 1
        self.is_last = True
        self.shared: dict[str, Any] = {}
        if len(self.args.dollars_per_hour) > 1:
            raise ArgumentError("--dollars_per_hour: give one; a list is for several --device of hf-ext doctor.")
        self.log = logger
        self.test_dataset: Any = None
        self._entered = ExitStack()

    def __enter__(self) -> Run:
        """Begins the run.

        Raises:
            FolderError: another run is in the folder, or what is in it is not a run's.
            DiskFailure: the disk is full or broken.
        """
        with ExitStack() as entered:
            entered.enter_context(run_folder(self.args))
            self.log = start_run_log(self.args.output_dir, self.args.process_index == 0)
            set_seed(self.args.seed)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(str(self.args.output_dir))

    @phase("plan")
    def build_trainer(self, trainer_class: type[FastTrainer] = FastTrainer, **parts: Any) -> Any:
        """Builds the trainer, with its plan in the log.

        Or `transformers.Trainer` itself, of a task with `--stock_trainer`.

        Args:
            trainer_class: of yours, derived from `FastTrainer`.
            parts: what Trainer takes besides `args`, by name.

        Raises:
            ArgumentError: `--stock_trainer` beside an argument that stock Trainer does not have.
            PlanRefused: a request would do something else than asked.
        """
        if getattr(self.model_args, "stock_trainer", False):
            self.log.info("\nStock Trainer, no plan.\n")
            return build_stock_trainer(self.args, self.explicit, **parts)
        trainer = trainer_class(args=self.args, **parts)
        trainer.test_dataset = self.test_dataset
        self.log.info("\n%s\n", trainer.plan.table())
        return trainer

    def finish(self, trainer: FastTrainer, trained: TrainOutput, facts: Facts) -> Json:
        """Writes results, report and card into the output folder, pushes where that was asked for, ends the trainer.

        Args:
            trainer, trained: after training, and what `train` returned; stock Trainer's too.
            facts: JSON-able, what the task adds: its scores, their verdict, data. `model` is joined with what every
                model has; `requirements` are what the scores had to be, from `check_requirements`.

        Returns:
            What `all_results.json` holds.

        Raises:
            RequirementsFailed: a score is not as required; after everything else.
        """
        results = self._save_results(trainer, trained, facts)
        required = facts.get("requirements") or ()
        if required:
            self.log.info("\nRequired:\n%s\n", format_checked(required))
        if trainer.is_world_process_zero():
            write_report(self.folder)
            if self.task.has_card:
                write_card(self.folder, repo_id=trainer.hub_model_id)
        self.log.info("Report: %s/report.html; all else of the run is in that folder, too.", self.args.output_dir)
        if trainer.args.push_to_hub:
            trainer.push_to_hub()
        if self.is_last:
            trainer.end()
        else:
            trainer.close()
        raise_failed(describe_failed(required), f"Model and report are whole, in {self.args.output_dir}.")
        return results

    def _save_results(self, trainer: FastTrainer, trained: TrainOutput, facts: Facts) -> Json:
        """Writes `all_results.json` and `loss.png`; returns what the JSON holds."""
        settings = {**vars(self.model_args), **(vars(self.data_args) if self.data_args else {})}
        evaluations: Json = {}
        if isinstance(trainer, FastTrainer):
            decisions = trainer.stopping_decisions
            stopped = next((one["step"] for one in decisions if one["should_stop"]), None)
            patience = trainer.args.early_stopping_patience
            stopping = {"patience": patience, "stopped_at_step": stopped, "decisions": decisions}
            evaluations = {"alarms": trainer.collapse_alarms, "early_stopping": stopping if patience else None}
        of_task = {**evaluations, "task": self.task.name, **facts}
        results = to_json(record_run(trainer, trained, settings, self.parser.origins, self.parser.arguments, of_task))
        if (page := self.task.describe(results)) is not None:
            results["page"] = page_record(page)
        if trainer.is_world_process_zero():
            write_json(self.folder / "all_results.json", results)
            with plots_if_possible():
                plot_loss(trainer.state.log_history, self.folder / "loss.png")
        return results


def build_stock_trainer(args: FastTrainingArguments, explicit: frozenset[str], **parts: Any) -> Trainer:
    """Builds `transformers.Trainer` itself on the same data, masks and seed, with its throughput measured.

    Args:
        args: `FastTrainingArguments`.
        explicit: the fields that the user set.
        parts: what Trainer takes besides `args`, by name.

    Raises:
        ArgumentError: as `stock_arguments`.
    """
    collator = parts.get("data_collator")
    tokenizer = parts.get("processing_class", getattr(collator, "tokenizer", None))
    own = [MaskingEpochCallback(collator)] if hasattr(collator, "set_epoch") else []
    callbacks = [*parts.pop("callbacks", ()), *own, ThroughputCallback(parts["model"], tokenizer)]
    # Trainer removes columns that the model does not name, also those that a collator of text reads.
    removes = args.remove_unused_columns and not reads_text(collator)
    plain = stock_arguments(args, explicit, remove_unused_columns=removes)
    return Trainer(args=plain, callbacks=callbacks, **parts)


def stock_arguments(args: FastTrainingArguments, explicit: frozenset[str], **changed: object) -> TrainingArguments:
    """Makes plain `TrainingArguments` of `args`, for the stock Trainer.

    Args:
        args: `FastTrainingArguments`.
        explicit: the fields that the user set; a preset's speed-ups are left out, since a control has none.
        changed: what has another value there.

    Raises:
        ArgumentError: the user set what the stock Trainer does not have.
    """
    foreign = explicit & OWN_FIELDS.keys() - {"preset", "embedding_cache_dir"}
    asked = sorted(name for name in foreign if getattr(args, name) not in (None, False, [], "no"))
    if not isinstance(args.activation_checkpointing, bool):
        asked.append(f"activation_checkpointing {args.activation_checkpointing}")
    if asked:
        raise ArgumentError(f"--stock_trainer has none of {', '.join(asked)}: leave them out, or train without it.")
    if args.load_best_model_at_end and evaluates_apart(args):
        raise ArgumentError("--stock_trainer finds the best model only where it saves: give --save_strategy epoch.")
    values = {spec.name: getattr(args, spec.name) for spec in dataclasses.fields(TrainingArguments) if spec.init}
    # On a machine without a GPU it takes bf16 only together with `use_cpu`.
    return TrainingArguments(**{**values, "use_cpu": args.device.type == "cpu", **changed})


def check_scored(values: ArrayLike, split: str) -> None:
    """Refuses to score predictions that are no numbers, as of a model that diverged under stock Trainer.

    Args:
        values: (n, columns), what each row is scored by.
        split: which rows, in words.

    Raises:
        NotFiniteError: some are NaN or infinite.
    """
    finite: Any = np.isfinite(np.asarray(values, np.float64)).all(1)
    if not finite.all():
        raise NotFiniteError(
            f"{(~finite).sum():,} of {len(finite):,} {split} rows have errors that are NaN or infinite: no score. "
            "Usual causes: a learning rate that is too high, float16 that overflows. Train again with a lower "
            "--learning_rate, into another --output_dir."
        )


def with_absolute_path(facts: Facts, name: str) -> Json:
    """Returns `facts` with its entry `name`, a path or a Hub id, as an absolute path where it is one."""
    return {**facts, name: absolute_if_local(facts[name])}


@contextmanager
def plots_if_possible() -> Iterator[None]:
    """Says in the log what cannot be plotted: a run too short to log, or one that diverged, still has its results."""
    try:
        yield
    except DataError as error:
        logger.warning("Not plotted: %s", error)
