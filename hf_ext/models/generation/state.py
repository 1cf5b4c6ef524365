"""What a decoder without keys and values remembers of the tokens that it has read."""

from __future__ import annotations

import torch


class DecoderState:
    """What transformers' `generate` asks of a cache that is not one of its own.

    Attributes:
        num_tokens: read so far.
    """

    # Of transformers' own caches: this one cannot be cut back by a token, so `generate` must not run ahead of itself.
    is_compileable = False
    is_croppable = False

    def __init__(self) -> None:
        self.num_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read so far."""
        return self.num_tokens

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Takes the rows at `beam_idx`, (rows,), in place, in beam search."""
        raise NotImplementedError
