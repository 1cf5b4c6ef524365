"""Batches of rows for an affinity model: each encoder input tokenized, labels and bounds stacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from ...errors import DataError
from ...files import parse_json
from ...labels import ONE_NUMBER, LabelKind, kind_from_state
from ...pretrained import reading
from ...text import write_json
from ..arguments import NUMBERS, RESIDUES, DataArguments, TooLong
from ..columns import TEACHER, column_names, row_lengths
from ..proteins import UNKNOWN_RESIDUE
from ..variants.features import Variants
from .number_columns import NumberColumns
from .residue_counts import SequenceFeatures
from .tokenization import ResidueTokenizer
from .windows import encode_windows, limit_of

INPUTS_NAME = "inputs.json"
OPTIONS = ("too_long", "missing_chains")
# Of what is read off sequences, by the name that is stored.
SOURCES: dict[str, Any] = {"counts": SequenceFeatures, "variants": Variants}


class SequenceCollator:
    """Tokenizes each encoder input of a batch, in windows what is too long; stacks labels and bounds.

    Args:
        tokenizers: input name -> its tokenizer.
        columns: input name -> the one or two columns it reads.
        too_long: "window", "truncate" or "error" for inputs above the tokenizer's limit. Of pairs "window" truncates.
        missing_chains: columns that may be "". Of a pair, the other chain is then encoded alone. An input that a row
            lacks altogether is not encoded: `sequences` holds the rows that have it, and with them `place`, (n,) int64,
            which of these each row of the batch is, -1 where it lacks the input.
        kind: of the labels.
        numbers: columns that are read beside sequences; None: none.

    Attributes:
        optional_inputs: names of inputs all of whose columns may be "".
        num_residues: what each row must have, see `check_inputs`; None: any number.
        residues: what heads read off sequences beside embeddings, by name in `SOURCES`; nothing until some do.
        variants: what training rows substitute in one protein, for heads and baselines that are fitted; not saved.

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
        numbers: NumberColumns | None = None,
    ):
        self.tokenizers = dict(tokenizers)
        self.kind = kind
        self.numbers = numbers or NumberColumns()
        self.residues: dict[str, Any] = {}
        self.variants = Variants()
        self.columns = {name: list(chains) for name, chains in columns.items()}
        self.too_long: TooLong = too_long
        self.missing_chains = [*missing_chains]
        self.num_residues: int | None = None

    @property
    def optional_inputs(self) -> list[str]:
        return [name for name, chains in self.columns.items() if set(chains) <= set(self.missing_chains)]

    def make_arguments(self, **reading: Any) -> DataArguments:
        """Returns by which columns a model's rows are read, beside other fields of the arguments.

        Raises:
            ArgumentError: a stream of rows with numbers beside their sequences.
        """
        return DataArguments(
            **reading,
            sequence_columns=[column for chains in self.columns.values() for column in chains],
            missing_chains=self.missing_chains,
            numeric_columns=[*self.numbers.numeric],
            category_columns=[*self.numbers.categories],
        )

    def resolve_long(self, too_long: TooLong | None, max_residues: int | None) -> None:
        """Sets what becomes of long inputs from here on; None leaves it as it is."""
        self.too_long = too_long or self.too_long
        for tokenizer in self.tokenizers.values() if self.too_long != "error" else ():
            tokenizer.limit(max_residues, "--max_residues allows")

    @property
    def longest(self) -> int | None:
        """Residues that are left of a row of one column; None for all."""
        (tokenizer, *_) = self.tokenizers.values()
        return tokenizer.max_residues if self.too_long == "truncate" else None

    def save_pretrained(self, folder: Path | str) -> None:
        """Writes each input's tokenizer to `<folder>/tokenizers/<n>` and how inputs are made to `inputs.json`."""
        root = Path(folder)
        inputs = []
        for i, (name, tokenizer) in enumerate(self.tokenizers.items()):
            tokenizer.tokenizer.save_pretrained(root / "tokenizers" / str(i))
            inputs.append({"columns": self.columns[name], "max_residues": tokenizer.max_residues})
        settings = {**{name: getattr(self, name) for name in OPTIONS}, "label_kind": self.kind.state()}
        settings |= {NUMBERS: self.numbers.state(), "num_residues": self.num_residues}
        settings[RESIDUES] = {name: source.state() for name, source in self.residues.items()}
        write_json(root / INPUTS_NAME, {"inputs": inputs, **settings})

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> SequenceCollator:
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
            numbers = NumberColumns.from_state(settings.get(NUMBERS))
            residues = {name: SOURCES[name].from_state(one) for name, one in settings.get(RESIDUES, {}).items()}
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
        columns_of = {name: columns for name, (columns, _) in inputs.items()}
        collator = cls(tokenizers, columns_of, **options, kind=kind, numbers=numbers)
        collator.num_residues = settings.get("num_residues")
        collator.residues = residues
        return collator

    def for_member(self, folder: Path | str) -> SequenceCollator:
        """Returns one that reads sequences alike, but numbers and residues as the model in `folder` was trained."""
        own = SequenceCollator.from_pretrained(folder)
        made = copy(self)
        made.numbers = own.numbers
        made.residues = own.residues
        return made

    def __call__(self, features: Any) -> dict[str, Any]:
        """`labels`, `bounds`, `teacher`, `numbers`, `residues` of rows that have them; `sequences`: each input's."""
        if isinstance(features, Mapping):  # a batch of cached embeddings, fetched whole
            batch = dict(features)
            rows = batch.pop("live", None)
        else:
            rows = features
            batch = {}
            if "label" in rows[0]:
                batch["labels"] = self.kind.stack([row["label"] for row in rows], self.longest)
            if "bound" in rows[0]:
                batch["bounds"] = torch.tensor([int(row["bound"] or 0) for row in rows])
            if TEACHER in rows[0]:
                batch[TEACHER] = torch.tensor([row[TEACHER] for row in rows])
            if self.numbers:
                batch[NUMBERS] = torch.from_numpy(self.numbers.matrix(rows))
            if self.residues:
                batch[RESIDUES] = torch.from_numpy(self.read_residues(rows))
        if rows:
            live = [name for name in self.columns if all(column in rows[0] for column in self.columns[name])]
            batch["sequences"] = {name: self.encode_rows(name, rows) for name in live}
        return batch

    def read_residues(self, rows: Dataset | Sequence[Any]) -> np.ndarray:
        """Reads what heads read off sequences of rows, map-style or a list: (n, numbers), float16 or float32."""
        return np.concatenate([source.matrix(rows) for source in self.residues.values()], axis=1)

    def count_tokens(self, dataset: object) -> np.ndarray:
        """Counts tokens that encoders read of each row, special ones included: (rows, inputs that it has), int64."""
        names = set(column_names(dataset))
        counted = []
        for name in (name for name, columns in self.columns.items() if set(columns) <= names):
            tokenizer = self.tokenizers[name]
            residues = np.array(row_lengths(dataset, {name: self.columns[name]}), np.int64)
            read, windows = limit_of(self, name).reads(residues)
            counted.append(read + windows * tokenizer.template.num_special)
        return np.stack(counted, axis=1)

    def encode_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Encodes one encoder input into `ResidueTokenizer`'s tensors, with `place` where rows may lack it."""
        columns = self.columns[name]
        inputs = [tuple(row[column] for column in columns) for row in rows]
        if name not in self.optional_inputs:
            return self.encode(name, *zip(*inputs))
        present = [chains for chains in inputs if any(chains)]
        # Where no row has it, one residue stands in, which no row reads: all processes then run the encoder, which may
        # be split among them, and its weights get gradients, of zero.
        batch = self.encode(name, *zip(*(present or [(UNKNOWN_RESIDUE,) * len(columns)])))
        has_input = torch.tensor([any(chains) for chains in inputs])
        batch["place"] = torch.where(has_input, has_input.cumsum(0) - 1, -1)
        return batch

    def encode(self, name: str, *chains: Sequence[str]) -> dict[str, torch.Tensor]:
        """Encodes as `encode_rows` does, from one list of strings per column."""
        tokenizer = self.tokenizers[name]
        limit = limit_of(self, name)
        longest = max(sum(map(len, row)) for row in zip(*chains))
        if limit.residues is None or longest <= limit.residues:
            return tokenizer(*chains)
        if limit.overlap is not None:
            return encode_windows(tokenizer, chains[0], limit)
        if self.too_long != "error":
            return tokenizer(*_truncate(chains, limit.residues))
        told = f"Input '{name}' has {longest} residues; {tokenizer.limited_by} {limit.residues}"
        raise DataError(f"{told}. Use --too_long window, or --too_long truncate.")


def _truncate(chains: Sequence[Sequence[str]], limit: int) -> list[list[str]]:
    """Cuts each row to `limit` residues; of a pair, the longer chain loses residues first."""
    if len(chains) == 1:
        return [[sequence[:limit] for sequence in chains[0]]]
    kept = []
    for a, b in zip(*chains):
        keep_b = min(len(b), max(limit - len(a), limit // 2))
        kept.append((a[: limit - keep_b], b[:keep_b]))
    return [list(chain) for chain in zip(*kept)]
