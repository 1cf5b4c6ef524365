"""Rows of text columns to model inputs: the tokenizer's own ids by table look-up, without its per-character Python."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from ...errors import ArgumentError, DataError
from ...files import parse_json, write_text
from ...labels import ONE_NUMBER, LabelKind, kind_from_state
from ...pretrained import reading
from ..arguments import TooLong
from ..columns import column_names, read_columns, row_lengths
from ..proteins import RARE, STANDARD, UNKNOWN_RESIDUE

MAX_UNKNOWN_SHARE = 0.01
STREAM_CHECK_ROWS = 1000
MAX_LISTED = 10  # rows in a message
INPUTS_NAME = "inputs.json"
OPTIONS = ("too_long", "missing_chains")
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
        DataError: the vocabulary does not give one known id per standard residue, wherever it stands; or a pair begins
            or ends otherwise than a single sequence.
        ArgumentError: `max_length` leaves no room for a residue of each part.

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
        self.table = _read_table(tokenizer, self.template)
        limit = int(min(max_length or tokenizer.model_max_length, _NO_LIMIT))
        self.max_residues: int | None = None if limit >= _NO_LIMIT else limit - self.template.num_special
        self.limited_by = "its encoder takes"  # with the number of residues behind it
        if limit - self.template.num_special < num_parts:
            raise ArgumentError(
                f"max_length={limit}: {self.template.num_special} tokens are special ones, so nothing is left for "
                "residues. Give more, or leave it out."
            )

    def limit(self, max_residues: int | None, limited_by: str) -> None:
        """Lowers `max_residues`, of both parts of a pair; `limited_by` are the words before the number in messages."""
        if max_residues is not None and max_residues < (self.max_residues or _NO_LIMIT):
            self.max_residues = max_residues
            self.limited_by = limited_by

    def __call__(self, *parts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Encodes n rows; `parts` holds one list of n strings per part.

        A pair of which one part is "" becomes the other part alone, as a single sequence.

        Returns:
            `input_ids` and `attention_mask` (n, longest row), int64; `residue_mask` (n, longest row), bool, true where
            a residue stands (not on special or padding tokens); for BERT-style pairs also `token_type_ids`.
        """
        frame = self.template
        num_rows = len(parts[0])
        lengths = np.array([[*map(len, part)] for part in parts], np.int64)
        is_pair = lengths.min(axis=0) > 0 if self.num_parts == 2 else np.zeros(num_rows, bool)
        # Columns, per row, at which the first part ends, the second begins and ends, and the row ends.
        first_end = len(frame.prefix) + lengths[0]
        second = first_end + len(frame.between) * is_pair
        second_end = second + lengths[1:].sum(0)
        end = second_end + len(frame.suffix)
        columns = np.arange(end.max(initial=len(frame.prefix)))
        is_token = columns < end[:, None]
        is_residue = (columns >= len(frame.prefix)) & (columns < second_end[:, None])
        is_residue &= (columns < first_end[:, None]) | (columns >= second[:, None])

        ids = np.full(is_token.shape, self.pad_token_id, np.int64)
        ids[is_residue] = self.table[_bytes_of(chain.from_iterable(zip(*parts)))]
        ids[:, : len(frame.prefix)] = frame.prefix
        pairs = np.flatnonzero(is_pair)
        for offset, special in enumerate(frame.between):
            ids[pairs, first_end[pairs] + offset] = special
        for offset, special in enumerate(frame.suffix):
            ids[np.arange(num_rows), second_end + offset] = special
        made = {"input_ids": ids, "attention_mask": is_token.astype(np.int64), "residue_mask": is_residue}
        if frame.has_token_types and self.num_parts == 2:
            is_second = is_pair[:, None] & is_token & (columns >= second[:, None])
            made["token_type_ids"] = is_second.astype(np.int64)
        return {name: torch.from_numpy(values) for name, values in made.items()}

    def check_contract(self, sequences: Sequence[str], column: str) -> float:
        """Refuses data that this vocabulary cannot express; returns the share of unknown residues.

        Raises:
            DataError: more than 1 % of the residues become the unknown token.
        """
        counts = np.bincount(_bytes_of(sequences), minlength=256)
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
        """Hashes everything that decides the ids: table, framing, pad id. Equal hashes give equal ids."""
        template = [self.template.prefix, self.template.between, self.template.suffix]
        facts = json.dumps([self.table.tolist(), template, self.pad_token_id, self.num_parts])
        return hashlib.sha256(facts.encode()).hexdigest()


