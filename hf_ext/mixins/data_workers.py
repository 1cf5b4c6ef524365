"""Data workers: one that dies is named, and none outlives its trainer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..data.repeatable_loaders import base_of
from ..data.worker_deaths import BROKEN, find_death
from ..errors import DataWorkerDied


class DataWorkersMixin:
    """Ends workers with the trainer, also those of an epoch that an exception broke off.

    Raises (while training or evaluating):
        DataWorkerDied: a worker was killed, or its process ended.
    """

    args: Any
    accelerator: Any
    checkpoints: Any
    _epoch_iterator: Any = None

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._naming_deaths():
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer."""
        with self._naming_deaths():
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _naming_deaths(self) -> Iterator[None]:
        try:
            yield
        except BROKEN as error:
            death = find_death(error, self.args.dataloader_num_workers)
            if death is None:
                raise
            raise DataWorkerDied(
                f"{death.text} {self._name_newest()} The same command with --resume auto (the recipes' default) goes "
                f"on. {death.advice}"
            ) from error

    def _name_newest(self) -> str:
        own = self.checkpoints.checkpoints()
        return f"{own[-1].path.name} is the last one saved, and valid." if own else "No checkpoint was saved yet."

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; of a resumed run's first epoch, nothing else leads to the loader."""
        self._epoch_iterator = epoch_iterator
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)  # type: ignore[misc]

    def _end_workers(self) -> None:
        """Ends workers that live on: persistent ones, and those that the frames of an exception hold on to.

        Left to the garbage collector with its trainer, each costs 5 seconds (torch 2.13, `_shutdown_workers`: its
        queue went first).
        """
        iterators = []
        for loader in self.accelerator._dataloaders:
            base = base_of(loader)
            iterators += [base._iterator, *getattr(base, "iterators", ())]
            base._iterator = None
        if inspect.isgenerator(self._epoch_iterator) and self._epoch_iterator.gi_frame is not None:
            iterators.append(inspect.getgeneratorlocals(self._epoch_iterator).get("dataloader_iter"))
        self._epoch_iterator = None
        for iterator in iterators:
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
