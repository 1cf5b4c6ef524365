"""Residues to token ids by table look-up: the tokenizer's own ids, without its per-character Python."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentError, DataError
from .proteins import RARE, STANDARD

MAX_UNKNOWN_SHARE = 0.01
_NO_LIMIT = 1_000_000  # tokenizers without a limit report 1e30


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


class ResidueTokenizer:
    """Tokenizes clean protein sequences, one column or a pair such as heavy and light, into padded tensors.

    Works for vocabularies with one token per residue: ESM, BERT style, and T5 style with spaces (IgT5, ProtT5). The
    table and the framing are read off the given tokenizer, so ids equal `tokenizer(...)`'s. Rare residues that the
    vocabulary lacks (U, Z, O, B, J) take X's id.

    Args:
        tokenizer: a transformers tokenizer.
        num_parts: 1 for single sequences, 2 for pairs (`heavy </s> light`, of ESM C `heavy|light`).
        max_length: tokens including special ones; default: the tokenizer's own limit, if it has one.

    Raises:
        DataError: the vocabulary does not give one known id per standard residue, wherever it stands.

    Cost: about 50 tokenizer calls once; then about 100 M residues/s (the pure-Python EsmTokenizer: 0.5 M/s).
    """

    def __init__(self, tokenizer: Any, num_parts: int = 1, max_length: int | None = None):
        if num_parts not in (1, 2):
            raise DataError(f"num_parts={num_parts}: an encoder input takes one sequence or a pair (1 or 2).")
        if tokenizer.pad_token_id is None or tokenizer.unk_token_id is None:
            raise _not_for_proteins(tokenizer, "has no padding or no unknown token")
        self.tokenizer = tokenizer
        self.num_parts = num_parts
        self.pad_token_id = int(tokenizer.pad_token_id)
        self.template = _read_template(tokenizer, num_parts)
        self.frames_alike = num_parts == 1 or _frames_alike(tokenizer, self.template)
        self.table = _read_table(tokenizer, self.template)
        _check_pairs(tokenizer, self.template, self.table)
        limit = max_length or int(min(tokenizer.model_max_length, _NO_LIMIT))
        self.max_residues: int | None = None if limit >= _NO_LIMIT else limit - self.template.num_special

    def limit_tokens(self, max_length: int) -> None:
        """Lowers the limit to `max_length` tokens, special ones included.

        Raises:
            ArgumentError: that leaves no room for a residue of each part.
        """
        residues = max_length - self.template.num_special
        if residues < self.num_parts:
            raise ArgumentError(
                f"max_length={max_length}: {self.template.num_special} tokens are special ones, so nothing is left for "
                "residues. Give more, or leave it out."
            )
        self.max_residues = min(residues, self.max_residues or residues)

    def __call__(self, *parts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Encodes n rows; `parts` holds one list of n strings per part.

        A pair of which one part is "" becomes the other part alone, as a single sequence.

        Returns:
            `input_ids` and `attention_mask` (n, longest row), int64; `residue_mask` (n, longest row), bool, true where
            a residue stands (not on special or padding tokens); for BERT-style pairs also `token_type_ids`.
        """
        ids = [self._lookup(part) for part in parts]
        lengths = np.stack([np.fromiter(map(len, part), np.int64, len(part)) for part in parts])
        num_rows = lengths.shape[1]
        is_whole = lengths.min(axis=0) > 0 if self.num_parts == 2 else np.ones(num_rows, bool)
        framing = self.template.num_special - len(self.template.between) * ~is_whole
        width = int((lengths.sum(0) + framing).max(initial=0 if num_rows else self.template.num_special))
        input_ids = np.full((num_rows, width), self.pad_token_id, np.int64)
        residue_mask = np.zeros((num_rows, width), bool)
        token_types = np.zeros((num_rows, width), np.int64)
        rows = np.arange(num_rows)

        start = _write_specials(input_ids, rows, np.zeros(num_rows, np.int64), self.template.prefix)
        for part, (values, length) in enumerate(zip(ids, lengths)):
            if part:
                start[is_whole] = _write_specials(input_ids, rows[is_whole], start[is_whole], self.template.between)
            row_of, column_of = _flat_positions(length, start)
            input_ids[row_of, column_of] = values
            residue_mask[row_of, column_of] = True
            if part:
                token_types[row_of, column_of] = is_whole[row_of]
            start = start + length
        end = _write_specials(input_ids, rows, start, self.template.suffix)
        positions = np.arange(width)[None, :]
        batch = {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy((positions < end[:, None]).astype(np.int64)),
            "residue_mask": torch.from_numpy(residue_mask),
        }
        if self.template.has_token_types and self.num_parts == 2:
            token_types[is_whole[:, None] & (positions >= start[:, None]) & (positions < end[:, None])] = 1
            batch["token_type_ids"] = torch.from_numpy(token_types)
        return batch

    def _lookup(self, sequences: Sequence[str]) -> np.ndarray:
        return self.table[np.frombuffer("".join(sequences).encode("ascii"), np.uint8)]

    def check_contract(self, sequences: Sequence[str], column: str) -> float:
        """Refuses data that this vocabulary cannot express; returns the share of unknown residues.

        Raises:
            DataError: more than 1 % of the residues become the unknown token.
        """
        counts = np.bincount(np.frombuffer("".join(sequences).encode("ascii"), np.uint8), minlength=256)
        unknown = np.flatnonzero((self.table == self.tokenizer.unk_token_id) & (counts > 0))
        share = float(counts[unknown].sum() / max(1, counts.sum()))
        if share > MAX_UNKNOWN_SHARE:
            raise DataError(
                f"Column '{column}': {share:.1%} of the residues become the unknown token of "
                f"{type(self.tokenizer).__name__} (allowed: {MAX_UNKNOWN_SHARE:.0%}; unknown letters: "
                f"{' '.join(map(chr, unknown))}). Use an encoder whose vocabulary has these letters, or "
                "leave out the rows that have them."
            )
        return share

    def fingerprint(self) -> str:
        """Hash of everything that decides the ids: table, framing, pad id. Equal hashes give equal ids."""
        template = [self.template.prefix, self.template.between, self.template.suffix]
        facts = json.dumps([self.table.tolist(), template, self.pad_token_id, self.num_parts])
        return hashlib.sha256(facts.encode()).hexdigest()


