"""Rows of an epoch, from seed and epoch alone: similar lengths together; and batches dealt evenly to processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler
from transformers import trainer_pt_utils


class LengthGroupedSampler(trainer_pt_utils.LengthGroupedSampler):
    """Yields every row number once per epoch, rows of similar length together, as transformers' sampler does.

    That one draws from the process's random state, so that a resumed run sees other batches from its second epoch on
    (transformers 5.23). This one draws from (seed, epoch): all processes and a resumed run see the same order.

    Args:
        lengths: (rows,), of each row.
        group_size: rows that are sorted together are a multiple of this; rows of one optimizer step.
        seed: not negative; the same on all processes.

    Cost: one sort of the rows per epoch, about 0.5 s per million.
    """

    def __init__(self, lengths: list[int], group_size: int, seed: int):
        super().__init__(group_size, lengths=lengths)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        (drawn,) = np.random.SeedSequence([self.seed, self.epoch]).generate_state(1, np.uint64)
        self.generator = torch.Generator().manual_seed(int(drawn))
        return super().__iter__()


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
        rows_per_batch: rows per process and batch.
        world_size: number of processes.
    """

    batch_size = None  # Accelerate: it is to complete nothing
    drop_last = False

    def __init__(self, sampler: object, rows_per_batch: int, world_size: int):
        self.sampler: Any = sampler  # Accelerate replaces a random one by one that it seeds by epoch
        self.rows_per_round = rows_per_batch * world_size
        self.world_size = world_size

    @property
    def num_repeated(self) -> int:
        """Batches at the very end, one a process, that hold a repeated row only."""
        left = len(self.sampler) % self.rows_per_round
        return max(0, self.world_size - left) if left else 0

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.rows_per_round) * self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        rows = iter(self.sampler)
        while of_all := list(islice(rows, self.rows_per_round)):
            each, more = divmod(len(of_all), self.world_size)
            ends = [each * (process + 1) + min(process + 1, more) for process in range(self.world_size)]
            for start, end in zip([0, *ends], ends):
                yield of_all[start:end] or of_all[:1]
