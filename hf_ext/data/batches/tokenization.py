"""Rows of text columns to token ids: the tokenizer's own ids by table look-up, without its per-character Python."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import ArgumentError, DataError
from ..proteins import ESM_VOCABULARY, RARE, STANDARD, UNKNOWN_RESIDUE

MAX_UNKNOWN_FRACTION = 0.01
NO_LIMIT = 1_000_000  # tokenizers without a limit report 1e30


@dataclass(frozen=True)
class Template:
    """How a tokenizer frames residues: special ids before, between (for pairs) and after them."""

    prefix: tuple[int, ...]
    between: tuple[int, ...]
    suffix: tuple[int, ...]
    spaced: bool
    has_token_types: bool

    @property
    def num_special(self) -> int:
        return len(self.prefix) + len(self.between) + len(self.suffix)


def make_esm_tokenizer(**settings: Any) -> Any:
    """Makes ESM-2's tokenizer from its 33 tokens; `settings` as of `EsmTokenizer`."""
    from transformers import EsmTokenizer  # here, since other vocabularies need none of it

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.txt"
        path.write_text("\n".join(ESM_VOCABULARY))
        return EsmTokenizer(str(path), **settings)


class ResidueTokenizer:
    """Tokenizes clean protein sequences, one column or a pair such as heavy and light, into padded tensors.

    Works for vocabularies with one token per residue: ESM, BERT style, and T5 style with spaces (IgT5, ProtT5). The
    table and the framing are read off the given tokenizer, so ids equal `tokenizer(...)`'s. Rare residues that the
    vocabulary lacks (U, Z, O, B, J) take X's id.

    Args:
        tokenizer: a transformers tokenizer.
        num_chains: 1 for single sequences, 2 for pairs (`heavy </s> light`, of ESM C `heavy|light`).
        max_length: tokens including special ones; default: the tokenizer's own limit, if it has one.

    Raises:
        DataError: the vocabulary does not give one known id per standard residue, wherever it stands; or a pair begins
            or ends otherwise than a single sequence.
        ArgumentError: `max_length` leaves no room for a residue of each chain.

    Cost: about 50 tokenizer calls once; then about 100 M residues/s (the pure-Python EsmTokenizer: 0.5 M/s).
    """

    def __init__(self, tokenizer: Any, num_chains: int = 1, max_length: int | None = None):
        if num_chains not in (1, 2):
            raise DataError(f"num_chains={num_chains}: an encoder input takes one sequence or a pair (1 or 2).")
        if tokenizer.pad_token_id is None or tokenizer.unk_token_id is None:
            raise _not_for_proteins(tokenizer, "has no padding or no unknown token")
        self.tokenizer = tokenizer
        self.num_chains = num_chains
        self.pad_token_id = int(tokenizer.pad_token_id)
        self.pad_to_multiple_of = 1
        self.template = _read_template(tokenizer, num_chains)
        self.table = _read_table(tokenizer, self.template)
        limit = int(min(max_length or tokenizer.model_max_length, NO_LIMIT))
        self.max_residues: int | None = None if limit >= NO_LIMIT else limit - self.template.num_special
        self.limited_by = "its encoder takes"  # with the number of residues behind it
        if limit - self.template.num_special < num_chains:
            raise ArgumentError(
                f"max_length={limit}: {self.template.num_special} tokens are special ones, so nothing is left for "
                "residues. Give more, or leave it out."
            )

    def limit(self, max_residues: int | None, limited_by: str) -> None:
        """Lowers `max_residues`, of both chains of a pair; `limited_by` are the words before the number in messages."""
        if max_residues is not None and max_residues < (self.max_residues or NO_LIMIT):
            self.max_residues = max_residues
            self.limited_by = limited_by

    def __call__(self, *chains: Sequence[str]) -> dict[str, torch.Tensor]:
        """Encodes n rows; `chains` holds one list of n strings per chain.

        A pair of which one chain is "" becomes the other chain alone, as a single sequence.

        Rows are as wide as the longest, or the next multiple of `pad_to_multiple_of` that the encoder takes.

        Returns:
            `input_ids` and `attention_mask` (n, longest row), int64; `residue_mask` (n, longest row), bool, true where
            a residue stands (not on special or padding tokens); for BERT-style pairs also `token_type_ids`.
        """
        frame = self.template
        num_rows = len(chains[0])
        lengths = np.array([[*map(len, chain)] for chain in chains], np.int64)
        is_pair = lengths.min(axis=0) > 0 if self.num_chains == 2 else np.zeros(num_rows, bool)
        # Columns, per row, at which the first chain ends, the second begins and ends, and the row ends.
        first_end = len(frame.prefix) + lengths[0]
        second = first_end + len(frame.between) * is_pair
        second_end = second + lengths[1:].sum(0)
        end = second_end + len(frame.suffix)
        width = int(end.max(initial=len(frame.prefix)))
        rounded = -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of
        most = (self.max_residues or NO_LIMIT) + frame.num_special  # no position is behind it
        columns = np.arange(max(width, min(rounded, most)))
        is_token = columns < end[:, None]
        is_residue = (columns >= len(frame.prefix)) & (columns < second_end[:, None])
        is_residue &= (columns < first_end[:, None]) | (columns >= second[:, None])

        ids = np.full(is_token.shape, self.pad_token_id, np.int64)
        ids[is_residue] = self.table[_bytes_of(chain.from_iterable(zip(*chains)))]
        ids[:, : len(frame.prefix)] = frame.prefix
        pairs = np.flatnonzero(is_pair)
        for offset, special in enumerate(frame.between):
            ids[pairs, first_end[pairs] + offset] = special
        for offset, special in enumerate(frame.suffix):
            ids[np.arange(num_rows), second_end + offset] = special
        made = {"input_ids": ids, "attention_mask": is_token.astype(np.int64), "residue_mask": is_residue}
        if frame.has_token_types and self.num_chains == 2:
            is_second = is_pair[:, None] & is_token & (columns >= second[:, None])
            made["token_type_ids"] = is_second.astype(np.int64)
        return {name: torch.from_numpy(values) for name, values in made.items()}

    def check_contract(self, counts: np.ndarray, column: str) -> float:
        """Refuses data of which `count_letters` found these; returns the fraction of unknown residues.

        Raises:
            DataError: more than 1 % of the residues become the unknown token.
        """
        unknown = np.flatnonzero((self.table == self.tokenizer.unk_token_id) & (counts > 0))
        fraction = float(counts[unknown].sum() / max(1, counts.sum()))
        if fraction > MAX_UNKNOWN_FRACTION:
            raise DataError(
                f"Column '{column}': {fraction:.1%} of the residues become the unknown token of "
                f"{type(self.tokenizer).__name__} (allowed: {MAX_UNKNOWN_FRACTION:.0%}; unknown letters: "
                f"{' '.join(map(chr, unknown))}). Use an encoder whose vocabulary has these letters, or "
                "leave out the rows that have them."
            )
        return fraction

    def fingerprint(self) -> str:
        """Hashes everything that decides the ids: table, framing, pad id. Equal hashes give equal ids."""
        template = [self.template.prefix, self.template.between, self.template.suffix]
        facts = json.dumps([self.table.tolist(), template, self.pad_token_id, self.num_chains])
        return hashlib.sha256(facts.encode()).hexdigest()


