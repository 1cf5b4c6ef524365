"""Where each sequence of a padded batch stands once padding is gone: the one layout that packing and kernels share.

Collators make it beforehand, with what else a model would read from a batch on its device and wait for (`BatchLayout`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...labels import UNKNOWN


class _Movable:
    """Moves its tensors, and parts that are movable, as Accelerate and torch's loaders move each part of a batch."""

    def to(self: Any, device: torch.device | str | int, non_blocking: bool = False) -> Any:
        """Returns the same on a device."""
        return self._map(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self: Any) -> Any:
        """Returns the same in memory that a device reads while the host goes on."""
        return self._map(lambda part: part.pin_memory())

    def _map(self: Any, function: Callable[[Any], Any]) -> Any:
        moved = {name: function(part) for name, part in vars(self).items() if hasattr(part, "to")}
        return replace(self, **moved)


@dataclass(frozen=True)
class VarlenLayout(_Movable):
    """A batch of n sequences as one row of T tokens, shortest sequence first, and filling, if any, at the end.

    Compiled kernels read tensors and their shapes: reading `lengths` would compile them anew for every batch.

    Attributes:
        lengths: tokens per sequence, ascending, without the filling.
        indices: (real tokens,), int64: where each token stands in the padded batch, flattened to (n * width,).
        cu_seqlens: (sequences and pieces of filling + 1,), int32: first token of each, and T. The filling is cut into
            pieces no longer than the longest sequence, so that a kernel does not work on it as on a longer one.
        slots: (T,), int64: where each token stands in (n, longest), flattened, sequences in the order of the row; all
            of the filling at n * longest, behind them.
        is_token: (n, longest), bool: which of these slots hold a token.
        shape: (n, width) of the padded batch.
        max_length: the largest of `lengths`.
        num_filled: tokens at the end of the row that stand for nothing and only round T up.
        rounds_up: whether the row is filled where its length is not one of a few.
        has_holes: whether some sequence's tokens do not stand side by side in the padded batch.
    """

    lengths: tuple[int, ...]
    indices: Tensor
    cu_seqlens: Tensor
    slots: Tensor
    is_token: Tensor
    shape: tuple[int, int]
    max_length: int
    num_filled: int = 0
    rounds_up: bool = False
    has_holes: bool = False

    @classmethod
    def from_mask(cls, mask: Tensor, round_up: bool = False) -> VarlenLayout:
        """Builds the layout of an attention mask (n, width), non-zero where a token is; rows may be padded anywhere.

        Args:
            round_up: fill the row up to one of a few lengths (`bounded_length`), so that compiled code sees few shapes.

        Cost: two reads from the device where the mask is on one; none in a collator.
        """
        keep = mask.bool()
        counts = keep.sum(1)
        order = counts.argsort(stable=True)
        counts = counts[order]
        keep = keep[order]
        begins = pad(keep, (1, 0)).int().diff(dim=1) == 1
        num_starts = begins.sum(1)
        *lengths, most_starts = torch.cat([counts, num_starts.amax()[None]]).tolist()  # one read
        row, column = keep.nonzero(as_tuple=True)
        num = len(row)
        longest = max(lengths, default=0)
        filled = bounded_length(num) - num if round_up else 0
        pieces = [min(longest, filled - start) for start in range(0, filled, max(1, longest))]
        ends = torch.tensor([0, *lengths, *pieces], device=mask.device).cumsum(0)
        place = torch.arange(num, device=mask.device) - ends[row]  # in its sequence
        rows, width = mask.shape
        return cls(
            lengths=tuple(lengths),
            indices=order[row] * width + column,
            cu_seqlens=ends.to(torch.int32),
            slots=pad(row * longest + place, (0, filled), value=rows * longest),
            is_token=torch.arange(longest, device=mask.device) < counts[:, None],
            shape=(rows, width),
            max_length=longest,
            num_filled=filled,
            rounds_up=round_up,
            has_holes=most_starts > 1,
        )

    @property
    def columns(self) -> Tensor:
        """(1, T), int64: the column of each token in the padded batch, which is its position; 0 in the filling."""
        return pad(self.indices % self.shape[1], (0, self.num_filled))[None]

    def groups(self) -> Iterator[tuple[int, int, int]]:
        """Runs of equally long sequences as (first token, number of sequences, tokens of each), without the filling."""
        start = 0
        for length, run in groupby(self.lengths):
            count = len(list(run))
            if length:
                yield start, count, length
            start += count * length

    def pack(self, padded: Tensor) -> Tensor:
        """Packs (n, width, ...) to (1, T, ...); the filling is zero."""
        packed = padded.flatten(0, 1).index_select(0, self.indices)
        if self.num_filled:
            packed = torch.cat([packed, packed.new_zeros(self.num_filled, *packed.shape[1:])])
        return packed[None]

    def unpack(self, packed: Tensor) -> Tensor:
        """Unpacks (1, T, ...) to (n, width, ...), zero where padding was."""
        return self.scatter(packed).unflatten(0, self.shape)

    def scatter(self, packed: Tensor, filler: Tensor | None = None) -> Tensor:
        """Unpacks to (n * width, ...); with `filler` (...) in place of zeros."""
        rows, width = self.shape
        real, _ = packed.squeeze(0).split([len(self.indices), self.num_filled])  # a slice's gradient is filled up
        size = (rows * width, *real.shape[1:])
        filled = real.new_zeros(size) if filler is None else filler.expand(size)
        return filled.index_copy(0, self.indices, real)


def bounded_length(length: int) -> int:
    """Returns the smallest length from `length` on with four significant bits: at most 1/8 more."""
    step = 1 << max(0, length.bit_length() - 4)
    return -(-length // step) * step


@dataclass(frozen=True)
class BatchLayout(_Movable):
    """Entry `layout` of a batch; not a tensor, so that nothing cuts it as if its rows were the batch's.

    Attributes:
        shape: of the batch's `input_ids`. A model that got other rows finds out for itself.
        segments: for packed encoders (`models/kernels/packing.py`).
        labelled: (k,), int64: where in the flattened `labels` a label stands (`speedups/fused_layers.py`).
    """

    shape: tuple[int, ...]
    segments: VarlenLayout | None = None
    labelled: Tensor | None = None


@dataclass
class LayoutMaker:
    """Which parts of a `BatchLayout` the models of a run read.

    Attributes:
        packs: `segments`, which are filled up to a few lengths where `round_up` is set.
        locates_labels: `labelled`.
    """

    packs: bool = False
    round_up: bool = False
    locates_labels: bool = False

    def add_to(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns `batch`, with its `layout`."""
        segments = VarlenLayout.from_mask(batch["attention_mask"], self.round_up) if self.packs else None
        labelled = locate_labels(batch["labels"]) if self.locates_labels else None
        return {**batch, "layout": BatchLayout(tuple(batch["input_ids"].shape), segments, labelled)}


def locate_labels(labels: Tensor) -> Tensor:
    """Returns where in the flattened `labels` a label stands, (k,), int64. Cost: one read from the device."""
    return labels.flatten().ne(UNKNOWN).nonzero().squeeze(1)


def change_layout(collator: Any, **changes: bool) -> None:
    """Sets what a collator that makes layouts adds to its batches; others are left alone.

    So are subclasses with another `__call__`: what that changes in a batch, its layout would not know.
    """
    if hasattr(collator, "layout") and type(collator).__call__.__module__.startswith("hf_ext."):
        maker = replace(collator.layout or LayoutMaker(), **changes)
        collator.layout = maker if maker.packs or maker.locates_labels else None