def _bytes_of(sequences: Iterable[str]) -> np.ndarray:
    return np.frombuffer("".join(sequences).encode("ascii"), np.uint8)


def _tokenize(tokenizer: Any, spaced: bool, *parts: str) -> Any:
    texts = [" ".join(part) if spaced else part for part in parts]
    # ESM C's chains are one text with a token between them; as two texts its tokenizer frames them with nothing at all.
    chain_break = getattr(tokenizer, "chain_break_token", None)
    return tokenizer(chain_break.join(texts)) if chain_break else tokenizer(*texts)


def _read_template(tokenizer: Any, num_parts: int) -> Template:
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
    encoded = _tokenize(tokenizer, spaced, *["A"] * num_parts)
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
    known: dict[str, int] = {}
    for letter in (*STANDARD, "X", *RARE):
        ids = _tokenize(tokenizer, template.spaced, letter)["input_ids"]
        residues = ids[len(template.prefix) : len(ids) - len(template.suffix)]
        if len(residues) == 1 and residues[0] != tokenizer.unk_token_id:
            known[letter] = residues[0]
    table = np.full(256, tokenizer.unk_token_id, np.int64)
    for letter in (*STANDARD, "X", *RARE):
        table[ord(letter)] = known.get(letter, known.get("X", tokenizer.unk_token_id))
    for first in STANDARD:
        probe = "".join(first + second for second in STANDARD)
        looked_up = [*template.prefix, *table[[*probe.encode()]].tolist(), *template.suffix]
        if _tokenize(tokenizer, template.spaced, probe)["input_ids"] != looked_up:
            raise _not_for_proteins(tokenizer, "does not give a residue the same one token wherever it stands")
    return table


def _not_for_proteins(tokenizer: Any, problem: str) -> DataError:
    name = f"{type(tokenizer).__name__} ({tokenizer.name_or_path!r})"
    return DataError(f"{name} {problem}. Use the tokenizer of a protein language model with one token per residue.")


def check_inputs(collator: Any, splits: Mapping[str, Any], source: str | None = None) -> dict[str, dict[str, Any]]:
    """Checks that the vocabulary and the length limit of each encoder fit the data, before anything is computed.

    Args:
        collator: `SequenceCollator` or `MaskedLMCollator`.
        splits: name -> rows; of a stream the first `STREAM_CHECK_ROWS` stand for all.
        source: where the rows are from, for messages.

    Returns:
        Per input: the share of unknown residues; the longest row in residues; and where rows are cut `cut`, a sentence
        that says by what, how many sequences and rows, and how much is lost.

    Raises:
        DataError: more than 1 % unknown residues, or rows above the limit with `too_long="error"`: how many, and the
            first ones with file row and length.
    """
    report: dict[str, dict[str, Any]] = {}
    for name, columns in collator.columns.items():
        counts = Counter(row for split in splits.values() for row in _read_rows(split, columns))
        tokenizer = collator.tokenizers[name]
        unknown = tokenizer.check_contract([part for row in counts for part in row], name)
        lengths = {row: sum(map(len, row)) for row in counts}
        limit = tokenizer.max_residues or _NO_LIMIT
        above = {row: length for row, length in lengths.items() if length > limit}
        report[name] = {"unknown_share": unknown, "longest": max(lengths.values())}
        if above:
            try:
                collator.encode(name, *zip(max(above.items(), key=itemgetter(1))[0]))  # raises unless allowed
            except DataError as error:
                rows_above = _list_long(splits, columns, limit, source)
                raise DataError(f"{error}\n{rows_above}") from error
            lost = sum((length - limit) * counts[row] for row, length in above.items())
            share = lost / sum(length * counts[row] for row, length in lengths.items())
            rows = f"{sum(counts[row] for row in above):,} of {counts.total():,} rows"
            report[name]["cut"] = (
                f"longer than the {limit:,} residues that {tokenizer.limited_by}: {len(above):,} of {len(counts):,} "
                f"sequences ({rows}). {collator.CUT}; {lost:,} residues, {share:.2%} of all, are not read. Instead: "
                "cut them into domains, take an encoder for longer ones, or refuse them with --too_long error."
            )
    return report


