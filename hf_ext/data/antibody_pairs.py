"""What an antibody generator reads and writes, as token ids: antigens, and pairs of heavy and light chain.

An antigen is `<bos> antigen <eos>`, a pair `<bos> heavy <sep> light <eos>`, a heavy chain alone `<bos> heavy <eos>`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ..errors import DataError
from .proteins import RARE, STANDARD, UNKNOWN
from .row_errors import shorten
from .tokenization import ResidueTokenizer

PAD, BOS, EOS, SEP = "<pad>", "<bos>", "<eos>", "<sep>"
VOCABULARY = (PAD, BOS, EOS, SEP, *STANDARD, UNKNOWN)  # in the order of their ids
PAD_ID, BOS_ID, EOS_ID, SEP_ID = range(4)
UNKNOWN_ID = VOCABULARY.index(UNKNOWN)
_LETTERS = frozenset(STANDARD + UNKNOWN + RARE)


def make_pair_tokenizer() -> PreTrainedTokenizerFast:
    """The vocabulary as an ordinary fast tokenizer, for `save_pretrained` beside a model.

    `tokenizer(antigen)` and `tokenizer(heavy, light)` give the ids that `PairEncoder` gives; letters that are not in
    the vocabulary become X. It adds no `token_type_ids`.
    """
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A {EOS}",
        pair=f"{BOS} $A {SEP} $B {EOS}",
        special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID), (SEP, SEP_ID)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "sep_token": SEP, "unk_token": UNKNOWN},
        model_input_names=["input_ids", "attention_mask"],
    )


@dataclass(frozen=True)
class AntibodyPair:
    """An antibody; `light` is None for a heavy chain alone.

    `malformed` says what is wrong with the tokens that it was read from, in words; empty where nothing is. It is about
    their order alone: whether the residues make an antibody is for others to judge.
    """

    heavy: str
    light: str | None = None
    malformed: tuple[str, ...] = ()


class PairEncoder:
    """Antigens and pairs as token ids, and ids as pairs.

    Args:
        tokenizer: for antigens, where they go to an encoder with a vocabulary of its own (ESM); None: the one here.

    Raises:
        DataError: `tokenizer` is not that of a protein language model with one token per residue.

    Cost: about 100 tokenizer calls once; then some 10 M residues/s.
    """

    def __init__(self, tokenizer: Any = None):
        self.tokenizer = make_pair_tokenizer()
        self.antigens = ResidueTokenizer(tokenizer or self.tokenizer)
        self.pairs = ResidueTokenizer(self.tokenizer, num_parts=2)

    def encode_antigens(self, antigens: Sequence[str]) -> list[np.ndarray]:
        """(tokens,) int64 each: `<bos> antigen <eos>`, or as the tokenizer given frames a sequence.

        Raises:
            DataError: one is empty, has other characters than upper-case residues, or is longer than the encoder takes.
        """
        _check("antigen", antigens)
        limit = self.antigens.max_residues
        for i, antigen in enumerate(antigens):
            if limit is not None and len(antigen) > limit:
                raise DataError(
                    f"Row {i}, antigen: {len(antigen)} residues; its encoder takes {limit}. Cut it, or leave it out."
                )
        return _rows(self.antigens(antigens)) if len(antigens) else []

    def encode_pairs(self, heavies: Sequence[str], lights: Sequence[str | None] | None = None) -> list[np.ndarray]:
        """(tokens,) int64 each: `<bos> heavy <sep> light <eos>`, without `<sep>` where `light` is None or "".

        Raises:
            DataError: a heavy chain is empty, a chain has other characters than upper-case residues, or the columns
                differ in length.
        """
        others = ["" if light is None else light for light in lights or [None] * len(heavies)]
        if len(others) != len(heavies):
            raise DataError(f"{len(heavies)} heavy and {len(others)} light chains: give one of each per row.")
        _check("heavy", heavies)
        _check("light", others, may_be_empty=True)
        return _rows(self.pairs(heavies, others)) if len(heavies) else []

    def encode_rows(
        self,
        antigens: Sequence[str],
        heavies: Sequence[str],
        lights: Sequence[str | None] | None = None,
        affinities: Sequence[float | None] | None = None,
    ) -> dict[str, list[Any]]:
        """Columns of a data set under the names that a generator's `forward` has, so that Trainer keeps them.

        Each distinct antigen is encoded once, and its rows share one array.

        Returns:
            `input_ids`: the antigen; `labels`: what is to be written, the pair without its `<bos>`; both (tokens,)
            int64 arrays; `affinity`: float, NaN where None or NaN was given, or where there is no such column.

        Raises:
            DataError: as above; columns of different lengths; or an affinity that is infinite.
        """
        numbers = [math.nan] * len(heavies) if affinities is None else [_number(i, a) for i, a in enumerate(affinities)]
        if not len(antigens) == len(heavies) == len(numbers):
            raise DataError(
                f"{len(antigens)} antigens, {len(heavies)} heavy chains, {len(numbers)} affinities: give one per row."
            )
        distinct = list(dict.fromkeys(antigens))
        encoded = dict(zip(distinct, self.encode_antigens(distinct)))
        pairs = self.encode_pairs(heavies, lights)
        return {
            "input_ids": [encoded[antigen] for antigen in antigens],
            "labels": [pair[1:] for pair in pairs],
            "affinity": numbers,
        }


def decode_pair(ids: Iterable[int]) -> AntibodyPair:
    """The antibody that ids spell, up to the first `<eos>`; `<bos>` at the beginning may be there or not.

    Nothing is repaired: special tokens in wrong places are left out of the chains and named in `malformed`. Residues
    behind a second `<sep>` belong to neither chain. What follows `<eos>` is not looked at.

    Raises:
        DataError: an id outside of the vocabulary, such as -100.
    """
    tokens = [int(i) for i in ids]
    if unknown := [i for i in tokens if not 0 <= i < len(VOCABULARY)]:
        raise DataError(f"Token id {unknown[0]}: allowed are 0 to {len(VOCABULARY) - 1}. Leave out ignored labels.")
    malformed = []
    tokens = tokens[1:] if tokens[:1] == [BOS_ID] else tokens
    if EOS_ID in tokens:
        tokens = tokens[: tokens.index(EOS_ID)]
    else:
        malformed.append(f"no {EOS}: cut off")
    malformed += [f"{token} inside" for token, i in ((PAD, PAD_ID), (BOS, BOS_ID)) if i in tokens]
    chains: list[str] = [""]
    for i in tokens:
        if i == SEP_ID:
            chains.append("")
        elif i not in (PAD_ID, BOS_ID):
            chains[-1] += VOCABULARY[i]
    if not chains[0]:
        malformed.append("no heavy chain")
    if len(chains) > 1 and not chains[1]:
        malformed.append(f"{SEP}, but no light chain")
    if len(chains) > 2:
        malformed.append(f"{len(chains)} chains")
    return AntibodyPair(chains[0], chains[1] if len(chains) > 1 and chains[1] else None, tuple(malformed))


def decode_pairs(ids: Any) -> list[AntibodyPair]:
    """`decode_pair` of each row of what `generate` returns, (n, tokens)."""
    return [decode_pair(row) for row in (ids.tolist() if hasattr(ids, "tolist") else ids)]


def _rows(batch: dict[str, Any]) -> list[np.ndarray]:
    lengths = batch["attention_mask"].sum(1).tolist()
    return [ids[:length].copy() for ids, length in zip(batch["input_ids"].numpy(), lengths)]


def _check(what: str, sequences: Sequence[str], may_be_empty: bool = False) -> None:
    for i, sequence in enumerate(sequences):
        if not isinstance(sequence, str) or not (sequence or may_be_empty):
            raise DataError(f"Row {i}, {what}: {sequence!r}; must be a sequence of residues. Leave the row out.")
        if not _LETTERS.issuperset(sequence):
            wrong = sorted(set(sequence) - _LETTERS)[0]
            raise DataError(
                f"Row {i}, {what}: {shorten(sequence)!r} has {wrong!r}; allowed are {STANDARD}, {UNKNOWN} and {RARE}, "
                "in upper case. Clean the column first (hf_ext.data.proteins.clean_sequences)."
            )


def _number(row: int, value: float | None) -> float:
    number = math.nan if value is None else float(value)
    if math.isinf(number):
        raise DataError(f"Row {row}, affinity: {value!r}; must be finite, or NaN where it is unknown.")
    return number
