"""Masks for masked-language-model training that are a function of (seed, epoch, example) and of nothing else.

Stock collators draw masks from the process's random state, so a resumed run, another number of workers or another batch
size sees other masks. Here the draws are counter-based: 256 bits of BLAKE2b of seed, epoch and example key one
SplitMix64 stream each for the crop, the choice of residues, their treatment and their replacements.
Sources: Rives et al., PNAS 2021, and Lin et al., Science 2023 (ESM's recipe, BERT's 15 / 80 / 10 / 10); Steele et al.,
OOPSLA 2014 (SplitMix64).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...errors import ArgumentError, DataError
from ...labels import UNKNOWN, Array
from ..columns import row_lengths
from ..proteins import STANDARD
from .tokenization import ResidueTokenizer
from .varlen_layout import LayoutMaker

EPOCH_COLUMN = "mask_epoch"
EVALUATION_EPOCH = -1  # which no training epoch has
MASK_FRACTION = 0.8  # of chosen residues
RANDOM_FRACTION = 0.1  # of chosen residues; the rest stay as they are

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))


def splitmix64(seeds: Array, num: int) -> Array:
    """Computes the first `num` outputs of the SplitMix64 generator for each seed.

    Args:
        seeds: (n,), uint64.
        num: outputs per seed.

    Returns:
        (n, num), uint64. Cost: about 10 ns per value.
    """
    state = seeds[:, None] + np.arange(1, num + 1, dtype=np.uint64)[None, :] * _GAMMA  # wraps at 2**64, as it should
    for shift, factor in _MIX:
        state = (state ^ (state >> np.uint64(shift))) * factor
    return state ^ (state >> np.uint64(31))


class MaskedLMCollator:
    """Tokenizes sequences, crops what is too long at random, and masks residues by ESM's recipe.

    Of the residues, `mlm_probability` are chosen (at least one per sequence, special tokens never); of the chosen ones
    80 % become the mask token, 10 % a random standard residue and 10 % stay. Masks and crops depend on seed, epoch and
    example only: not on workers, ranks, batches, order or restarts.

    The epoch is the row's own where it has a column `mask_epoch` (see `mark_evaluation` and `StreamBatchSampler`), else
    what `set_epoch` said last; `FastTrainer` says it by itself, with `Trainer` add `MaskingEpochCallback`.

    Args:
        tokenizer: of one sequence or of a pair; needs a mask token.
        columns: the one column that holds the sequence, or the two of a pair. A pair is never cropped.
        mlm_probability: fraction of residues that are predicted, above 0 and at most 1.
        seed: any integer.
        max_residues: longer sequences are cropped to as many; default: what the tokenizer takes.

    Raises:
        ArgumentError: a value outside these, or a tokenizer without a mask token.
        DataError: (when called) a pair is longer than `max_residues`.

    Cost: about 20 M residues/s on one core.
    """

    CUT = "A window of each is read, drawn anew in every epoch"

    def __init__(
        self,
        tokenizer: ResidueTokenizer,
        columns: Sequence[str] = ("sequence",),
        mlm_probability: float = 0.15,
        seed: int = 0,
        max_residues: int | None = None,
    ):
        self.tokenizer = tokenizer.tokenizer  # where Trainer looks for what to save beside the model
        tokenizer.limit(max_residues, "--max_residues allows")
        if self.tokenizer.mask_token_id is None:
            raise ArgumentError(f"{type(self.tokenizer).__name__} has no mask token: use a masked language model's.")
        if not 0 < mlm_probability <= 1:
            raise ArgumentError(f"mlm_probability={mlm_probability}: must be above 0 and at most 1; ESM uses 0.15.")
        self.max_residues = tokenizer.max_residues
        name = "+".join(columns)
        self.tokenizers = {name: tokenizer}
        self.columns = {name: [*columns]}
        self.mlm_probability = mlm_probability
        self.seed = seed
        self._standard = tokenizer.table[[*STANDARD.encode()]]
        self.layout: LayoutMaker | None = None  # speed-ups ask for one
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers that live for long see it change

    def set_epoch(self, epoch: int) -> None:
        """Masks what is collated from now on, in worker processes too, for `epoch` (0 or more)."""
        self._epoch.fill_(epoch)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Masks a batch of n rows.

        Returns:
            `input_ids`, `attention_mask` and `labels` (n, longest row), int64; `labels` hold the true id where a
            residue was chosen and -100 elsewhere. `token_type_ids` too where the tokenizer makes them for pairs, and
            `layout` (`BatchLayout`) where a speed-up reads it.
        """
        (columns,) = self.columns.values()
        (tokenizer,) = self.tokenizers.values()
        chains = [[row[column] for row in features] for column in columns]
        keys = self._keys(features, list(zip(*chains)))
        batch = tokenizer(*self._crop(chains, keys[:, 0]))
        is_residue = batch.pop("residue_mask").numpy()
        ids = batch["input_ids"].numpy()
        # In [0, 1), with the 53 bits that a float64 has.
        draws, treatment, letters = ((splitmix64(key, ids.shape[1]) >> np.uint64(11)) * 2.0**-53 for key in keys.T[1:])
        chosen = choose_residues(is_residue, draws, self.mlm_probability)
        batch["labels"] = torch.from_numpy(np.where(chosen, ids, UNKNOWN))
        is_masked = chosen & (treatment < MASK_FRACTION)
        is_replaced = chosen & ~is_masked & (treatment < MASK_FRACTION + RANDOM_FRACTION)
        random = self._standard[(letters * len(self._standard)).astype(np.int64)]
        ids = np.where(is_masked, self.tokenizer.mask_token_id, np.where(is_replaced, random, ids))
        batch["input_ids"] = torch.from_numpy(ids)
        return batch if self.layout is None else self.layout.add_to(batch)

    def count_tokens(self, dataset: object) -> Array:
        """Counts tokens of each row, special ones included, after the crop: (rows, 1), int64."""
        (tokenizer,) = self.tokenizers.values()
        residues = np.array(row_lengths(dataset, self.columns), np.int64)
        return (np.minimum(residues, self.max_residues or residues) + tokenizer.template.num_special)[:, None]

    def encode(self, name: str, *chains: Sequence[str]) -> dict[str, torch.Tensor]:
        """Encodes input `name` into `ResidueTokenizer`'s tensors, neither cropped nor masked."""
        return self.tokenizers[name](*chains)

    def _keys(self, rows: Sequence[Mapping[str, Any]], sequences: Sequence[tuple[str, ...]]) -> Array:
        """Computes the seeds of a row's four streams, (n, 4) uint64."""
        epoch = int(self._epoch)
        digests = []
        for row, chains in zip(rows, sequences):
            text = f"{self.seed}\t{row.get(EPOCH_COLUMN, epoch)}\t{'|'.join(chains)}"
            digests.append(hashlib.blake2b(text.encode(), digest_size=32).digest())
        return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64).reshape(-1, 4)

    def _crop(self, chains: list[list[str]], seeds: Array) -> list[list[str]]:
        limit = self.max_residues
        longest = max(sum(map(len, row)) for row in zip(*chains))
        if limit is None or longest <= limit:
            return chains
        if len(chains) > 1:
            raise DataError(
                f"A pair has {longest} residues, above the limit of {limit}, and pairs are not cropped. Leave such "
                "rows out (--too_long error --max_residues N --bad_rows drop), or cut them beforehand."
            )
        starts = [int(seed) % max(1, len(sequence) - limit + 1) for sequence, seed in zip(chains[0], seeds)]
        return [[sequence[start : start + limit] for sequence, start in zip(chains[0], starts)]]


