"""What encoders hand to decoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.utils import ModelOutput

from ...errors import ArgumentError

# What transformers calls the decoder's memory, in outputs and as an argument; before 5.24 `past_key_values`.
CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"


@dataclass
class EncoderStates(ModelOutput):
    """Of k antigens; every entry has them first, so that `generate` may repeat them for beams and samples.

    `last_hidden_state`: (k, tokens, width). Of the LSTM, `memory`: (k, layers, 2 * hidden, 2), hidden states and cells
    after the last token; `mean`: (k, 2 * hidden), of the states of all tokens.
    """

    last_hidden_state: torch.Tensor | None = None
    memory: torch.Tensor | None = None
    mean: torch.Tensor | None = None

    def select(self, index: torch.Tensor) -> EncoderStates:
        """The entries of each row's antigen: `index` (rows,)."""
        return EncoderStates(**{name: value.index_select(0, index) for name, value in self.items()})


def pick(of_antigens: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Of k antigens to rows: (k, ...) to (rows, ...) by `index`, (rows,); None: row i has antigen i."""
    return of_antigens if index is None else of_antigens.index_select(0, index)


def as_states(given: Any) -> EncoderStates:
    """`EncoderStates` from what a caller gave as `encoder_outputs`: any ModelOutput, a tuple, or the states alone.

    Raises:
        ArgumentError: no tensor of three dimensions in there.
    """
    if isinstance(given, EncoderStates):
        return given
    names = EncoderStates.__dataclass_fields__
    parts = {key: given[key] for key in names if key in given} if hasattr(given, "keys") else {}
    states = parts.pop("last_hidden_state", None)
    if states is None:
        states = given[0] if isinstance(given, tuple | list) and len(given) else given
    if not isinstance(states, torch.Tensor) or states.dim() != 3:
        raise ArgumentError(
            f"encoder_outputs of type {type(given).__name__}: must hold states of shape (antigens, tokens, width), as "
            "a tensor, the first entry of a tuple, or last_hidden_state."
        )
    return EncoderStates(last_hidden_state=states, **parts)
