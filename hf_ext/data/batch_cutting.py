"""A batch cut into smaller ones with the rows in their order, as the collator would have made them of these rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from .varlen_layout import IGNORED

SHARED = ("input_ids", "attention_mask", "encoder_outputs")  # of antigens, which rows name by `antigen_index`


class _CannotCut(Exception):
    """A value has other rows than the batch, or none."""


def count_rows(batch: Any) -> int | None:
    """Rows of a batch: of its labels, or of its first tensor; None of what is no mapping with a tensor in it."""
    if not isinstance(batch, Mapping):
        return None
    for value in (batch.get("labels"), *batch.values()):
        if isinstance(value, Mapping) and count_rows(value) is not None:
            return count_rows(value)
        if torch.is_tensor(value):
            return len(value) if value.dim() else None
    return None


def cut_batch(batch: Any, rows_each: int) -> list[Any] | None:
    """`batch` in parts of `rows_each` rows, the last one of what is left; None where it cannot be cut.

    Padding that no row of a part needs is left out, so that a part is as wide as its own longest row. Models find out
    for themselves what a `layout` would have told them.

    Args:
        batch: a mapping whose tensors have one row each along their first dimension; or one of our collators, in which
            rows name inputs that they share (`antigen_index`), lack (`place`) or have several of (`owner`). Values
            that are no tensors are every part's.

    Returns:
        Mappings of the class of `batch`, the first rows first. None of a batch of no more rows than `rows_each`, and of
        one with a tensor that has other rows (sequences packed into one row, scalars that count them).

    Cost: copies nothing but inputs that rows share or lack; trimming reads once from the device for each mask there.
    """
    rows = count_rows(batch)
    if rows is None or rows <= rows_each:
        return None
    try:
        return [_take(batch, slice(start, start + rows_each), rows) for start in range(0, rows, rows_each)]
    except _CannotCut:
        return None


def copy_batch(batch: Any) -> Any:
    """A mapping of the same class with the same values; anything else as it is."""
    # A class says something (`RepeatedRows`), or is what a model expects (`BatchEncoding`).
    return cast(Any, type(batch))(dict(batch)) if isinstance(batch, Mapping) else batch


def _take(batch: Any, part: slice, rows: int) -> Any:
    """The rows in `part` of a batch of `rows`, or of one input of it."""
    taken = copy_batch(batch)
    taken.pop("layout", None)
    if "owner" in taken or "place" in taken:
        _take_input(taken, part, rows)
    else:
        shared = {name: taken[name] for name in SHARED if name in taken and "antigen_index" in taken}
        taken.update({name: _take_value(value, part, rows) for name, value in taken.items() if name not in shared})
        if shared:
            taken["antigen_index"], chosen = _renumber(taken["antigen_index"])
            for name, value in shared.items():
                taken[name] = value[chosen] if torch.is_tensor(value) else tuple(states[chosen] for states in value)
    _trim(taken)
    return taken


def _take_value(value: Any, part: slice, rows: int) -> Any:
    if isinstance(value, Mapping):
        return _take(value, part, rows)
    is_column = (torch.is_tensor(value) and value.dim()) or isinstance(value, list)
    if is_column and len(value) == rows:
        return value[part]
    if isinstance(value, str | int | float | bool | None):
        return value
    raise _CannotCut


def _take_input(batch: Any, part: slice, rows: int) -> None:
    """Of one encoder input: its sequences are fewer than the rows (`place`), or several of a row (`owner`)."""
    place, owner, num_inputs = batch.pop("place", None), batch.pop("owner", None), batch.pop("num_rows", None)
    if place is not None and len(place) != rows:
        raise _CannotCut
    numbers, chosen = _renumber((torch.arange(rows) if place is None else place)[part])
    kept = chosen if owner is None else torch.isin(owner, chosen.to(owner)).nonzero().squeeze(1)
    for name, value in batch.items():
        batch[name] = value[kept]
    if place is not None:
        batch["place"] = numbers
    if owner is not None:
        batch["owner"] = torch.searchsorted(chosen.to(owner), owner[kept])
        batch["num_rows"] = torch.full_like(num_inputs, len(chosen))


def _renumber(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What rows name, numbered in the order in which they first do, -1 where a row names none; and the old numbers.

    Where none names any, the first one stands in, which no row reads.
    """
    named = [number for number in dict.fromkeys(index.tolist()) if number >= 0] or [0]
    new = {number: i for i, number in enumerate(named)}
    return torch.tensor([new.get(number, -1) for number in index.tolist()]).to(index), torch.tensor(named).to(index)


def _trim(batch: Any) -> None:
    """Takes columns away, at the end, in which no row has a token; of a decoder's labels, those without a label."""
    has_decoder, labels, mask = "antigen_index" in batch, batch.get("labels"), batch.get("attention_mask")
    if has_decoder and torch.is_tensor(labels):
        batch["labels"] = labels[:, : _count_used(labels.ne(IGNORED))]
    if not torch.is_tensor(mask) or mask.dim() != 2:
        return
    longest = _count_used(mask)
    for name, value in batch.items():
        if name == "encoder_outputs":
            batch[name] = tuple(states[:, :longest] for states in value)
        elif torch.is_tensor(value) and value.shape[:2] == mask.shape and not (has_decoder and name == "labels"):
            batch[name] = value[:, :longest]


def _count_used(mask: torch.Tensor) -> int:
    """Columns of a (rows, columns) mask up to the last one that a row uses; all where none does."""
    used = mask.any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else mask.shape[1]
