"""The tasks that hf_ext trains models for, each behind one interface.

Whoever has to do with a run of any task (the command line, the doctor, report and card) asks the task; what is special
to one stands in its own folder. A new task is a folder with a `task.py` and a line in `TASKS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from .errors import ArgumentError
from .hardware import Hardware
from .sketch import Sketch
from .training_args import FastTrainingArguments

# Name, as `all_results.json` has it -> the module whose `TASK` it is; imported when asked for.
TASKS = {
    "affinity": "hf_ext.affinity.task",
    "masked_lm": "hf_ext.masked_lm.task",
    "generation": "hf_ext.generation.task",
    "pde_operator": "hf_ext.pde.task",
}


class Task(ABC):
    """What one kind of model asks for and sets.

    Attributes:
        name: in `all_results.json` and `TASKS`.
        recipe: the file in `recipes/` that trains it, without `.py`.
        arguments: dataclasses of its own arguments, in the order in which they are parsed; see `all_arguments`.
        defaults: training arguments that it sets where the user does not.
    """

    name: ClassVar[str]
    recipe: ClassVar[str]
    arguments: ClassVar[tuple[type, ...]]
    defaults: ClassVar[Mapping[str, Any]]

    @property
    def all_arguments(self) -> tuple[type, ...]:
        """`arguments`, then those of training."""
        return (*self.arguments, FastTrainingArguments)

    @abstractmethod
    def sketch(self, arguments: Sequence[Any], args: Any, hardware: Hardware) -> Sketch:
        """What a run would read, hold and compute; nothing is trained, downloaded or written.

        Args:
            arguments: an instance of each of `self.arguments`, which become what the run would make of them.
            args: `FastTrainingArguments`.
            hardware: where it would run.
        """


def find_task(name: str) -> Task:
    """The task of this name.

    Raises:
        ArgumentError: there is none, with the names of those that there are.
    """
    if name not in TASKS:
        raise ArgumentError(f"task={name!r}: tasks of this hf_ext are {', '.join(TASKS)}.")
    return import_module(TASKS[name]).TASK
