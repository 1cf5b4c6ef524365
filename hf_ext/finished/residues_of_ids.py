"""What heads read off sequences, from the token ids of an exported file: counts of residues, and substitutions."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_uppercase
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..data import LETTERS, STANDARD, SequenceCollator, SequenceFeatures, Variants

K = 3  # residues of a k-mer
KINDS = len(STANDARD) + 1  # of residues that are substituted; the last is any other letter


class Chain(NamedTuple):
    """One chain of n rows: `letters` (n, tokens), 0 to 25, and where its residues stand, (n, tokens)."""

    letters: Tensor
    mask: Tensor


class ResiduesOfIds(nn.Module):
    """Computes what `SequenceCollator.read_residues` does: (n, numbers), float32.

    Letters that share an id (rare ones that a vocabulary has no token for) count as X.

    Args:
        collator: whose heads read residues; each chain of a pair is there, or ids do not tell which one it is.

    Buffers: `letters_<input>`, the number of each token's letter.
    """

    def __init__(self, collator: SequenceCollator):
        super().__init__()
        self.places = {column: (name, i) for name, parts in collator.columns.items() for i, column in enumerate(parts)}
        self.frames = {name: one.template for name, one in collator.tokenizers.items()}
        for name, one in collator.tokenizers.items():
            ids = [int(one.table[ord(letter)]) for letter in ascii_uppercase]
            letters = torch.full((max(ids) + 1,), ascii_uppercase.index("X"))
            for letter in STANDARD:
                letters[ids[ascii_uppercase.index(letter)]] = ascii_uppercase.index(letter)
            self.register_buffer(f"letters_{name}", letters)
        made = {Variants: _Substitutions, SequenceFeatures: _Counts}
        self.sources = nn.ModuleList(made[type(one)](one) for one in collator.residues.values())

    def forward(self, ids: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Tensor:
        """Maps token ids and the masks of residues, (n, tokens) of each input."""
        chains = {}
        for column, (name, number) in self.places.items():
            letters = getattr(self, f"letters_{name}")
            between = ids[name].new_tensor(self.frames[name].between or (-1,))
            behind = (ids[name][..., None] == between).any(-1).cumsum(1) > 0
            mask = masks[name] & (behind if number else ~behind)
            chains[column] = Chain(letters[ids[name].clamp(max=len(letters) - 1)], mask)
        return torch.cat([source(chains) for source in self.sources], dim=1)


class _Counts(nn.Module):
    """Counts residues by position, or k-mers."""

    def __init__(self, counts: SequenceFeatures):
        super().__init__()
        state = counts.state()
        self.columns = [(state["names"][i], length) for i, length, _ in state["columns"]]
        for i, (_, _, codes) in enumerate(state["columns"]):
            self.register_buffer(f"codes_{i}", torch.tensor(codes, dtype=torch.int64))

    def forward(self, chains: Mapping[str, Chain]) -> Tensor:
        found = []
        for i, (column, length) in enumerate(self.columns):
            codes = getattr(self, f"codes_{i}")
            found.append(_count(chains[column], length)[:, codes])
        return torch.cat(found, dim=1)


class _Substitutions(nn.Module):
    """Computes the numbers of variants. A substitution adds the same to them whatever else a row has."""

    kinds: Tensor
    pairs: Tensor
    kept: Tensor
    sums: Tensor
    scales: Tensor

    def __init__(self, variants: Variants):
        super().__init__()
        self.column = variants.column
        self.length = len(variants.wild_type)
        own = torch.tensor([STANDARD.index(letter) for letter in variants.wild_type])
        kinds = torch.full((LETTERS,), KINDS - 1)
        for number, letter in enumerate(STANDARD):
            kinds[ascii_uppercase.index(letter)] = number
        num_marks = len(variants.pairs) + len(variants.positions)
        sums = []
        for place in range(self.length):
            before, behind = variants.wild_type[:place], variants.wild_type[place + 1 :]
            rows = [{self.column: f"{before}{letter}{behind}"} for letter in f"{STANDARD}X"]
            sums.append(variants.matrix(rows)[:, num_marks:])
        positions = torch.tensor(variants.positions, dtype=torch.int64)
        scales = torch.tensor(variants.scales or [1.0] * len(variants))
        self.register_buffer("kinds", kinds)
        self.register_buffer("pairs", torch.tensor(variants.pairs, dtype=torch.int64))
        self.register_buffer("kept", positions * KINDS + own[positions])
        self.register_buffer("sums", torch.from_numpy(np.concatenate(sums)))
        self.register_buffer("scales", scales[:num_marks].float())

    def forward(self, chains: Mapping[str, Chain]) -> Tensor:
        chain = chains[self.column]
        is_whole = (chain.mask.sum(1, keepdim=True) == self.length).float()
        found = _count(Chain(self.kinds[chain.letters], chain.mask), self.length, KINDS)
        marks = torch.cat([found[:, self.pairs], 1 - found[:, self.kept]], dim=1) * self.scales
        return torch.cat([marks, found @ self.sums], dim=1) * is_whole


def _count(chain: Chain, length: int | None, letters: int = LETTERS) -> Tensor:
    """Counts (position, letter) codes of the first `length` residues, or k-mers where it is None: (n, codes)."""
    position = chain.mask.long().cumsum(1) - 1
    if length is None:
        num_codes = letters**K
        codes = torch.zeros_like(chain.letters)
        chosen = chain.mask
        for shift in range(K):
            codes = codes * letters + nn.functional.pad(chain.letters, (0, K))[:, shift : shift - K]
            chosen = chosen & nn.functional.pad(chain.mask, (0, K))[:, shift : shift - K]
    else:
        num_codes = length * letters
        codes = position * letters + chain.letters
        chosen = chain.mask & (position < length)
    codes = torch.where(chosen, codes, num_codes)  # one more column, for what is not counted
    empty = torch.zeros(codes.shape[0], num_codes + 1)
    return empty.scatter_add(1, codes, torch.ones_like(codes, dtype=torch.float32))[:, :-1]
