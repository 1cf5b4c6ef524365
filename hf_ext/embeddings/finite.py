"""Embeddings that are NaN or infinite: found in every batch, computed again in float32, or refused."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import NotFiniteError
from ..models.exact_encoding import Encode

SHOWN_RESIDUES, SHOWN_SEQUENCES = 40, 3


def find_not_finite(embeddings: torch.Tensor) -> list[int]:
    """Rows of (n, width) that hold a NaN or an infinity. Cost: one reduction."""
    return (~torch.isfinite(embeddings).all(1)).nonzero().flatten().tolist()


def name_sequences(sequences: Sequence[str]) -> str:
    """The first few of them, shortened, with their lengths."""
    shown = [
        f"{s if len(s) <= SHOWN_RESIDUES else s[:SHOWN_RESIDUES] + '...'} ({len(s)} residues)"
        for s in sequences[:SHOWN_SEQUENCES]
    ]
    more = len(sequences) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def refuse_not_finite(sequences: Sequence[str], embeddings: torch.Tensor, what: str) -> None:
    """Raises NotFiniteError with the sequences whose rows of `embeddings`, (n, width), are not finite."""
    rows = find_not_finite(embeddings)
    if rows:
        raise NotFiniteError(
            f"Embeddings {what} are NaN or infinite for {len(rows)} of {len(sequences)} sequences: "
            f"{name_sequences([sequences[row] for row in rows])}. None of them was stored. Either the encoder's "
            "weights are damaged (are other sequences all right?), or these sequences are: leave them out."
        )


def encode_finite(
    encode: Encode, encode_exactly: Encode | None, sequences: Sequence[str]
) -> tuple[torch.Tensor, list[str]]:
    """Encodes a batch; sequences that overflow are encoded once more, in float32.

    Args:
        encode: maps n inputs to (n, width).
        encode_exactly: the same in float32; None where `encode` already is.

    Returns:
        Embeddings, (n, width), on the CPU, all finite; and the sequences that took float32.

    Raises:
        NotFiniteError: some are not finite in float32 either.
    """
    embeddings = encode(sequences).cpu()
    rows = find_not_finite(embeddings)
    if not rows:
        return embeddings, []
    overflowed = [sequences[row] for row in rows]
    again = embeddings[rows] if encode_exactly is None else encode_exactly(overflowed).cpu()
    refuse_not_finite(overflowed, again, "in float32")
    embeddings = embeddings.float()
    embeddings[rows] = again.float()
    return embeddings, overflowed
