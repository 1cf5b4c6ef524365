"""An epoch dealt to several processes: every row once, as many batches for each, the steps of one process."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any

from torch.utils.data import Sampler

from ..errors import ArgumentError


class RepeatedRows(dict):
    """A batch that keeps its process in step at the end of an epoch: its rows are another's, so they count nothing."""


class EvenBatchSampler(Sampler[list[int]]):
    """Yields the batches of all processes in turn, as Accelerate's `BatchSamplerShard` deals them.

    Where an epoch does not divide, Accelerate repeats rows from its beginning. Here the rows that are left over are
    shared out as evenly as they divide, so that every row comes once, and an optimizer step holds the same rows on any
    number of processes whose batches, processes and accumulation multiply to the same. If there are fewer left than
    processes, the last `num_repeated` processes get a row that another has: the loss has to leave it out (see
    `RepeatedRows`).

    Args:
        sampler: row numbers of an epoch, with a length; the same on all processes.
        rows_per_batch: rows per process and batch, at least 1.
        world_size: number of processes.

    Raises:
        ArgumentError: a number below 1.
    """

    batch_size = None  # Accelerate: it is to complete nothing
    drop_last = False

    def __init__(self, sampler: Any, rows_per_batch: int, world_size: int):
        for name, value in (("rows_per_batch", rows_per_batch), ("world_size", world_size)):
            if value < 1:
                raise ArgumentError(f"{name}={value}: must be at least 1.")
        self.sampler: Any = sampler  # Accelerate replaces a random one by one that it seeds by epoch
        self.rows_per_batch, self.world_size = rows_per_batch, world_size

    @property
    def num_repeated(self) -> int:
        """Batches at the very end, one a process, that hold a repeated row only."""
        left = self._num_rows() % (self.rows_per_batch * self.world_size)
        return max(0, self.world_size - left) if left else 0

    def _num_rows(self) -> int:
        sampler: Sized = self.sampler
        return len(sampler)

    def __len__(self) -> int:
        return -(-self._num_rows() // (self.rows_per_batch * self.world_size)) * self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        rows = iter(self.sampler)
        while of_all := list(islice(rows, self.rows_per_batch * self.world_size)):
            each, more = divmod(len(of_all), self.world_size)
            start = 0
            for process in range(self.world_size):
                end = start + each + (process < more)
                yield of_all[start:end] or of_all[:1]
                start = end
