"""Where each sequence of a padded batch stands once padding is gone: the one layout that packing and kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch


@dataclass(frozen=True)
class Segments:
    """A batch of n sequences as one row of T tokens, shortest sequence first.

    Attributes:
        lengths: tokens per sequence, ascending; the filling, if any, counts as a sequence of its own, at the end.
        indices: (real tokens,), int64: where each token stands in the padded batch, flattened to (n * width,).
        cu_seqlens: (sequences + 1,), int32: first token of each sequence, and T.
        shape: (n, width) of the padded batch.
        max_length: the largest of `lengths`. Compiled kernels read it and `cu_seqlens`: reading `lengths` would compile
            them anew for every number of sequences.
        num_filled: tokens at the end of the row that stand for nothing and only round T up.
    """

    lengths: tuple[int, ...]
    indices: torch.Tensor
    cu_seqlens: torch.Tensor
    shape: tuple[int, int]
    max_length: int
    num_filled: int = 0

    @classmethod
    def from_mask(cls, mask: torch.Tensor, round_up: bool = False) -> Segments:
        """From an attention mask (n, width), non-zero where a token is; rows may be padded anywhere.

        Args:
            round_up: fill the row up to one of a few lengths (`bounded_length`), so that compiled code sees few shapes.

        Cost: two reads from the device.
        """
        keep = mask.bool()
        counts = keep.sum(1)
        order = counts.argsort(stable=True)
        lengths = counts[order].tolist()
        row, column = keep[order].nonzero(as_tuple=True)
        filled = bounded_length(len(row)) - len(row) if round_up else 0
        lengths = [*lengths, filled] if filled else lengths
        ends = torch.tensor([0, *lengths], device=mask.device).cumsum(0).to(torch.int32)
        rows, width = mask.shape
        longest = max(lengths, default=0)
        return cls(tuple(lengths), order[row] * width + column, ends, (rows, width), longest, filled)

    @property
    def columns(self) -> torch.Tensor:
        """(1, T), int64: the column of each token in the padded batch, which is its position; 0 in the filling."""
        return torch.nn.functional.pad(self.indices % self.shape[1], (0, self.num_filled))[None]

    def groups(self) -> Iterator[tuple[int, int, int]]:
        """Runs of equally long sequences as (first token, number of sequences, tokens of each), without the filling."""
        start = 0
        for length, run in groupby(self.lengths[:-1] if self.num_filled else self.lengths):
            count = len(list(run))
            if length:
                yield start, count, length
            start += count * length

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """(n, width, ...) to (1, T, ...); the filling is zero."""
        packed = padded.flatten(0, 1).index_select(0, self.indices)
        if self.num_filled:
            packed = torch.cat([packed, packed.new_zeros(self.num_filled, *packed.shape[1:])])
        return packed[None]

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """(1, T, ...) to (n, width, ...), zero where padding was."""
        rows, width = self.shape
        real = packed[0, : len(self.indices)]
        return real.new_zeros(rows * width, *real.shape[1:]).index_copy(0, self.indices, real).unflatten(0, self.shape)


def bounded_length(length: int) -> int:
    """The smallest length from `length` on with four significant bits: 8 lengths per doubling, at most 1/8 more."""
    step = 1 << max(0, length.bit_length() - 4)
    return -(-length // step) * step
