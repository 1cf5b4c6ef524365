"""What an antibody generator reads and writes, as token ids and in batches: antigens, and pairs of chains.

An antigen is `<bos> antigen <eos>`, a pair `<bos> heavy <sep> light <eos>`, a heavy chain alone `<bos> heavy <eos>`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from ...errors import DataError
from ...labels import UNKNOWN, Array, shorten
from ..columns import factorize, read_columns
from ..proteins import RARE, STANDARD, UNKNOWN_RESIDUE
from .tokenization import ResidueTokenizer
from .varlen_layout import LayoutMaker

ANTIGEN_TOKENIZER = "tokenizers/0"  # in a generator's folder
StatesOf = Callable[[Sequence[Array]], list[torch.Tensor]]

PAD = "<pad>"
BOS = "<bos>"
EOS = "<eos>"
SEP = "<sep>"
VOCABULARY = (PAD, BOS, EOS, SEP, *STANDARD, UNKNOWN_RESIDUE)  # in the order of their ids
PAD_ID, BOS_ID, EOS_ID, SEP_ID = range(4)
UNKNOWN_ID = VOCABULARY.index(UNKNOWN_RESIDUE)
_LETTERS = frozenset(STANDARD + UNKNOWN_RESIDUE + RARE)


def make_pair_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the vocabulary as an ordinary fast tokenizer, for `save_pretrained` beside a model.

    `tokenizer(antigen)` and `tokenizer(heavy, light)` give the ids that `PairEncoder` gives; letters that are not in
    the vocabulary become X. It adds no `token_type_ids`.
    """
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN_RESIDUE))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A {EOS}",
        pair=f"{BOS} $A {SEP} $B {EOS}",
        special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID), (SEP, SEP_ID)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "sep_token": SEP, "unk_token": UNKNOWN_RESIDUE},
        model_input_names=["input_ids", "attention_mask"],
    )


@dataclass(frozen=True)
class AntibodyPair:
    """An antibody; `light` is None for a heavy chain alone.

    `malformed` says what is wrong with the tokens that it was read from, in words; empty where nothing is. It is about
    their order alone: whether the residues make an antibody is for others to check.
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
        self.pairs = ResidueTokenizer(self.tokenizer, num_chains=2)

    def encode_antigens(self, antigens: Sequence[str]) -> list[Array]:
        """Returns (tokens,) int64 each: `<bos> antigen <eos>`, or as the tokenizer given frames a sequence.

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
        return _unpadded(self.antigens(antigens))

    def encode_pairs(self, heavies: Sequence[str], lights: Sequence[str | None] | None = None) -> list[Array]:
        """Returns (tokens,) int64 each: `<bos> heavy <sep> light <eos>`, without `<sep>` where `light` is None or "".

        Raises:
            DataError: a heavy chain is empty, a chain has other characters than upper-case residues, or the columns
                differ in length.
        """
        others = ["" if light is None else light for light in lights or [None] * len(heavies)]
        if len(others) != len(heavies):
            raise DataError(f"{len(heavies)} heavy and {len(others)} light chains: give one of each per row.")
        _check("heavy", heavies)
        _check("light", others, may_be_empty=True)
        return _unpadded(self.pairs(heavies, others))

    def encode_rows(
        self,
        antigens: Sequence[str],
        heavies: Sequence[str],
        lights: Sequence[str | None] | None = None,
        affinities: Sequence[float | None] | None = None,
    ) -> dict[str, list[Any]]:
        """Returns columns of a data set under the names that a generator's `forward` has, so that Trainer keeps them.

        Each distinct antigen is encoded once, and its rows share one array.

        Returns:
            `input_ids`: the antigen; `labels`: what is to be written, the pair without its `<bos>`; both (tokens,)
            int64 arrays; `affinity`: float, NaN where None or NaN was given, or where there is no such column.

        Raises:
            DataError: as above; or columns of different lengths.
        """
        values = [None] * len(heavies) if affinities is None else affinities
        if not len(antigens) == len(heavies) == len(values):
            raise DataError(
                f"{len(antigens)} antigens, {len(heavies)} heavy chains, {len(values)} affinities: give one per row."
            )
        number, distinct = factorize(antigens)
        encoded = self.encode_antigens(distinct)
        return {
            "input_ids": [encoded[i] for i in number],
            "labels": [pair[1:] for pair in self.encode_pairs(heavies, lights)],
            "affinity": [math.nan if value is None else float(value) for value in values],
        }