def count_letters(sequences: Iterable[str]) -> np.ndarray:
    """Counts how often each letter occurs, (256,), by its number in ASCII. Cost: 10 bytes of memory a letter."""
    return np.bincount(_bytes_of(sequences), minlength=256)


def _bytes_of(sequences: Iterable[str]) -> np.ndarray:
    return np.frombuffer("".join(sequences).encode("ascii"), np.uint8)


def _tokenize(tokenizer: Any, spaced: bool, *chains: str) -> Any:
    texts = [" ".join(chain) if spaced else chain for chain in chains]
    # ESM C's chains are one text with a token between them; as two texts its tokenizer frames them with nothing at all.
    chain_break = getattr(tokenizer, "chain_break_token", None)
    return tokenizer(chain_break.join(texts)) if chain_break else tokenizer(*texts)


def _read_template(tokenizer: Any, num_chains: int) -> Template:
    for spaced in (False, True):  # residues that are to be seen one by one: spaced for T5 and BERT, not for ESM
        ids = [i for i in _tokenize(tokenizer, spaced, STANDARD)["input_ids"] if i not in tokenizer.all_special_ids]
        if len(ids) == len(STANDARD) == len(set(ids)):
            break
    else:
        problem = "does not map the 20 standard residues to 20 different tokens, with or without spaces"
        raise _not_for_proteins(tokenizer, problem)
    single, other = (_tokenize(tokenizer, spaced, letter)["input_ids"] for letter in "AC")
    first = next(i for i, (a, c) in enumerate(zip(single, other)) if a != c)
    prefix = tuple(single[:first])
    suffix = tuple(single[first + 1 :])
    encoded = _tokenize(tokenizer, spaced, *["A"] * num_chains)
    ids = encoded["input_ids"]
    end = len(ids) - len(suffix)
    if (*ids[:first], *ids[end:]) != prefix + suffix:
        raise _not_for_proteins(tokenizer, "frames a pair otherwise than a single sequence")
    between = tuple(ids[first + 1 : end - 1])
    return Template(prefix, between, suffix, spaced, "token_type_ids" in encoded)


def _read_table(tokenizer: Any, template: Template) -> np.ndarray:
    """Reads byte value -> token id for the residue letters; the unknown token's for all others.

    Vocabularies with longer pieces, or with other tokens inside a word, are refused: no look-up gives their ids.
    """
    table = np.full(256, tokenizer.unk_token_id, np.int64)
    for letter in (UNKNOWN_RESIDUE, *STANDARD, *RARE):
        ids = _tokenize(tokenizer, template.spaced, letter)["input_ids"]
        residues = ids[len(template.prefix) : len(ids) - len(template.suffix)]
        is_known = len(residues) == 1 and residues[0] != tokenizer.unk_token_id
        table[ord(letter)] = residues[0] if is_known else table[ord(UNKNOWN_RESIDUE)]
    for first in STANDARD:
        probe = "".join(first + second for second in STANDARD)
        looked_up = [*template.prefix, *table[[*probe.encode()]].tolist(), *template.suffix]
        if _tokenize(tokenizer, template.spaced, probe)["input_ids"] != looked_up:
            raise _not_for_proteins(tokenizer, "does not give a residue the same one token wherever it stands")
    return table


def _not_for_proteins(tokenizer: Any, problem: str) -> DataError:
    name = f"{type(tokenizer).__name__} ({tokenizer.name_or_path!r})"
    return DataError(f"{name} {problem}. Use the tokenizer of a protein language model with one token per residue.")
