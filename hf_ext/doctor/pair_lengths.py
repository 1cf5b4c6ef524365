"""Rows of antigens and antibodies as numbers of tokens: what decides how much a generator computes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from ..data.splits import draw_rows

READERS = r"project|^keys|(cross_attention|EncDecAttention)\.[kv]\."  # of a decoder, what multiplies antigen tokens
SPECIAL_TOKENS = 2  # about an antigen; and <sep> and <eos> of a pair


@dataclass(frozen=True)
class PairLengths:
    """n rows and the k distinct antigens that they have.

    Attributes:
        antigen_index: (n,), int64, which antigen each row has.
        antigen_tokens: (k,), int64.
        pair_tokens: (n,), int64.
        affinities: (n,), float64; None where there are none.
    """

    antigen_index: np.ndarray
    antigen_tokens: np.ndarray
    pair_tokens: np.ndarray
    affinities: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.pair_tokens)

    @classmethod
    def of_sequences(
        cls,
        antigens: Sequence[str],
        heavy: Sequence[str],
        light: Sequence[str | None],
        affinities: Sequence[float] | None = None,
    ) -> PairLengths:
        """Of rows of sequences."""
        number = {antigen: i for i, antigen in enumerate(dict.fromkeys(antigens))}
        return cls(
            np.array([number[antigen] for antigen in antigens], np.int64),
            np.array([len(antigen) + SPECIAL_TOKENS for antigen in number], np.int64),
            np.array([len(a) + len(b or "") + SPECIAL_TOKENS for a, b in zip(heavy, light)], np.int64),
            None if affinities is None else np.array(affinities, np.float64),
        )

    @classmethod
    def assumed(cls, num_rows: int, antigen: int, pair: int, rows_per_antigen: int) -> PairLengths:
        """Rows that are alike: residues of antigen and of pair, and how many rows have one antigen."""
        index = np.arange(num_rows) // rows_per_antigen
        lengths = np.full(int(index[-1]) + 1, antigen + SPECIAL_TOKENS, np.int64)
        return cls(index, lengths, np.full(num_rows, pair + SPECIAL_TOKENS, np.int64))

    def above(self, threshold: float | None) -> PairLengths:
        """Rows with a larger affinity; all, where there is no threshold or no affinity."""
        if threshold is None or self.affinities is None:
            return self
        kept = np.flatnonzero(self.affinities > threshold)
        return PairLengths(self.antigen_index[kept], self.antigen_tokens, self.pair_tokens[kept], self.affinities[kept])

    def limited(self, num_rows: int | None, seed: int) -> PairLengths:
        """As many rows at random as a run takes with that seed; all, where there is no limit."""
        if num_rows is None or num_rows >= len(self):
            return self
        return self.take(draw_rows(len(self), seed, num_rows))

    def take(self, rows: np.ndarray) -> PairLengths:
        """Some of the rows, with the antigens that they have."""
        antigens, index = np.unique(self.antigen_index[rows], return_inverse=True)
        return PairLengths(index.astype(np.int64), self.antigen_tokens[antigens], self.pair_tokens[rows])

    def cut(self, num_tokens: int) -> PairLengths:
        """The rows with no more than so many tokens of an antigen, and of a pair."""
        antigens, pairs = (np.minimum(each, num_tokens) for each in (self.antigen_tokens, self.pair_tokens))
        return PairLengths(self.antigen_index, antigens, pairs, self.affinities)

    def encoded_in_batch(self, num_rows: int) -> float:
        """Tokens that are encoded in a random batch, where each antigen stands once; expected.

        A batch without any of an antigen's c of n rows: product over i < num_rows of (n - c - i) / (n - i).
        """
        counts = np.bincount(self.antigen_index, minlength=len(self.antigen_tokens))
        missing = np.ones(len(counts))
        for i in range(min(num_rows, len(self))):
            missing *= np.clip(len(self) - counts - i, 0, None) / (len(self) - i)
        return float((1 - missing) @ self.antigen_tokens)


def count_pair_flops(model: Any, rows: PairLengths, batch_rows: float, is_training: bool) -> float:
    """FLOPs of all rows once, in random batches of so many, in each of which an antigen is encoded once.

    2 for a weight and a token forward, 4 more in training. Left out are products of attention, up to a sixth, and a
    frozen encoder that is not the model's own, whose states are cached.

    Args:
        model: `AntibodyGenerator`; on torch's meta device will do.
        is_training: forward and backward, no optimizer; else forward alone, as in an evaluation.
    """
    config, decoder = model.config, model.decoder
    size = max(1, min(round(batch_rows), len(rows)))
    # Of the light Transformer the weights of one layer, applied several times.
    times = (config.num_encoder_layers, config.num_decoder_layers) if config.architecture == "light" else (1, 1)
    encoded = rows.encoded_in_batch(size) * len(rows) / size * times[0] * _num_weights(model.encoder)
    read = rows.antigen_tokens[rows.antigen_index].sum() * _num_weights(decoder, READERS)
    output = config.vocab_size * (config.d_model if model.output is None else config.hidden_size)
    layers = times[1] * _num_weights(decoder, rf"^(?!.*(bridge|{READERS}))")
    return 2.0 * float(encoded + read + rows.pair_tokens.sum() * (layers + output)) * (3 if is_training else 1)


def _num_weights(module: nn.Module, names: str = "") -> int:
    return sum(p.numel() for name, p in module.named_parameters() if p.dim() == 2 and re.search(names, name))
