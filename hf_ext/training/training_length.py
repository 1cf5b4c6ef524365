"""A run that would learn nothing is refused by the name of what leaves it nothing; so is a word that means nothing.

Trainer 5.23 reports success for runs of no step, and trains one where `max_steps` is 0.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from itertools import compress
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import has_length

from ..argument_checks import check_choices
from ..data.columns import has_numbered_rows
from ..errors import ArgumentError, DataError

logger = logging.getLogger(__name__)

NUM_FIRST_ROWS = 16
_TEXT = {"input_ids", "attention_mask", "token_type_ids", "labels"}  # beside other inputs, one text may be right
_REMEDY = (
    "Give the tokenizer text that it knows: many of those for proteins want blanks, ' '.join(sequence), or capitals."
)


def check_training(args: TrainingArguments, rows: Any) -> None:
    """Before training, and not before an evaluation, which needs no steps.

    Args:
        args: of the trainer.
        rows: that it will train on; None where somebody else makes its loader.

    Raises:
        ArgumentError: the arguments ask for no step; a word that is no choice was assigned to one after they were
            built.
        DataError: there are no rows.
    """
    check_choices(args)
    if has_numbered_rows(rows) and len(rows) == 0:
        _refuse_empty(args, 0)  # torch's sampler would speak of num_samples
    _check_length(args.num_train_epochs, args.max_steps)


def check_batches(args: TrainingArguments, loader: Any) -> None:
    """Raises ArgumentError where `dataloader_drop_last` leaves `loader` no batch, DataError where it has no rows."""
    if has_length(loader) and len(loader) == 0:
        rows = getattr(loader, "dataset", None)
        _refuse_empty(args, len(rows) if rows is not None and has_length(rows) else 0)


def _check_length(num_train_epochs: float, max_steps: int) -> None:
    """Raises ArgumentError where they come to no optimizer step."""
    if max_steps == 0:
        raise ArgumentError(
            "max_steps=0 trains nothing. Give a number of optimizer steps, or leave it out (-1) to train for "
            "num_train_epochs. To score a model as it is, call `evaluate` or `predict`."
        )
    if max_steps < 0 and not (num_train_epochs > 0 and math.isfinite(num_train_epochs)):
        raise ArgumentError(
            f"num_train_epochs={num_train_epochs:g}: must be a number above 0, or nothing is trained; fractions are "
            "allowed. To score a model as it is, call `evaluate` or `predict`."
        )


def _refuse_empty(args: TrainingArguments, num_rows: int) -> None:
    """Raises what says why there is no batch."""
    if num_rows == 0:
        raise DataError("The training set has no rows: nothing can be trained.")
    rows = args.train_batch_size * args.world_size
    raise ArgumentError(
        f"dataloader_drop_last leaves no batch: {num_rows} training rows are fewer than the {rows} of one batch "
        f"(per_device_train_batch_size={args.per_device_train_batch_size}, {args.world_size} process(es)). Leave "
        "dataloader_drop_last out, or lower per_device_train_batch_size."
    )


class FirstRows:
    """Looks at the token ids of the first rows that train: of text that a tokenizer does not know it makes one token.

    Cost: one read from the device for each of the first batches.
    """

    def __init__(self) -> None:
        self._ids: list[tuple[int, ...]] = []
        self._labels: set[str] = set()

    def see(self, batch: Any, tokenizer: Any) -> None:
        """Takes note of a batch, and judges once there are `NUM_FIRST_ROWS` rows.

        Raises:
            DataError: all have the same ids, but not the same labels.
        """
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if len(self._ids) >= NUM_FIRST_ROWS or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return
        mask, labels = (batch.get(name) for name in ("attention_mask", "labels"))
        kept = mask if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else torch.ones_like(ids)
        self._ids += [tuple(compress(*both)) for both in zip(ids.tolist(), kept.tolist())]
        if isinstance(labels, torch.Tensor) and labels.dim():
            self._labels.update(map(str, labels.tolist()))
        if len(self._ids) >= NUM_FIRST_ROWS:
            self._judge(tokenizer, set(batch) <= _TEXT and len(self._labels) > 1)

    def _judge(self, tokenizer: Any, must_differ: bool) -> None:
        unknown, pad = (getattr(tokenizer, f"{name}_token_id", None) for name in ("unk", "pad"))
        left_out = {*getattr(tokenizer, "all_special_ids", ())} - {unknown} | {pad}
        words = [token for row in self._ids for token in row if token not in left_out]
        share, number = words.count(unknown) / max(1, len(words)), len(self._ids)
        ((row, times),) = Counter(self._ids).most_common(1)
        said = []
        if must_differ and times > 0.9 * number:
            said.append(f"{times} of the first {number} rows have the same token ids, {[*row[:8]]}, but not the same labels")
        if share > 0.5:
            said.append(f"{share:.0%} of the tokens of the first {number} rows are {tokenizer.unk_token!r}")
        if must_differ and times == number:
            raise DataError(f"{'; '.join(said)}: nothing can be learned. {_REMEDY}")
        if said:
            logger.warning("%s. %s", "; ".join(said), _REMEDY)