def choose_residues(is_residue: Array, draws: Array, probability: float) -> Array:
    """Chooses the residues to predict: those whose draw is below `probability`, at least one per row that has any.

    Args:
        is_residue: (n, tokens), bool; special tokens and padding are false.
        draws: (n, tokens), float64 in [0, 1).
        probability: fraction to choose.

    Returns:
        (n, tokens), bool.
    """
    chosen = (draws < probability) & is_residue
    empty = np.flatnonzero(~chosen.any(1) & is_residue.any(1))
    chosen[empty, np.where(is_residue, draws, 1.0)[empty].argmin(1)] = True
    return chosen


def mark_evaluation(dataset: Any) -> Any:
    """Gives every row of an evaluation set the column `mask_epoch`, so that its masks are the same in every epoch.

    A column and not a second collator, because Trainer has one collator for training and evaluation.
    """
    if isinstance(dataset, datasets.Dataset):
        return dataset.add_column(EPOCH_COLUMN, [EVALUATION_EPOCH] * len(dataset))
    return dataset.map(lambda row: {**row, EPOCH_COLUMN: EVALUATION_EPOCH})


class MaskingEpochCallback(TrainerCallback):
    """Calls `collator.set_epoch` before each epoch's first batch is made; for `Trainer` and `FastTrainer` alike.

    Counts passes from the one that the run starts or resumes in: `state.epoch` alone is not enough, because a stream
    that ends before `max_steps` begins its second pass while `state.epoch` is still below 1.
    """

    def __init__(self, collator: Any):
        self.collator = collator
        self._next = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Begins to count; a resumed run has its `state.epoch` by now."""
        self._next = int(state.epoch)

    def on_epoch_begin(self, *event: object, **kwargs: object) -> None:
        """Sets the epoch, before Trainer asks its data loader for an iterator."""
        self.collator.set_epoch(self._next)
        self._next += 1