def decode_pair(ids: Iterable[int]) -> AntibodyPair:
    """Returns the antibody that ids spell, up to the first `<eos>`; `<bos>` at the beginning may be there or not.

    Nothing is repaired: special tokens in wrong places are left out of the chains and named in `malformed`. Residues
    behind a second `<sep>` belong to neither chain. What follows `<eos>` is not looked at.

    Raises:
        DataError: an id outside of the vocabulary, such as -100.
    """
    tokens = [int(i) for i in ids]
    if unknown := [i for i in tokens if not 0 <= i < len(VOCABULARY)]:
        raise DataError(f"Token id {unknown[0]}: allowed are 0 to {len(VOCABULARY) - 1}. Leave out ignored labels.")
    malformed = [] if EOS_ID in tokens else [f"no {EOS}: cut off"]
    tokens = tokens[1:] if tokens[:1] == [BOS_ID] else tokens
    tokens = tokens[: tokens.index(EOS_ID)] if EOS_ID in tokens else tokens
    malformed += [f"{VOCABULARY[i]} inside" for i in (PAD_ID, BOS_ID) if i in tokens]
    text = "".join(VOCABULARY[i] for i in tokens if i not in (PAD_ID, BOS_ID))
    heavy, *others = text.split(SEP)
    if not heavy:
        malformed.append("no heavy chain")
    if others and not others[0]:
        malformed.append(f"{SEP}, but no light chain")
    if len(others) > 1:
        malformed.append(f"{len(others) + 1} chains")
    return AntibodyPair(heavy, (others[0] or None) if others else None, tuple(malformed))


@dataclass(eq=False)
class AntibodyCollator:
    """Makes a generator's batches from rows of `PairEncoder.encode_rows`.

    Rows with the same antigen share one entry: the encoder runs once per distinct antigen of a batch.

    Args:
        pad_token_id: of the antigens' vocabulary; it only fills up, `attention_mask` says what counts.
        states_of: token ids of distinct antigens to their states, (tokens, width) each, of a frozen encoder
            (`hf_ext.embeddings.dataset.StateTable`); None: the model encodes them.
        antigen_tokenizer: of a pretrained encoder, which is saved with the model; None: the generator's own.

    Attributes:
        layout: which parts of a `BatchLayout` batches bring along; None for none. Speed-ups set it. Of packed encoders
            it says where the distinct antigens stand without padding.
    """

    pad_token_id: int = 0
    states_of: StatesOf | None = None
    antigen_tokenizer: Any = None
    layout: LayoutMaker | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One batch of n rows with k distinct antigens.

        Returns:
            `labels`: (n, longest pair), int64, -100 where padding is; where rows have any. First, because Trainer takes
            the first tensor's rows for the batch's. `affinity`: (n,), float32, NaN where unknown or not given.
            `antigen_index`: (n,), int64: which antigen each row has. `input_ids`: (k, longest antigen), int64, in the
            order in which they first occur; `attention_mask`: of that shape, int64. With `states_of`, `encoder_outputs`
            in place of `input_ids`: one tensor in a tuple, (k, longest antigen, width), zero where padding is.
        """
        batch = {}
        if "labels" in rows[0]:
            batch["labels"] = _pad([np.asarray(row["labels"], np.int64) for row in rows], UNKNOWN)
        affinities = [row.get("affinity") for row in rows]
        batch["affinity"] = torch.tensor([math.nan if one is None else float(one) for one in affinities])
        index, keys = factorize(np.asarray(row["input_ids"], np.int64).tobytes() for row in rows)
        batch["antigen_index"] = torch.from_numpy(index)
        antigens = [np.frombuffer(key, np.int64) for key in keys]
        mask = _pad([np.ones(len(antigen), np.int64) for antigen in antigens], 0)
        if self.states_of is not None:
            states = pad_sequence(self.states_of(antigens), batch_first=True)
            return {**batch, "encoder_outputs": (states,), "attention_mask": mask}
        batch |= {"input_ids": _pad(antigens, self.pad_token_id), "attention_mask": mask}
        return batch if self.layout is None else self.layout.add_to(batch)

    def save_pretrained(self, folder: Path | str) -> None:
        """Writes the tokenizer of a pretrained encoder to `<folder>/tokenizers/0`; without one nothing."""
        if self.antigen_tokenizer is not None:
            self.antigen_tokenizer.save_pretrained(Path(folder) / ANTIGEN_TOKENIZER)

    def count_tokens(self, dataset: Any) -> Array:
        """Returns (rows, 2), int64: tokens of each row's antigen and of its antibody, which are padded each on its own.

        An upper bound of what is computed: an antigen that several rows of a batch share counts in each.
        """
        columns = read_columns(dataset, ["input_ids", "labels"])
        tokens = [[len(antigen), len(pair)] for antigen, pair in columns]
        return np.array(tokens, np.int64).reshape(-1, 2)


def _pad(rows: Sequence[Array], value: int) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def _unpadded(batch: dict[str, Any]) -> list[Array]:
    return [ids[mask].numpy() for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool())]


def _check(what: str, sequences: Sequence[str], may_be_empty: bool = False) -> None:
    for i, sequence in enumerate(sequences):
        if not isinstance(sequence, str) or not (sequence or may_be_empty) or not _LETTERS.issuperset(sequence):
            raise DataError(
                f"Row {i}, {what}: {shorten(sequence)!r}; must be residues in upper case, of {STANDARD}, "
                f"{UNKNOWN_RESIDUE} and {RARE}. Clean the column, or leave the row out."
            )
