"""Embeddings that are NaN or infinite: found in every batch, computed again in float32, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import NotFiniteError

# Of n sequences: (n, width), or of each its tokens' states, n tensors (tokens, width).
Embeddings = torch.Tensor | list[torch.Tensor]
AnyEncode = Callable[[Sequence[str]], Any]

SHOWN_RESIDUES, SHOWN_SEQUENCES = 40, 3


def find_not_finite(embeddings: Embeddings) -> list[int]:
    """Which of n sequences' embeddings hold a NaN or an infinity. Cost: one reduction; of states, one each."""
    if isinstance(embeddings, list):
        return [i for i, states in enumerate(embeddings) if not torch.isfinite(states).all()]
    return (~torch.isfinite(embeddings).all(1)).nonzero().flatten().tolist()


def name_sequences(sequences: Sequence[str]) -> str:
    """The first few of them, shortened, with their lengths."""
    shown = [
        f"{s if len(s) <= SHOWN_RESIDUES else s[:SHOWN_RESIDUES] + '...'} ({len(s)} residues)"
        for s in sequences[:SHOWN_SEQUENCES]
    ]
    more = len(sequences) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def join_blocks(blocks: Sequence[Any]) -> Any:
    """Embeddings of several batches as those of one; of different precisions, in the highest."""
    if isinstance(blocks[0], list):
        return [states for block in blocks for states in block]
    return torch.cat(list(blocks))


def refuse_not_finite(sequences: Sequence[str], embeddings: Embeddings, what: str) -> None:
    """Raises NotFiniteError with the sequences whose `embeddings` are not finite."""
    rows = find_not_finite(embeddings)
    if rows:
        raise NotFiniteError(
            f"Embeddings {what} are NaN or infinite for {len(rows)} of {len(sequences)} sequences: "
            f"{name_sequences([sequences[row] for row in rows])}. None of them was stored. Either the encoder's "
            "weights are damaged (are other sequences all right?), or these sequences are: leave them out."
        )


def encode_finite(
    encode: AnyEncode, encode_exactly: AnyEncode | None, sequences: Sequence[str]
) -> tuple[Any, list[str]]:
    """Encodes a batch; sequences that overflow are encoded once more, in float32.

    Args:
        encode: maps n inputs to (n, width), or to n tensors, (tokens, width) each.
        encode_exactly: the same in float32; None where `encode` already is.

    Returns:
        Embeddings, as `encode` returns them, on the CPU, all finite; and the sequences that took float32.

    Raises:
        NotFiniteError: some are not finite in float32 either.
    """
    embeddings = _on_cpu(encode(sequences))
    rows = find_not_finite(embeddings)
    if not rows:
        return embeddings, []
    overflowed = [sequences[row] for row in rows]
    again = _on_cpu(encode_exactly(overflowed)) if encode_exactly else _take(embeddings, rows)
    refuse_not_finite(overflowed, again, "in float32")
    embeddings = embeddings if isinstance(embeddings, list) else embeddings.float()
    for row, found in zip(rows, again):
        embeddings[row] = found.float()
    return embeddings, overflowed


def _on_cpu(embeddings: Any) -> Any:
    return [states.cpu() for states in embeddings] if isinstance(embeddings, list) else embeddings.cpu()


def _take(embeddings: Any, rows: list[int]) -> Any:
    return [embeddings[row] for row in rows] if isinstance(embeddings, list) else embeddings[rows]
