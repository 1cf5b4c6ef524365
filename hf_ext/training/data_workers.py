"""Data workers: one that dies is named, and none outlives its trainer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainingArguments

from ..data.repeatable_loaders import base_of
from ..data.worker_deaths import BROKEN, find_death
from ..errors import DataWorkerDied


class DataWorkers:
    """Ends workers with the trainer, also those of an epoch that an exception broke off.

    Args:
        args: of the run.
        trainer: whose checkpoints there are.
    """

    def __init__(self, args: TrainingArguments, trainer: Any):
        self._args, self._trainer = args, trainer
        self._epoch: Any = None

    @contextmanager
    def naming_deaths(self) -> Iterator[None]:
        """Within it, a worker that was killed, or whose process ended, is an error that says so.

        Raises:
            DataWorkerDied: with what it died of, and where the run can go on.
        """
        try:
            yield
        except BROKEN as error:
            num_workers = self._args.dataloader_num_workers
            try:
                death = find_death(error, num_workers)
            except RuntimeError as later:  # torch's signal handler speaks when it hears of it, in here too
                death = find_death(later, num_workers)
            if death is None:
                raise
            raise DataWorkerDied(
                f"{death.text} {self._name_newest()} The same command with --resume auto (the recipes' default) goes "
                f"on. {death.advice}"
            ) from error

    def _name_newest(self) -> str:
        own = self._trainer.checkpoints.checkpoints()
        return f"{own[-1].path.name} is the last one saved, and valid." if own else "No checkpoint was saved yet."

    def note(self, epoch: Iterator[Any]) -> None:
        """Keeps the iterator of an epoch: of a resumed run's first one, nothing else leads to the loader."""
        self._epoch = epoch

    def end(self, loaders: Iterable[Any]) -> None:
        """Ends workers that live on: persistent ones, and those that the frames of an exception hold on to.

        Left to the garbage collector with its trainer, each costs 5 seconds (torch 2.13, `_shutdown_workers`: its
        queue went first).

        Args:
            loaders: that Accelerate prepared.
        """
        iterators = []
        for loader in loaders:
            base = base_of(loader)
            iterators += [base._iterator, *getattr(base, "iterators", ())]
            base._iterator = None
        if inspect.isgenerator(self._epoch) and self._epoch.gi_frame is not None:
            iterators.append(inspect.getgeneratorlocals(self._epoch).get("dataloader_iter"))
        self._epoch = None
        for iterator in iterators:
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
