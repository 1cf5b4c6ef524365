"""Which rows of the training data a step was made of, in words, for messages."""

from __future__ import annotations

from itertools import islice
from typing import Any

from ..data.columns import has_numbered_rows
from ..data.streams import PassedRows
from ..training_args import FastTrainingArguments


def name_rows(
    args: FastTrainingArguments, loader: Any, batches: list[int], first: int, epoch: int, is_own_loader: bool
) -> str:
    """Names the rows of some micro-batches of an epoch. Cost: draws the epoch's order again.

    Args:
        loader: of the training data, as Accelerate prepared it.
        batches: micro-batches of the step, from 0.
        first: number of micro-batches of the epoch before the step.
        is_own_loader: whether the user's own class made the loader; its batches have numbers, not its rows.
    """
    if isinstance(loader.dataset, PassedRows):
        size = args.per_device_train_batch_size
        starts = [((first + i) * args.world_size + args.process_index) * size for i in batches]
        return "rows " + ", ".join(f"{start} to {start + size - 1}" for start in starts) + " since the stream began"
    if is_own_loader or not has_numbered_rows(loader.dataset):
        return f"micro-batches {', '.join(str(first + i) for i in batches)} of the epoch"
    loader.set_epoch(epoch)
    drawn = [*islice(loader.batch_sampler, first, first + batches[-1] + 1)]
    return "rows " + "; ".join(", ".join(map(str, drawn[i])) for i in batches) + " of the training data"
