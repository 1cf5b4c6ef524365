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

    def count(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Counts residues that an encoder reads of inputs of `lengths`, (n,), and windows in which it does."""
        windows = np.ones_like(lengths)
        most = lengths.max(initial=1) if self.residues is None else self.residues
        if self.overlap is None:
            return np.minimum(lengths, most), windows
        step = most - self.overlap
        windows = 1 - (-np.maximum(lengths - most, 0) // step)
        return np.where(windows > 1, windows * most, lengths), windows

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
        int64, which entry of that mask each token is, flattened, and one behind the last of padding; and of windows
        what `tokenizer` gives of n sequences.
    """
    starts = [limit.starts(len(sequence)) for sequence in sequences]
    texts = [text[start : start + (limit.residues or 0)] for text, each in zip(sequences, starts) for start in each]
    batch = tokenizer(texts)
    rows = np.repeat(np.arange(len(sequences)), [*map(len, starts)])[:, None]
    lengths = np.array([*map(len, sequences)])
    width = int(lengths.max()) + tokenizer.template.num_special
    first = len(tokenizer.template.prefix)
    columns = np.arange(batch["input_ids"].shape[1])
    behind = np.array([*map(len, texts)])[:, None]  # residues; the tokens behind them are the protein's last
    shifts = np.where(columns < first + behind, np.concatenate(starts)[:, None], lengths[rows] - behind)
    places = rows * width + columns + np.where(columns < first, 0, shifts)
    places = np.where(batch["attention_mask"] > 0, places, len(sequences) * width)
    columns = np.arange(width)
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
    total = states.new_zeros(mask.numel() + 1, states.shape[1]).index_add(0, places, states)[:-1]
    counts = states.new_zeros(mask.numel() + 1).index_add(0, places, torch.ones_like(states[:, 0]))[:-1]
    joined = (total / counts.clamp(min=1)[:, None]).unflatten(0, mask.shape)
    return joined, {"residue_mask": mask, "attention_mask": (counts > 0).view_as(mask)}


def take_proteins(batch: Mapping[str, Tensor], part: Any) -> dict[str, Tensor]:
    """Takes the windows of the proteins in `part` of a batch, a slice or (k,) int64, ascending."""
    num_rows, width = batch["residue_mask"].shape
    places = batch[WINDOWS]
    rows = torch.arange(num_rows, device=places.device)[part]
    numbers = places.new_full((num_rows + 1,), -1)  # what each protein is called among those that are taken
    numbers[rows] = torch.arange(len(rows), device=places.device)
    numbers[-1] = len(rows)  # padding stays behind all of them
    kept = (numbers[places[:, 0] // width] >= 0).nonzero().squeeze(1)  # a window begins with a token
    taken = {name: values[kept] for name, values in batch.items() if name != "residue_mask"}
    taken[WINDOWS] = numbers[taken[WINDOWS] // width] * width + taken[WINDOWS] % width
    return {"residue_mask": batch["residue_mask"][rows], **taken}
