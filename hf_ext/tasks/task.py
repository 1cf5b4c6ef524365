"""The tasks that hf_ext trains models for, each behind one interface.

Whoever has to do with a run of any task (the command line, recipes, the doctor, report and card) asks the task; what is
special to one stands in its own folder. A new task is a folder with a `task.py` and a line in `TASKS`; one of a script
is a class there (`recipes/examples/causal_lm.py`; `recipes/examples/pde_operator/` has all that a task can say).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from ..arguments import parse_command
from ..errors import ArgumentError
from ..files import Facts, Json
from ..startup import begin_phases, phase, quick_imports
from ..training_args import FastTrainingArguments

if TYPE_CHECKING:
    from transformers.trainer_utils import TrainOutput

    from ..hardware import Hardware
    from ..reporting import Page
    from ..trainer import FastTrainer
    from .dry_run import DryRun
    from .running import Run

# Name, as `all_results.json` has it -> the module whose `TASK` it is; imported when asked for.
TASKS = {
    "affinity": "hf_ext.property.task",
    "masked_lm": "hf_ext.masked_lm.task",
    "generation": "hf_ext.generation.task",
}
# What tasks set alike, of training arguments that the user does not: all speed-ups that leave learning as it is, a run
# that goes on where it was, and neither tracker nor upload while it trains.
USUAL: Facts = {
    "preset": "max_speed",
    "weight_decay": 0.01,
    "warmup_steps": 0.05,
    "save_total_limit": 2,
    "resume": "auto",
    "logging_nan_inf_filter": False,
    "report_to": "none",
    "hub_strategy": "end",
}


class Task:
    """What one kind of model asks for and sets, and the steps of its runs; `main` is all of them::

        with task.parse() as run:                     # the command line; a folder of its own, a log, the seed
            data = task.load(run)                     # rows, cleaned and split
            parts = task.build(run, data)             # model, collator, metrics: what Trainer takes by name
            trainer = run.build_trainer(**parts)      # FastTrainer, with its plan
            trained = task.train(run, trainer, data)
            task.save(run, trainer)
            facts = task.score(run, trainer, trained, data)
            results = run.finish(trainer, trained, facts)     # all_results.json, report, card, push

    The docstring of the class is what `--help` says. Steps import what they need when they are called, so that `--help`
    waits for no model code.

    Attributes:
        name: in `all_results.json` and `TASKS`.
        arguments: dataclasses of its own arguments, in the order in which they are parsed; see `all_arguments`.
        defaults: training arguments that it sets where the user does not.
        has_card: whether a run leaves a model card beside its report.
    """

    name: ClassVar[str]
    arguments: ClassVar[tuple[type, ...]]
    defaults: ClassVar[Facts]
    has_card: ClassVar[bool] = True

    @property
    def all_arguments(self) -> tuple[type, ...]:
        """`arguments`, then those of training."""
        return (*self.arguments, FastTrainingArguments)

    def parse(self, argv: Sequence[str] | None = None) -> Run:
        """Parses a command line to a run, which is entered with `with`.

        Args:
            argv: the words of the command line; None takes the process's own.

        Raises:
            ArgumentError: a flag or value that is not allowed, or what `check` refuses.
        """
        begin_phases()
        parser, parsed = parse_command(self.all_arguments, self.defaults, inspect.getdoc(type(self)), argv)
        with quick_imports():
            from .running import Run

        run = Run(self, parser, parsed)
        self.check(run)
        return run

    def check(self, run: Run) -> None:
        """Refuses arguments that contradict each other, before a folder is touched.

        Raises:
            ArgumentError: with the argument and what to change.
        """
        if self.name in TASKS:
            self._find("steps", "check")(run)

    def load(self, run: Run) -> Any:
        """Loads the data of a run; only the steps below know what it is. Without a `dataset_name` what it generates."""
        return self._find("steps", "load")(run)

    def build(self, run: Run, data: Any) -> dict[str, Any]:
        """Builds what Trainer takes, by name: `model`, `data_collator`, `train_dataset`, `eval_dataset` and so on."""
        return self._find("steps", "build")(run, data)

    @phase("train")
    def train(self, run: Run, trainer: FastTrainer, data: Any) -> TrainOutput:
        """Trains, from a checkpoint where there is one; returns what `trainer.train` does, with its `metrics`."""
        return trainer.train(resume_from_checkpoint=run.args.resume_from_checkpoint)

    def save(self, run: Run, trainer: FastTrainer) -> None:
        """Saves the model and the Trainer's state into the output folder."""
        trainer.save_model()
        trainer.save_state()

    def score(self, run: Run, trainer: FastTrainer, trained: TrainOutput, data: Any) -> Json:
        """Scores the trained model on held-out rows, beside baselines, and says so in the log.

        Returns:
            What `all_results.json` says of it, JSON-able; see `Run.finish`.
        """
        return self._find("steps", "score")(run, trainer, trained, data)

    def describe(self, results: Facts) -> Page | None:
        """Describes a run for report and card where its task has something to say; None: what they say of any run.

        Args:
            results: as `all_results.json` will hold them.
        """
        if self.name not in TASKS:
            return None
        from ..reporting import RunRecord, from_json

        return self._find("describing", "describe")(from_json(RunRecord, results))

    def dry_run(self, arguments: Sequence[Any], args: FastTrainingArguments, hardware: Hardware) -> DryRun:
        """Describes what a run would read, hold and compute; nothing is trained, downloaded or written.

        Args:
            arguments: an instance of each of `self.arguments`, which become what the run would make of them.
            args: `FastTrainingArguments`.
            hardware: where it would run.
        """
        return self._find("dry_run", "make_dry_run")(*arguments, args, hardware)

    def main(self, argv: Sequence[str] | None = None) -> Json:
        """Runs all steps, as `hf-ext` does; returns what `all_results.json` holds.

        Raises:
            RequirementsFailed: a score is not as `--require` asks; everything was written before.
        """
        with self.parse(argv) as run:
            return self.take_steps(run)

    def take_steps(self, run: Run) -> Json:
        """Takes the steps of a run that was entered, one after the other."""
        data = self.load(run)
        trainer = run.build_trainer(**self.build(run, data))
        trained = self.train(run, trainer, data)
        self.save(run, trainer)
        return run.finish(trainer, trained, self.score(run, trainer, trained, data))

    def _find(self, module: str, function: str) -> Callable[..., Any]:
        """Finds a step beside the `task.py` of a task of hf_ext, as a phase; a script's own class has it itself."""
        folder = TASKS[self.name].rpartition(".")[0]
        return phase(function)(getattr(import_module(f"{folder}.{module}"), function))


def find_task(name: str) -> Task:
    """Finds the task of this name.

    Raises:
        ArgumentError: there is none, with the names of those that there are.
    """
    if name not in TASKS:
        raise ArgumentError(f"task={name!r}: tasks of this hf_ext are {', '.join(TASKS)}.")
    return import_module(TASKS[name]).TASK
