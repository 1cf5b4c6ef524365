"""Proteins longer than an encoder takes, read in windows that overlap and put together again behind the encoder.

A batch then holds windows where it would hold proteins, so that encoders, kernels and packing see nothing new; and of
each token of a window, which token of its protein it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .tokenization import ResidueTokenizer

WINDOWS = "windows"  # entry of a batch: where in its proteins, flattened, each token of the windows stands
OVERLAP_SHARE = 4  # of a window; one that begins where another ends would give residues there no context on one side


class Limit(NamedTuple):
    """How many residues of an input an encoder reads at once, and what becomes of longer ones.

    Attributes:
        residues: None for any number.
        overlap: residues that two neighbouring windows share at least; None where the end is cut off or refused.
    """

    residues: int | None = None
    overlap: int | None = None

    @classmethod
    def make(cls, residues: int | None, in_windows: bool) -> Limit:
        """Makes one whose windows overlap by a quarter, so that encoders read at most a third more."""
        return cls(residues, residues // OVERLAP_SHARE if residues and in_windows else None)

    def reads(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Counts residues that an encoder reads of inputs of `lengths`, (n,), and windows in which it does."""
        windows = np.array([len(self.starts(length)) for length in lengths.tolist()], np.int64)
        most = lengths if self.residues is None else self.residues
        return np.where(windows > 1, windows * most, np.minimum(lengths, most)), windows

    def starts(self, length: int) -> list[int]:
        """Returns where windows of an input begin: in equal steps, and the last so that it ends with the input."""
        if self.residues is None or self.overlap is None or length <= self.residues:
            return [0]
        last = length - self.residues
        return [*range(0, last, self.residues - self.overlap), last]


def limit_of(collator: Any, name: str) -> Limit:
    """Returns how input `name` of a collator is read. Pairs are not read in windows: their longer chain is cut."""
    tokenizer = collator.tokenizers[name]
    in_windows = getattr(collator, "too_long", None) == "window" and tokenizer.num_chains == 1
    return Limit.make(tokenizer.max_residues, in_windows)


def encode_windows(tokenizer: ResidueTokenizer, sequences: Sequence[str], limit: Limit) -> dict[str, Tensor]:
    """Encodes n proteins, of which some are longer than `limit`.

    Returns:
        `residue_mask`, (n, tokens of the longest protein), bool; `windows`, (windows, tokens of the longest window),
        int64, where each token stands in such rows, flattened, which have one entry more for padding; and of windows
        what `tokenizer` gives of sequences.
    """
    starts = [limit.starts(len(sequence)) for sequence in sequences]
    texts = [text[start : start + (limit.residues or 0)] for text, each in zip(sequences, starts) for start in each]
    batch = tokenizer(texts)
    rows = np.repeat(np.arange(len(sequences)), [*map(len, starts)])[:, None]
    lengths = np.array([*map(len, sequences)])
    width = int(lengths.max()) + tokenizer.template.num_special + 1
    first = len(tokenizer.template.prefix)
    columns = np.arange(batch["input_ids"].shape[1])
    behind = np.array([*map(len, texts)])[:, None]  # residues; the tokens behind them are the protein's last
    shifts = np.where(columns < first + behind, np.concatenate(starts)[:, None], lengths[rows] - behind)
    places = np.where(columns < first, columns, columns + shifts)
    places = rows * width + np.where(batch["attention_mask"].numpy() > 0, places, width - 1)
    columns = np.arange(width - 1)
    is_residue = (columns >= first) & (columns < first + lengths[:, None])
    whole = {"residue_mask": torch.from_numpy(is_residue), WINDOWS: torch.from_numpy(places)}
    return {**whole, **{name: values for name, values in batch.items() if name not in whole}}


def join_windows(states: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Puts states of windows together to those of proteins; a token that several windows have gets their mean.

    Args:
        states: (windows, tokens, width).
        batch: as the encoder got it.

    Returns:
        (n, tokens of the longest protein, width), float32, zero behind a protein's end; and masks for these. Both as
        they were where nothing is read in windows.
    """
    if WINDOWS not in batch:
        return states, batch
    mask = batch["residue_mask"]
    places = batch[WINDOWS].flatten()
    states = states.float().flatten(0, 1)
    num = mask.numel() + len(mask)
    total = states.new_zeros(num, states.shape[1]).index_add(0, places, states)
    counts = states.new_zeros(num, 1).index_add(0, places, torch.ones_like(states[:, :1]))
    joined, is_token = (
        x.unflatten(0, (len(mask), -1))[:, :-1] for x in (total / counts.clamp(min=1), counts[:, 0] > 0)
    )
    return joined, {"residue_mask": mask, "attention_mask": is_token}


def take_proteins(batch: Mapping[str, Tensor], part: Any) -> dict[str, Tensor]:
    """Takes the windows of the proteins in `part` of a batch, a slice or (k,) int64, ascending."""
    mask = batch["residue_mask"]
    width = mask.shape[1] + 1
    owners = batch[WINDOWS][:, 0] // width
    rows = torch.arange(len(mask), device=mask.device)[part]
    numbers = torch.full_like(mask[:, 0], -1, dtype=torch.int64)  # of each protein among those that are taken
    numbers[rows] = torch.arange(len(rows), device=mask.device)
    kept = (numbers[owners] >= 0).nonzero().squeeze(1)
    taken = {name: values[kept] for name, values in batch.items() if name != "residue_mask"}
    taken[WINDOWS] = numbers[owners[kept], None] * width + taken[WINDOWS] % width
    return {"residue_mask": mask[rows], **taken}
