"""Loaders of streams: training reads pass after pass from a position that is known, evaluation each row once."""

from __future__ import annotations

import logging
from typing import Any

from accelerate.utils import gather_object

from ..data.masking import EPOCH_COLUMN
from ..data.streams import CountedRows, StreamBatchSampler, StreamPassSampler, count_rows
from ..errors import DataError

logger = logging.getLogger(__name__)


class TrainingStream:
    """A training stream in one long epoch of pass after pass, and where it stands.

    Every process reads it in full and collates its share of the rows, so that no number of shards matters.

    Attributes:
        sampler: yields its batches.
    """

    def __init__(self, stream: Any, batch_size: int, collator: Any, args: Any):
        if "epoch" in (args.eval_strategy, args.save_strategy, args.logging_strategy):
            logger.warning("A training stream is one epoch, however many passes: what happens per epoch, happens last.")
        # Batches, over all processes, that loaders and Trainer may have fetched beyond the last optimizer step.
        loaded = args.dataloader_num_workers * (args.dataloader_prefetch_factor or 2) + 2  # accelerate fetches one more
        masks_by_epoch = hasattr(collator, "set_epoch")  # and loaders fetch ahead, into the next pass
        self.sampler = StreamBatchSampler(
            stream,
            batch_size,
            pass_column=EPOCH_COLUMN if masks_by_epoch else None,
            num_remembered=args.world_size * (loaded + 2 * args.gradient_accumulation_steps),
            world_size=args.world_size,
        )
        self._args = args
        self._batches_before: int | None = None  # of the run, that the sampler did not count; None before it begins

    def begin(self, step: int, position: dict[str, Any] | None) -> None:
        """The run begins after `step` optimizer steps, at `position` where that is known.

        Where it is not, Trainer reads and drops what it has seen; with `ignore_data_skip` the first row comes next.
        """
        skips = step and not self._args.ignore_data_skip
        self._batches_before = 0 if skips else self._num_batches(step)
        if skips and position is not None:
            unchecked = {} if {"data", "all"}.isdisjoint(self._args.allow_changed) else {"last_row": None}
            self.sampler.load_state_dict({**position, **unchecked}, self._num_batches(step))

    def position(self, step: int) -> dict[str, Any] | None:
        """After `step` optimizer steps, for JSON; None before the run begins."""
        if self._batches_before is None:
            return None
        return self.sampler.state_dict(self._num_batches(step) - self._batches_before)

    def _num_batches(self, step: int) -> int:
        """Batches of all processes in the optimizer steps of the run, as many as Trainer would drop."""
        return step * self._args.gradient_accumulation_steps * self._args.world_size


def read_together(
    stream: Any, batch_size: int, counted: dict[int, tuple[Any, int]]
) -> tuple[CountedRows, StreamPassSampler]:
    """Rows and batches of an evaluation stream on several processes: counted once, then each row once and in order.

    Args:
        counted: streams that were counted, with their rows; this one is added.

    Raises:
        DataError: processes read different rows.
    """
    # Accelerate 1.15 joins the batches of all processes, also those of unequal width, and takes out no row that it
    # repeated, because the stream has no length.
    if id(stream) not in counted:
        counts = gather_object([count_rows(stream)])
        if len(set(counts)) > 1:
            raise DataError(
                f"The processes read different rows of the evaluation stream ({[n for n, _ in counts]}): every one "
                "reads all of it and looks at its share. Leave split_dataset_by_node and shuffles without a seed "
                "out, or read it into memory (list(stream)) beforehand."
            )
        counted[id(stream)] = (stream, counts[0][0])
    num_rows = counted[id(stream)][1]
    return CountedRows(num_rows), StreamPassSampler(stream, num_rows, batch_size)
