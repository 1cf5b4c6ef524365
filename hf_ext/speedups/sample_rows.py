"""A few rows of a run as a batch, and what a pass over them must leave as it was: modes, buffers, random numbers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from transformers import default_data_collator

from ..data.columns import column_names, has_numbered_rows, row_lengths
from ..data.random_states import kept_random_states
from ..models.lora import unwrap_peft
from .base import Run

logger = logging.getLogger(__name__)

NUM_ROWS = 4
LABELS = ("label", "labels", "label_ids")  # that Trainer leaves in rows whatever the model takes


def first_rows(dataset: Any, number: int = NUM_ROWS) -> list[Any]:
    """Up to so many rows; none of an iterator, which would lack them afterwards."""
    if dataset is None or isinstance(dataset, Iterator):
        return []
    rows: Iterable[Any] = dataset if not hasattr(dataset, "__len__") else map(dataset.__getitem__, range(len(dataset)))
    return list(islice(iter(rows), number))


def spread_rows(dataset: Any, number: int = NUM_ROWS) -> list[Any]:
    """As `first_rows`, and from the first to the last: where data is sorted, the first are equally long, or alike."""
    if dataset is None or isinstance(dataset, Iterator) or not hasattr(dataset, "__len__"):
        return first_rows(dataset, number)
    last = len(dataset) - 1
    return [dataset[i] for i in sorted({last * i // (number - 1) for i in range(number)})] if last >= 0 else []


def longest_rows(dataset: Any, collator: Any, length_column: str, number: int = NUM_ROWS) -> list[Any]:
    """Up to so many rows with the most residues; the first ones where the data does not tell."""
    if dataset is None or not has_numbered_rows(dataset) or not len(dataset):
        return first_rows(dataset, number)
    if inputs := getattr(collator, "columns", {}):
        lengths = row_lengths(dataset, inputs)
    elif length_column in column_names(dataset):
        lengths = dataset[length_column][:]
    else:
        return first_rows(dataset, number)
    longest = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)[:number]
    return [dataset[i] for i in longest]


def collate(model: Any, collator: Any, args: Any, rows: list[Any]) -> dict[str, Any]:
    """Rows as a batch, as Trainer makes it: without columns that the model's forward does not name."""
    if args.remove_unused_columns and isinstance(model, nn.Module) and all(isinstance(row, Mapping) for row in rows):
        named = (*inspect.signature(unwrap_peft(model).forward).parameters, *LABELS)
        is_text = hasattr(collator, "columns")  # which it reads itself
        rows = rows if is_text else [{key: value for key, value in row.items() if key in named} for row in rows]
    return dict((collator or default_data_collator)(rows))


def make_batch(run: Run, rows: list[Any]) -> dict[str, Any] | None:
    """`rows` as a batch of a run, on its device; None where there are none, or no batch can be made of them."""
    if not rows:
        return None
    try:
        with kept_random_states(run.train_dataset, run.collator):
            return send_to_device(collate(run.model, run.collator, run.args, rows), run.args.device)
    except Exception:  # data and a collator of the user's own, which may only fit together in their trainer
        logger.debug("no batch at hand", exc_info=True)
        return None


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Leaves each module in the mode it was in, and every buffer, such as a batch norm's means, as it was."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and then each module in the one it was in."""
    with modes_kept(model):
        model.eval()
        yield


def draws_kept(device: torch.device | str) -> AbstractContextManager[None]:
    """Random numbers that a pass on `device` draws are none of the run's."""
    device = torch.device(device)
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