def _flat_positions(lengths: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every residue when row i's run of `lengths[i]` residues begins at column `starts[i]`."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    before = np.cumsum(lengths) - lengths
    return rows, np.arange(len(rows)) - np.repeat(before - starts, lengths)


def _write_specials(ids: np.ndarray, rows: np.ndarray, start: np.ndarray, specials: tuple[int, ...]) -> np.ndarray:
    for offset, special in enumerate(specials):
        ids[rows, start + offset] = special
    return start + len(specials)


def _tokenize(tokenizer: Any, spaced: bool, *parts: str) -> Any:
    texts = [" ".join(part) if spaced else part for part in parts]
    # ESM C's chains are one text with a token between them; as two texts its tokenizer frames them with nothing at all.
    chain_break = getattr(tokenizer, "chain_break_token", None)
    return tokenizer(chain_break.join(texts)) if chain_break else tokenizer(*texts)


def _read_template(tokenizer: Any, num_parts: int) -> Template:
    spaced = _needs_spaces(tokenizer)
    single, other = (list(_tokenize(tokenizer, spaced, letter)["input_ids"]) for letter in "AC")
    first = next(i for i, (a, c) in enumerate(zip(single, other)) if a != c)
    suffix = single[first + 1 :]
    encoded = _tokenize(tokenizer, spaced, *["A"] * num_parts)
    ids = list(encoded["input_ids"])
    between = ids[first + 1 : len(ids) - len(suffix) - 1]
    return Template(tuple(single[:first]), tuple(between), tuple(suffix), spaced, "token_type_ids" in encoded)


def _frames_alike(tokenizer: Any, template: Template) -> bool:
    """Whether a pair begins and ends as a single sequence does, so that one part of it alone can be written as such."""
    ids = list(_tokenize(tokenizer, template.spaced, "A", "A")["input_ids"])
    begins = ids[: len(template.prefix)] == [*template.prefix]
    return begins and ids[len(ids) - len(template.suffix) :] == [*template.suffix]


def _needs_spaces(tokenizer: Any) -> bool:
    """Whether residues must be separated by spaces to be seen one by one (T5 and BERT vocabularies: yes; ESM: no)."""
    for spaced in (False, True):
        ids = [i for i in _tokenize(tokenizer, spaced, STANDARD)["input_ids"] if i not in tokenizer.all_special_ids]
        if len(ids) == len(STANDARD) == len(set(ids)):
            return spaced
    problem = "does not map the 20 standard residues to 20 different tokens, with or without spaces"
    raise _not_for_proteins(tokenizer, problem)


def _not_for_proteins(tokenizer: Any, problem: str) -> DataError:
    name = f"{type(tokenizer).__name__} ({tokenizer.name_or_path!r})"
    return DataError(f"{name} {problem}. Use the tokenizer of a protein language model with one token per residue.")


def _check_pairs(tokenizer: Any, template: Template, table: np.ndarray) -> None:
    """Refuses vocabularies with longer pieces or with other tokens inside a word: no look-up gives their ids."""
    for first in STANDARD:
        probe = "".join(first + second for second in STANDARD)
        ids = list(_tokenize(tokenizer, template.spaced, probe)["input_ids"])
        if ids != [*template.prefix, *table[[*probe.encode()]].tolist(), *template.suffix]:
            raise _not_for_proteins(tokenizer, "does not give a residue the same one token wherever it stands")


def _read_table(tokenizer: Any, template: Template) -> np.ndarray:
    """Byte value -> token id for the residue letters; the unknown token's for all others."""
    known: dict[str, int] = {}
    for letter in (*STANDARD, "X", *RARE):
        ids = list(_tokenize(tokenizer, template.spaced, letter)["input_ids"])
        residues = ids[len(template.prefix) : len(ids) - len(template.suffix)]
        if len(residues) == 1 and residues[0] != tokenizer.unk_token_id:
            known[letter] = residues[0]
    fallback = known.get("X", tokenizer.unk_token_id)
    table = np.full(256, tokenizer.unk_token_id, np.int64)
    for letter in (*STANDARD, "X", *RARE):
        table[ord(letter)] = known.get(letter, fallback)
    return table
