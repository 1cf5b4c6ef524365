"""What is held at each moment of one forward and backward pass, for a whole model from a few of its layers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True)
class Middle:
    """Moments [start, end) that the whole model goes through `copies` times."""

    start: int
    end: int
    copies: int


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a pass, in bytes beside weights and optimizer states.

    Attributes:
        activations: all that is neither weight nor gradient: what backward needs, and what an operation works on.
        gradients: those that exist at that moment.
    """

    activations: int
    gradients: int

    @property
    def total(self) -> int:
        """Of both."""
        return self.activations + self.gradients


@dataclass(frozen=True)
class Timeline:
    """Bytes after each operation of one pass of a model whose middle layers were left out.

    Layers in the middle all do the same: each adds as much in the forward pass, and takes as much away in the backward
    pass, where it may leave its gradients. So the fullest moment of the whole model lies in the first or the last
    copy of a middle, or outside of it, and is known without the others.

    Attributes:
        others: (moments,), int64: all but weights and gradients.
        gradients: (moments,), int64.
        middles: in the order of time, none within another.
        growing: (moments,), of `others` what grows with the rows of the batch.
    """

    others: np.ndarray
    gradients: np.ndarray
    middles: tuple[Middle, ...] = ()
    growing: np.ndarray = field(default_factory=lambda: np.zeros(1))

    def peak(self, standing: int = 0) -> Peak:
        """The fullest moment.

        Args:
            standing: bytes of all gradients where they are there from a pass before; 0 where they are made in this one.
        """
        best, shift = Peak(0, 0), np.zeros(2, np.int64)
        levels = np.stack([self.others, self.gradients])
        start = 0
        for middle in (*self.middles, Middle(len(self.others), len(self.others), 1)):
            best = _fuller(best, levels[:, start : middle.start], shift, standing)
            inside = levels[:, middle.start : middle.end]
            best = _fuller(best, inside, shift, standing)
            if middle.end > middle.start:
                grown = inside[:, -1] - (levels[:, middle.start - 1] if middle.start else 0)
                shift = shift + (middle.copies - 1) * grown
                best = _fuller(best, inside, shift, standing)
            start = middle.end
        return best

    def with_rows(self, share: float) -> Timeline:
        """The timeline of `share` times as many rows: exact, but for rounding."""
        others = self.others + (share - 1) * self.growing
        return replace(self, others=np.rint(others).astype(np.int64), growing=share * self.growing)


def _fuller(best: Peak, levels: np.ndarray, shift: np.ndarray, standing: int) -> Peak:
    if not levels.shape[1]:
        return best
    others, gradients = levels + shift[:, None]
    gradients = np.full_like(gradients, standing) if standing else gradients
    moment = int(np.argmax(others + gradients))
    found = Peak(int(others[moment]), int(gradients[moment]))
    return found if found.total > best.total else best
