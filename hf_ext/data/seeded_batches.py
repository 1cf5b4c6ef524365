"""Batches whose random numbers, where workers draw any, depend on the place in the run alone."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from .random_states import generators_of, seed_generator
from .repeatable_loaders import base_of

MAX_WRAPPED = 5  # objects around one another that are looked at for generators


class NumberedBatch(list):
    """Row numbers (or rows) of a batch. `place`: its epoch, and its number among this process's batches of it."""

    place: tuple[int, int]


class NumberedBatches(Sampler):
    """Yields the batches of another batch sampler as `NumberedBatch`; all else is that sampler's.

    Those for training count from epoch 1, which is Trainer's 0. Every evaluation is the same: epoch 0.
    """

    def __init__(self, batches: Any, is_training: bool):
        self.batches, self.is_training, self.epoch = batches, is_training, int(is_training)

    def __iter__(self) -> Iterator[NumberedBatch]:
        for number, rows in enumerate(self.batches):
            batch = NumberedBatch(rows)
            batch.place = (self.epoch, number)
            yield batch

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        if name == "batches":  # not there yet, while it is copied
            raise AttributeError(name)
        return getattr(self.batches, name)

    def set_epoch(self, epoch: int) -> None:
        """Counts the next batches as those of `epoch`, if they are for training."""
        self.epoch = epoch + 1 if self.is_training else 0
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)


class SeededRows(Dataset):
    """Rows of another dataset; in a worker, each batch begins with generators that are seeded by its place.

    What rows and collator draw in a worker is then a function of seed, process, epoch and batch: the same with any
    number of workers, however long they live, and after a resume in the middle of an epoch. (torch seeds a worker once;
    from there its draws depend on the batches it happened to make.) So are generators that rows and collator have as
    attributes.
    """

    def __init__(self, rows: Any, seed: int, rank: int, collator: Any = None):
        self.rows, self.seed, self.rank, self.collator = rows, seed, rank, collator

    def __len__(self) -> int:
        return len(self.rows)

    def __getattr__(self, name: str) -> Any:
        if name == "rows":  # not there yet, while it is copied to a worker
            raise AttributeError(name)
        return getattr(self.rows, name)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __getitems__(self, batch: NumberedBatch) -> Any:
        """The rows of a batch, to be collated next. Cost: about 20 us."""
        if get_worker_info() is not None:
            entropy = [self.seed, self.rank, *batch.place]
            seed_all(entropy)
            for number, generator in enumerate(generators_of(*_insides(self.rows), *_insides(self.collator))):
                seed_generator(generator, [*entropy, number + 1])
        fetch = getattr(self.rows, "__getitems__", None)
        return fetch(batch) if fetch else [self.rows[index] for index in batch]


def _insides(outer: Any) -> list[Any]:
    """`outer` and what it wraps, outermost first: a collator without its columns, a method, part of a data set."""
    insides: list[Any] = []
    while outer is not None and len(insides) < MAX_WRAPPED:
        insides.append(outer)
        # transformers makes the generator of a collator that has a seed with its first batch, hence unseeded; since
        # 5.24 also anew where it came from another process.
        if getattr(outer, "seed", None) is not None:
            held = vars(outer)
            if held.get("generator", outer) is None or held.get("_generator_pid", os.getpid()) != os.getpid():
                getattr(outer, "create_rng", lambda: None)()
        outer = _unwrap(outer)
    return insides


def _unwrap(outer: Any) -> Any:
    if isinstance(outer, partial):
        return outer.func
    if isinstance(outer, MethodType):
        return outer.__self__
    held = getattr(outer, "__dict__", {})
    return held.get("data_collator", held.get("dataset"))


def seed_all(entropy: list[int]) -> None:
    """Seeds the generators of Python, NumPy and torch's CPU with a mix of numbers of 0 or more."""
    low, high = (int(word) for word in np.random.SeedSequence(entropy).generate_state(2))
    torch.manual_seed(high << 32 | low)
    random.seed(high << 32 | low)
    np.random.seed(low)  # noqa: NPY002  the generator that libraries draw from


def seed_batches(loader: Any, seed: int, rank: int, is_training: bool) -> Any:
    """`loader`, of batches of a table or of passed rows, with workers that draw by place; without workers, as it is."""
    base = base_of(loader)
    has_places = isinstance(base, DataLoader) and not isinstance(base.dataset, IterableDataset | SeededRows)
    # Workers that live already, of a loader of the user's, have the rows as they were.
    if has_places and base.num_workers and base.batch_sampler is not None and base._iterator is None:
        batches = NumberedBatches(base.batch_sampler, is_training)
        # torch allows no such change by assignment; nothing was read yet.
        vars(base).update(dataset=SeededRows(base.dataset, seed, rank, base.collate_fn), batch_sampler=batches)
    return loader
