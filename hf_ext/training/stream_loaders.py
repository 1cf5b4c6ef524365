"""Loaders of streams: training reads pass after pass from a position that is known, evaluation each row once."""

from __future__ import annotations

import logging
from typing import Any

from accelerate.utils import gather_object
from torch.utils.data import DataLoader

from ..data.masking import EPOCH_COLUMN
from ..data.streams import CountedRows, PassedRows, StreamBatchSampler, StreamPassSampler, count_rows
from ..errors import DataError
from ..training_args import FastTrainingArguments
from .loader_request import LoaderRequest

logger = logging.getLogger(__name__)


class StreamLoaders:
    """Every process reads a stream in full and collates its share of the rows, so that no number of shards matters.

    Attributes:
        resumed_at: the position in the checkpoint that the run continues; None where it did not say.
    """

    def __init__(self, args: FastTrainingArguments):
        self._args = args
        self.resumed_at: dict[str, Any] | None = None
        self._sampler: StreamBatchSampler | None = None
        self._batches_before: int | None = None  # batches of the run that the sampler did not count
        self._counted: dict[int, tuple[Any, int]] = {}  # id of a stream -> itself, so that its id stays taken; its rows

    def forget(self) -> None:
        """Another training set is loaded from here on."""
        self._sampler = None

    def train(self, request: LoaderRequest) -> DataLoader:
        """Reads pass after pass in one long epoch; `position` says how far."""
        args = self._args
        if "epoch" in (args.eval_strategy, args.save_strategy, args.logging_strategy):
            logger.warning("A training stream is one epoch, however many passes: what happens per epoch, happens last.")
        masks_by_epoch = hasattr(request.collator, "set_epoch")  # and loaders fetch ahead, into the next pass
        self._sampler = StreamBatchSampler(
            request.dataset,
            request.batch_size,
            pass_column=EPOCH_COLUMN if masks_by_epoch else None,
            num_remembered=_num_batches_ahead(args),
            world_size=args.world_size,
        )
        self._batches_before = None
        return request.make(args, PassedRows(), self._sampler)

    def evaluation(self, request: LoaderRequest) -> DataLoader:
        """Of several processes: the stream is counted first; then every row is looked at once, in order.

        Raises:
            DataError: processes read different rows.
        """
        # Accelerate 1.15 joins the batches of all processes, also those of unequal width, and takes out no row that it
        # repeated, because the stream has no length.
        stream = request.dataset
        if id(stream) not in self._counted:
            counts = gather_object([count_rows(stream)])
            if len(set(counts)) > 1:
                raise DataError(
                    f"The processes read different rows of the evaluation stream ({[n for n, _ in counts]}): every one "
                    "reads all of it and looks at its share. Leave split_dataset_by_node and shuffles without a seed "
                    "out, or read it into memory (list(stream)) beforehand."
                )
            self._counted[id(stream)] = (stream, counts[0][0])
        num_rows = self._counted[id(stream)][1]
        sampler = StreamPassSampler(stream, num_rows, request.batch_size)
        return request.make(self._args, CountedRows(num_rows), sampler)

    def position(self, step: int) -> dict[str, Any] | None:
        """Where the training stream stands after optimizer step `step`, for JSON; None for other data.

        Before the first epoch, the position in the checkpoint that the run continues; None where it did not say:
        Trainer then drops batches.
        """
        if self._sampler is None:
            return None
        if self._batches_before is None:
            return self.resumed_at
        return self._sampler.state_dict(self._num_batches(step) - self._batches_before)

    def begin_epoch(self, step: int, num_dropped: int | None) -> None:
        """A stream whose position is known is not read again for the batches that Trainer drops.

        Args:
            step: optimizer steps of the run so far.
            num_dropped: batches of this process that Trainer drops; None unless the run is resumed in this epoch.
        """
        if self._sampler is None:
            return
        dropped = (num_dropped or 0) * self._args.world_size
        self._batches_before = self._num_batches(step) - dropped
        if dropped and self.resumed_at is not None:
            known = {} if {"data", "all"}.isdisjoint(self._args.allow_changed) else {"last_row": None}
            self._sampler.load_state_dict({**self.resumed_at, **known}, dropped)

    def _num_batches(self, step: int) -> int:
        """Batches of all processes in the optimizer steps of the run, as many as Trainer would drop."""
        return step * self._args.gradient_accumulation_steps * self._args.world_size


def _num_batches_ahead(args: FastTrainingArguments) -> int:
    """Batches, over all processes, that loaders and Trainer may have fetched beyond the last optimizer step."""
    loaded = args.dataloader_num_workers * (args.dataloader_prefetch_factor or 2) + 2  # Accelerate fetches one more
    return args.world_size * (loaded + 2 * args.gradient_accumulation_steps)
