"""Streams inside a Trainer: training reads pass after pass from a position that is known, evaluation each row once."""

from __future__ import annotations

import logging
from typing import Any

from accelerate.utils import gather_object
from torch.utils.data import DataLoader

from ..data.masking import EPOCH_COLUMN
from ..data.streams import CountedRows, PassedRows, StreamBatchSampler, StreamPassSampler, count_rows
from ..errors import DataError

logger = logging.getLogger(__name__)


class StreamLoadingMixin:
    """Every process reads a stream in full and collates its share of the rows, so that no number of shards matters.

    Training streams are read by a `StreamBatchSampler`, pass after pass in one long epoch; `data_position` says how
    far. On several processes a stream to evaluate is counted first; then every row is looked at once, in order.

    Raises (when evaluation starts):
        DataError: processes read different rows of the stream.
    """

    args: Any
    accelerator: Any
    data_collator: Any
    state: Any
    _resume_position: dict[str, Any] | None = None  # from a checkpoint; whoever resumes sets it before training
    _stream_sampler: StreamBatchSampler | None = None
    _batches_before: int | None = None  # batches of the run that the stream sampler did not count

    def forget_stream(self) -> None:
        """Another training set is loaded from here on."""
        self._stream_sampler = None

    def _get_stream_dataloader(self, stream: Any, description: str, batch_size: int) -> DataLoader:
        if "epoch" in (self.args.eval_strategy, self.args.save_strategy, self.args.logging_strategy):
            logger.warning("A training stream is one epoch, however many passes: what happens per epoch, happens last.")
        masks_by_epoch = hasattr(self.data_collator, "set_epoch")  # and loaders fetch ahead, into the next pass
        self._stream_sampler = StreamBatchSampler(
            stream,
            batch_size,
            pass_column=EPOCH_COLUMN if masks_by_epoch else None,
            num_remembered=_num_batches_ahead(self.args),
            world_size=self.args.world_size,
        )
        self._batches_before = None
        return self._make_loader(PassedRows(), self._stream_sampler, description)  # type: ignore[attr-defined]

    def _get_stream_eval_dataloader(self, stream: Any, description: str, batch_size: int) -> DataLoader:
        # Accelerate 1.15 joins the batches of all processes, also those of unequal width, and takes out no row that it
        # repeated, because the stream has no length.
        known = self.__dict__.setdefault("_counted_streams", {})
        if id(stream) not in known:
            counts = gather_object([count_rows(stream)])
            if len(set(counts)) > 1:
                raise DataError(
                    f"The processes read different rows of the evaluation stream ({[n for n, _ in counts]}): every one "
                    "reads all of it and looks at its share. Leave split_dataset_by_node and shuffles without a seed "
                    "out, or read it into memory (list(stream)) beforehand."
                )
            known[id(stream)] = (stream, counts[0][0])  # holding the stream keeps its id taken
        num_rows = known[id(stream)][1]
        sampler = StreamPassSampler(stream, num_rows, batch_size)
        return self._make_loader(CountedRows(num_rows), sampler, description)  # type: ignore[attr-defined]

    def data_position(self) -> dict[str, Any] | None:
        """Where the training stream stands after the last optimizer step, for JSON; None for other data.

        None too where a resumed run has not begun and the checkpoint did not say: Trainer then drops batches.
        """
        if self._stream_sampler is None:
            return None
        if self._batches_before is None:
            return self._resume_position
        return self._stream_sampler.state_dict(self._num_batches_trained() - self._batches_before)

    def _num_batches_trained(self) -> int:
        """Batches of all processes in the optimizer steps of the run, as many as Trainer would drop."""
        return self.state.global_step * self.args.gradient_accumulation_steps * self.args.world_size

    def _run_epoch(self, **kwargs: Any) -> None:
        """As in Trainer; a stream whose position is known is not read again for the batches that Trainer drops."""
        if self._stream_sampler is not None:
            resumed = kwargs["resume_from_checkpoint"] is not None and kwargs["epoch"] == kwargs["epochs_trained"]
            dropped = kwargs["steps_trained_in_current_epoch"] * self.args.world_size if resumed else 0
            self._batches_before = self._num_batches_trained() - dropped
            if dropped and self._resume_position is not None:
                known = {} if {"data", "all"}.isdisjoint(self.args.allow_changed) else {"last_row": None}
                self._stream_sampler.load_state_dict({**self._resume_position, **known}, dropped)
        super()._run_epoch(**kwargs)  # type: ignore[misc]


def _num_batches_ahead(args: Any) -> int:
    """Batches, over all processes, that loaders and Trainer may have fetched beyond the last optimizer step."""
    loaded = args.dataloader_num_workers * (args.dataloader_prefetch_factor or 2) + 2  # Accelerate fetches one more
    return args.world_size * (loaded + 2 * args.gradient_accumulation_steps)
