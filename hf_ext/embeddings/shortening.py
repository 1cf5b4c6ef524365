"""Inputs that are longer than their encoder takes, and by what their embeddings are known apart from others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shortening:
    """How inputs above a limit are made to fit; equal ones cut alike.

    Args:
        max_residues: what the encoder takes of one input, a pair counting both parts; None: any length.
        too_long: "error", "truncate" or "window", as in `SequenceCollator`.
        window_overlap: residues that neighbouring windows share.
    """

    max_residues: int | None = None
    too_long: str = "error"
    window_overlap: int = 0

    @classmethod
    def of(cls, collator: Any, name: str) -> Shortening:
        """That of input `name` of a `SequenceCollator`, as it is now."""
        overlap = collator.window_overlap if collator.too_long == "window" else 0
        return cls(collator.tokenizers[name].max_residues, collator.too_long, overlap)

    def identify(self, sequence: str) -> str:
        """The text by which the embedding of an input is known: of one that is not cut, the input itself.

        So the rule for long inputs matters to long inputs alone, and what was cut is never taken for what was not, nor
        for what was cut otherwise. Parts of a pair are joined by `|`.
        """
        num_residues = len(sequence) - sequence.count("|")
        if self.max_residues is None or num_residues <= self.max_residues:
            return sequence
        return f"{sequence} {self.too_long} {self.max_residues} {self.window_overlap}"


WHOLE = Shortening()
