"""What encoders hand to decoders, and what a decoder remembers of the tokens that it has read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from ...errors import ArgumentError


@dataclass
class EncoderStates(ModelOutput):
    """Of k antigens; every entry has them first, so that `generate` may repeat them for beams and samples.

    `last_hidden_state`: (k, tokens, width). Of the LSTM, `memory`: (k, layers, 2 * hidden, 2), hidden states and cells
    after the last token; `mean`: (k, 2 * hidden), of the states of all tokens.
    """

    last_hidden_state: torch.Tensor | None = None
    memory: torch.Tensor | None = None
    mean: torch.Tensor | None = None


def as_states(given: Any) -> EncoderStates:
    """`EncoderStates` from what a caller gave as `encoder_outputs`: those, a tuple that begins with states, or states.

    Raises:
        ArgumentError: no tensor of three dimensions in there.
    """
    if isinstance(given, EncoderStates):
        return given
    states = given[0] if isinstance(given, tuple) and given else given
    if not isinstance(states, torch.Tensor) or states.dim() != 3:
        raise ArgumentError(
            f"encoder_outputs of type {type(given).__name__}: must be what `encode` returns, or states of shape "
            "(antigens, tokens, width), as a tensor or the first entry of a tuple."
        )
    return EncoderStates(last_hidden_state=states)


class DecoderState:
    """A memory without keys and values, as transformers' `generate` asks of a cache that is not one of its own.

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
