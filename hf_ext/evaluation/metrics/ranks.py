"""Ranks and cuts of a column that is sorted once, as functions of how often every row counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...labels import BoolArray
from .arrays import FloatArray, IntArray, divide


class Once:
    """A function of counts that several metrics read: of the same array of counts it is computed once."""

    def __init__(self, compute: Callable[[FloatArray], Any]):
        self._compute = compute
        self._counts: Callable[[], FloatArray | None] = lambda: None
        self._found: Any = None

    def __call__(self, counts: FloatArray) -> Any:
        if self._counts() is not counts:
            self._found = None  # before the next is made: half the memory, and a quarter of the time
            self._found = self._compute(counts)
            self._counts = weakref.ref(counts)
        return self._found


def rank(values: FloatArray) -> Callable[[FloatArray], tuple[FloatArray, FloatArray]]:
    """Counts to each row's average rank less the mean rank, (resamples, n), and the sum of their squares.

    The column is sorted here, once; ties share the mean of their ranks.
    """
    order, ends = sort_ties(values)
    tie = np.empty(len(order), np.intp)
    tie[order] = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=-1))

    def of(counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        up_to = np.cumsum(np.take(counts, order, axis=1), axis=1)
        if len(ends) < counts.shape[1]:
            up_to = up_to[:, ends]
        in_tie = np.diff(up_to, axis=1, prepend=0.0)
        mean_rank = (up_to[:, -1:] + 1) / 2
        centred = up_to - (in_tie - 1) / 2 - mean_rank
        squares = np.einsum("bt,bt,bt->b", in_tie, centred, centred)
        return np.take(centred, tie, axis=1), squares

    return of


def sort_ties(values: FloatArray) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Returns row numbers, lowest value first, and where among them each run of equal values ends."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    changes = np.flatnonzero(ordered[1:] != ordered[:-1])
    return order, np.append(changes, len(order) - 1)


class Ranking:
    """How hits stand among all rows when these are ordered by a score, the highest first.

    Rows with one score come in together, as in scikit-learn.

    Args:
        scores: (m,) float64, without NaN.
        is_hit: (m,) bool.
        rows: (m,) int64, where counts of these rows stand; None: they are of these m rows.

    Cost: a sort; for each resample one pass over the rows, and little where hits are few.
    """

    def __init__(
        self,
        scores: FloatArray,
        is_hit: BoolArray,
        rows: IntArray | None = None,
    ):
        order, ends = sort_ties(-scores)
        begins = np.append(0, ends[:-1] + 1)
        place_of_hit = np.flatnonzero(is_hit[order])
        hits = order[place_of_hit]
        tie_of_hit = np.searchsorted(ends, place_of_hit)
        ties, first_hits = np.unique(tie_of_hit, return_index=True)
        first = begins[ties]
        behind = ends[ties] + 1
        bounds = np.unique(np.concatenate([[0], first, behind]))
        begin = np.searchsorted(bounds, first)
        end = np.searchsorted(bounds, behind)
        bounds = bounds[bounds < len(order)]
        if rows is not None:
            order = rows[order]
            hits = rows[hits]

        def cut(
            counts: FloatArray,
        ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
            ordered = np.take(counts, order, axis=1)
            sums = np.add.reduceat(ordered, bounds, axis=1)
            up_to = np.cumsum(np.pad(sums, ((0, 0), (1, 0))), axis=1)
            of_hits = np.take(counts, hits, axis=1)
            with_hits = np.add.reduceat(of_hits, first_hits, axis=1)
            return up_to[:, begin], up_to[:, end], with_hits, up_to[:, -1:]

        # At each score that a hit has: rows above it, rows down to it, hits with it, (resamples, scores); all rows.
        self._cut = Once(cut)

    def average_precision(self, counts: FloatArray) -> FloatArray:
        """Computes the area under precision and recall as steps: the sum over cuts of gain in recall times precision.

        A constant scores the share of hits, a perfect order 1.
        """
        _, rows, gained, _ = self._cut(counts)
        hits = np.cumsum(gained, axis=1)
        precision = np.divide(hits, rows, out=np.zeros_like(hits), where=rows > 0)
        return divide(np.einsum("bt,bt->b", gained, precision), hits[:, -1])

    def auroc(self, counts: FloatArray) -> FloatArray:
        """Computes the share of pairs of a hit and another row in which the hit scores higher; ties count half."""
        before, rows, gained, total = self._cut(counts)
        hits = np.cumsum(gained, axis=1)
        others = total - hits[:, -1:]
        below = others - (rows - hits)
        tied = rows - before - gained
        won = np.einsum("bt,bt->b", gained, below + tied / 2)
        return divide(won, hits[:, -1] * others[:, 0])
