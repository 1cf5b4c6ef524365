"""Streams whose order and position are known: one reader, passes without end, and a resume that goes on where it was.

Trainer resumes a stream by reading and dropping what it has seen, worker by worker, and never past the end of a pass: a
run that stopped in the second pass starts over (transformers 5.23). Here the process reads the stream itself and hands
the rows to its workers, which collate them; so the order depends neither on workers nor on processes, and the position
after every batch is known.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import datasets
from datasets.iterable_dataset import BufferShuffledExamplesIterable
from torch.utils.data import Dataset, Sampler
from torch.utils.data import IterableDataset as TorchIterableDataset

from ...errors import CheckpointError, DataError
from ...files import Facts, Json

START = {"pass": 0, "rows": 0, "state": None, "last_row": None}  # a position is a dictionary that JSON can hold

logger = logging.getLogger(__name__)


def is_stream(dataset: object) -> bool:
    """Returns whether `dataset` is iterable only and has no length: of `datasets`, or a torch `IterableDataset`."""
    return isinstance(dataset, datasets.IterableDataset | TorchIterableDataset) and not hasattr(dataset, "__len__")


def is_split_by_node(stream: object) -> bool:
    """Returns whether `datasets.distributed.split_dataset_by_node` has left this process a share of the stream only."""
    # Private: nothing public says so (datasets 5.2).
    return isinstance(stream, datasets.IterableDataset) and stream._distributed is not None


def parts_of(stream: object) -> Iterator[Any]:
    """Yields what a stream of `datasets` is made of, from its end back to its sources; nothing of other streams."""
    # Private: nothing public says so (datasets 5.2).
    inner = [getattr(stream, name) for name in ("_ex_iterable", "ex_iterable") if hasattr(stream, name)]
    for part in [*inner, *getattr(stream, "ex_iterables", [])]:
        yield part
        yield from parts_of(part)


def can_seek(stream: object) -> bool:
    """Returns whether `stream.load_state_dict` continues with the very row that comes after `stream.state_dict`.

    `datasets` says that its states are exact but for shuffle buffers, whose contents they leave out, and for batches
    made of Arrow, pandas or polars tables. Streams of torch have no states.
    """
    if not isinstance(stream, datasets.IterableDataset):
        return False
    # Private: a state does not say whether a shuffle buffer was behind it (datasets 5.2).
    is_table = stream._formatting is not None and stream._formatting.is_table
    return not is_table and not any(isinstance(part, BufferShuffledExamplesIterable) for part in parts_of(stream))


class PassedRows(Dataset):
    """The dataset of a `DataLoader` whose batch sampler yields rows instead of row numbers: returns what it gets."""

    def __getitems__(self, rows: list[Any]) -> list[Any]:
        """`rows`, to be collated."""
        return rows


class StreamBatchSampler(Sampler[list[Any]]):
    """Yields lists of `rows_per_batch` rows of a stream, pass after pass without end, and knows where it stands.

    Batches run across the end of a pass, so all are full. `set_epoch(pass)` is called before each pass where the stream
    has it, so that what shuffles, shuffles anew. Several processes all read the stream; Accelerate's
    `BatchSamplerShard` deals out the batches, and the rows of a step do not depend on the number of processes. A stream
    that can be read only once ends there.

    A stream that cannot seek (`can_seek`) is resumed by reading its current pass again up to the position. That is
    exact if each pass is the same whenever it is read; of the last row it is checked.

    Args:
        stream: see `is_stream`. Without `set_epoch` it should give the same rows in every pass.
        rows_per_batch: rows per process and batch.
        pass_column: added to every row, with the number of its pass; for collators that mask by epoch.
        num_remembered: of how many batches, the last handed out included, positions are kept; at least as many as
            data loaders fetch ahead of training, over all processes.

    Raises:
        CheckpointError: (while iterating) the stream does not fit the position it is to continue from.
        DataError: (while iterating) the stream has no rows, or can be read only once and was.

    Cost: reading and whatever the stream maps run in this process, in every process in full; with workers, rows are
    sent to them. A position takes 3 to 15 us per batch.
    """

    batch_size = None  # Accelerate: these are no row numbers that it could count or complete
    drop_last = False

    def __init__(self, stream: Any, rows_per_batch: int, *, pass_column: str | None = None, num_remembered: int = 1024):
        self.stream = stream
        self.rows_per_batch = rows_per_batch
        self.pass_column = pass_column
        self._can_seek = can_seek(stream)
        self._has_sought = self._has_begun = False
        self._num_dropped = self._num_batches = 0
        self._positions: deque[Json] = deque([START], maxlen=num_remembered + 1)

    def __iter__(self) -> Iterator[list[Any]]:
        if self._has_begun:
            self.load_state_dict(START)
        self._has_begun = True
        position = self._positions[-1]
        for _ in range(self._num_dropped):
            yield []  # Trainer drops as many batches as it has trained on
        rows = self._read(position)
        while batch := list(islice(rows, self.rows_per_batch)):
            self._remember(batch[-1])
            yield batch

    def state_dict(self, num_batches: int) -> Json:
        """Returns the position after the first `num_batches` batches, over all processes; JSON can hold it."""
        return dict(self._positions[num_batches - self._num_batches - 1])

    def load_state_dict(self, state: Facts, num_batches: int = 0, num_dropped: int | None = None) -> None:
        """Makes the next iteration, and only that one, start at a position.

        Args:
            state: from `state_dict`, of this or another number of workers, processes or rows per batch.
            num_batches: that the run has had before; positions are counted with them.
            num_dropped: so many empty batches come first, for Trainer to drop; None: all that the run has had.

        Raises:
            CheckpointError: `state` is of a stream that can seek, while this one cannot.
        """
        if state["state"] is not None and not self._can_seek:
            raise CheckpointError(
                "The checkpoint was written with a stream that can seek; this one cannot (was `shuffle` added?), so "
                "its order is another one. Train on the same stream, or start anew."
            )
        self._has_begun = False
        self._num_dropped = num_batches if num_dropped is None else num_dropped
        self._num_batches = num_batches  # handed out; the last of `_positions` is the one after them
        self._positions.clear()
        self._positions.append(dict(state))

    def _remember(self, last_row: Any) -> None:
        known = {"state": self.stream.state_dict()} if self._can_seek else {"last_row": _digest(last_row)}
        self._positions.append({**START, "pass": self._pass, "rows": self._num_rows, **known})
        self._num_batches += 1

    def _read(self, position: Facts) -> Iterator[Any]:
        """Yields rows after `position`; keeps `_pass` and `_num_rows` at the row that was yielded last."""
        first = self._pass = position["pass"]
        self._num_rows = position["rows"]
        rows = self._open(position["state"])
        if position["state"] is None and self._num_rows:
            self._read_again(rows, position)
        while True:
            for row in rows:
                self._num_rows += 1
                yield self._mark(row)
            if self._num_rows == 0 and self._pass > first:
                return
            if self._num_rows == 0:
                raise DataError(
                    f"The training stream gave no rows in pass {first}: it is empty, or can be read only once and has "
                    "fewer rows than --max_steps needs. Give one that can be read again, or lower --max_steps."
                )
            self._pass += 1
            self._num_rows = 0
            rows = self._open(None)

    def _mark(self, row: Any) -> Any:
        if self.pass_column is None:
            return row
        return {**row, self.pass_column: self._pass}

    def _open(self, state: Any) -> Iterator[Any]:
        """Iterates over pass `_pass`, from its beginning or from where `state` was taken."""
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(self._pass)
        if state is not None:
            self.stream.load_state_dict(state)
            self._has_sought = True
        elif self._has_sought:
            self.stream.load_state_dict({})  # it would seek again whenever it comes to the same pass
        return iter(self.stream)

    def _read_again(self, rows: Iterator[Any], position: Facts) -> None:
        logger.warning(
            "The training stream cannot seek: %d rows of pass %d are read again to continue.",
            self._num_rows,
            self._pass,
        )
        last = next(islice(rows, self._num_rows - 1, None), None)
        if last is None or position["last_row"] not in (None, _digest(self._mark(last))):
            raise CheckpointError(
                f"Row {self._num_rows} of pass {self._pass} of the training stream is missing or another one than "
                "before: the data changed, a `map` changes rows at random, or the stream's order is not the same "
                "whenever it is read. Use the data that the checkpoint was written with; draw what is random in "
                "the data collator; a shuffled torch stream needs `set_epoch`. --allow_changed data (in Python "
                "allow_changed=['data']) goes on from the same number of rows, with what the rows are now."
            )


def _digest(row: object) -> str:
    """Returns enough of a row to tell it from others; what JSON does not know counts by its type."""
    text = json.dumps(row, default=lambda unknown: type(unknown).__name__, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