def _list_long(splits: Mapping[str, Any], columns: Sequence[str], limit: int, source: str | None) -> str:
    """Lists rows above the limit: how many, and the first ones."""
    found = []
    for split_name, split in splits.items():
        rows = split if hasattr(split, "__len__") else islice(split, STREAM_CHECK_ROWS)
        for number, row in enumerate(rows, 1):
            length = sum(len(row[column]) for column in columns)
            if length > limit:
                found.append(f"row {row.get('source_row', number)} of {split_name} ({length:,} residues)")
    more = f" and {len(found) - MAX_LISTED:,} more" if len(found) > MAX_LISTED else ""
    return (
        f"{source or 'The data'}: {len(found):,} row{'s are' if len(found) > 1 else ' is'} too long: "
        f"{', '.join(found[:MAX_LISTED])}{more}. Or leave them out: --too_long error --max_residues N "
        "--bad_rows drop, N per column."
    )


def _read_rows(split: Any, columns: Sequence[str]) -> Iterable[Any]:
    if hasattr(split, "__len__"):
        return read_columns(split, columns)
    return (tuple(row[column] for column in columns) for row in islice(split, STREAM_CHECK_ROWS))


class SequenceCollator:
    """Tokenizes each encoder input of a batch; truncates what is too long; stacks labels and bounds.

    Args:
        tokenizers: input name -> its tokenizer.
        columns: input name -> the one or two columns it reads.
        too_long: "error" or "truncate" for inputs above the tokenizer's limit.
        missing_chains: columns that may be "". Of a pair, the other part is then encoded alone. An input that a row
            lacks altogether is not encoded: `sequences` holds the rows that have it, and with them `place`, (n,) int64,
            which of these each row of the batch is, -1 where it lacks the input.
        kind: of the labels.

    Attributes:
        optional_inputs: names of inputs all of whose columns may be "".

    Raises:
        DataError: (when called) an input is too long and `too_long` is "error".
    """

    CUT = "Their ends are cut off"

    def __init__(
        self,
        tokenizers: Mapping[str, ResidueTokenizer],
        columns: Mapping[str, Sequence[str]],
        too_long: TooLong = "error",
        missing_chains: Sequence[str] = (),
        kind: LabelKind = ONE_NUMBER,
    ):
        self.tokenizers = dict(tokenizers)
        self.kind = kind
        self.columns = {name: list(parts) for name, parts in columns.items()}
        self.too_long: TooLong = too_long
        self.missing_chains = [*missing_chains]

    @property
    def optional_inputs(self) -> list[str]:
        return [name for name, parts in self.columns.items() if set(parts) <= set(self.missing_chains)]

    def resolve_long(self, too_long: TooLong | None, max_residues: int | None) -> None:
        """Sets what becomes of long inputs from here on; None leaves it as it is."""
        self.too_long = too_long or self.too_long
        for tokenizer in self.tokenizers.values() if self.too_long == "truncate" else ():
            tokenizer.limit(max_residues, "--max_residues allows")

    @property
    def longest(self) -> int | None:
        """Residues that are left of a row of one column; None for all."""
        (tokenizer, *_) = self.tokenizers.values()
        return tokenizer.max_residues if self.too_long == "truncate" else None

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes each input's tokenizer to `<folder>/tokenizers/<n>` and how inputs are made to `inputs.json`."""
        root = Path(folder)
        inputs = []
        for i, (name, tokenizer) in enumerate(self.tokenizers.items()):
            tokenizer.tokenizer.save_pretrained(root / "tokenizers" / str(i))
            inputs.append({"columns": self.columns[name], "max_residues": tokenizer.max_residues})
        settings = {**{name: getattr(self, name) for name in OPTIONS}, "label_kind": self.kind.state()}
        write_text(root / INPUTS_NAME, json.dumps({"inputs": inputs, **settings}, indent=2) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> SequenceCollator:
        """Reads back what `save_pretrained` wrote: the same ids for the same text.

        Raises:
            DataError: `inputs.json` is not there, or damaged.
            ArgumentError: a tokenizer is not there, damaged, or needs code of its own.
        """
        root = Path(folder)
        path = root / INPUTS_NAME
        try:
            settings = parse_json(path.read_bytes())
            inputs = {"+".join(spec["columns"]): (spec["columns"], spec["max_residues"]) for spec in settings["inputs"]}
            options = {name: settings[name] for name in OPTIONS}
            kind = kind_from_state(settings["label_kind"])
        except (OSError, ValueError, TypeError, KeyError) as error:  # JSONDecodeError is a ValueError
            text = f"{path}: not there, or damaged ({type(error).__name__}: {error})."
            raise DataError(f"{text} Give a folder that `hf-ext train` wrote, or copy the model again.") from error
        tokenizers = {}
        for i, (name, (columns, max_residues)) in enumerate(inputs.items()):
            place = root / "tokenizers" / str(i)
            with reading(f"{place}: no tokenizer there for input '{name}'", place, "Copy the model again."):
                tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False, local_files_only=True)
            tokenizers[name] = ResidueTokenizer(tokenizer, len(columns))
            tokenizers[name].max_residues = max_residues
            tokenizers[name].limited_by = "this model reads"
        return cls(tokenizers, {name: columns for name, (columns, _) in inputs.items()}, **options, kind=kind)

    def __call__(self, features: Any) -> dict[str, Any]:
        """`labels` and `bounds` of rows that have them, and `sequences`: the tensors of each input."""
        if isinstance(features, Mapping):  # a batch of cached embeddings, fetched whole
            batch = dict(features)
            rows = batch.pop("live", None)
        else:
            rows = features
            batch = {}
            if "label" in rows[0]:
                batch["labels"] = self.kind.stack([row["label"] for row in rows], self.longest)
            if "bound" in rows[0]:
                batch["bounds"] = torch.tensor([int(row["bound"]) for row in rows])
        if rows:
            live = [name for name in self.columns if all(column in rows[0] for column in self.columns[name])]
            batch["sequences"] = {name: self.encode_rows(name, rows) for name in live}
        return batch

    def count_tokens(self, dataset: object) -> np.ndarray:
        """Counts tokens of each row, special ones included, of the inputs that `dataset` has: (rows, inputs), int64."""
        names = set(column_names(dataset))
        counted = []
        for name in (name for name, columns in self.columns.items() if set(columns) <= names):
            tokenizer = self.tokenizers[name]
            residues = np.array(row_lengths(dataset, {name: self.columns[name]}), np.int64)
            longest = int(residues.max(initial=1))
            limit = longest if self.too_long == "error" else tokenizer.max_residues or longest
            counted.append(np.minimum(residues, limit) + tokenizer.template.num_special)
        return np.stack(counted, axis=1)

    def encode_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Encodes one encoder input into `ResidueTokenizer`'s tensors, with `place` where rows may lack it."""
        columns = self.columns[name]
        inputs = [tuple(row[column] for column in columns) for row in rows]
        if name not in self.optional_inputs:
            return self.encode(name, *zip(*inputs))
        present = [parts for parts in inputs if any(parts)]
        # Where no row has it, one residue stands in, which no row reads: all processes then run the encoder, which may
        # be split among them, and its weights get gradients, of zero.
        batch = self.encode(name, *zip(*(present or [(UNKNOWN_RESIDUE,) * len(columns)])))
        has_input = torch.tensor([any(parts) for parts in inputs])
        batch["place"] = torch.where(has_input, has_input.cumsum(0) - 1, -1)
        return batch

    def encode(self, name: str, *parts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Encodes as `encode_rows` does, from one list of strings per column."""
        tokenizer = self.tokenizers[name]
        limit = tokenizer.max_residues
        longest = max(sum(map(len, row)) for row in zip(*parts))
        if limit is None or longest <= limit:
            return tokenizer(*parts)
        if self.too_long == "truncate":
            return tokenizer(*_truncate(parts, limit))
        told = f"Input '{name}' has {longest} residues; {tokenizer.limited_by} {limit}"
        raise DataError(f"{told}. Use --too_long truncate.")


def _truncate(parts: Sequence[Sequence[str]], limit: int) -> list[list[str]]:
    """Cuts each row to `limit` residues; of a pair, the longer part loses residues first."""
    if len(parts) == 1:
        return [[sequence[:limit] for sequence in parts[0]]]
    kept = []
    for a, b in zip(*parts):
        keep_b = min(len(b), max(limit - len(a), limit // 2))
        kept.append((a[: limit - keep_b], b[:keep_b]))
    return [list(part) for part in zip(*kept)]
