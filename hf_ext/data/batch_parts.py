"""A batch cut into smaller ones with the rows in their order, as the collator would have made them of these rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from .batch_layout import IGNORED, BatchLayout, LayoutMaker


def count_rows(batch: Any) -> int | None:
    """Rows of a batch: of its labels, or of its first tensor; None of what is no mapping with a tensor in it."""
    if not isinstance(batch, Mapping):
        return None
    labels = batch.get("labels")
    tensors = [labels] if torch.is_tensor(labels) else [*_tensors(batch)]
    return len(tensors[0]) if tensors and tensors[0].dim() else None


def cut_batch(batch: Any, rows_each: int, trims: bool = True) -> list[Any] | None:
    """`batch` in parts of `rows_each` rows, the last one of what is left; None where it cannot be cut.

    Args:
        batch: a mapping whose tensors have one row each along their first dimension; or one of our collators, in which
            rows name inputs that they share (`antigen_index`), lack (`place`) or have several of (`owner`). Values
            that are no tensors are every part's.
        trims: leaves out padding that no row of a part needs, so that a part is as wide as its own longest row.

    Returns:
        Mappings of the class of `batch`, the first rows first. None of a batch of no more rows than `rows_each`, and of
        one with a tensor that has other rows (sequences packed into one row, scalars that count them).

    Cost: copies nothing but shared antigens; trimming reads once from the device for each mask there.
    """
    rows = count_rows(batch)
    if rows is None or rows <= rows_each:
        return None
    parts = [_take(batch, start, min(start + rows_each, rows), rows) for start in range(0, rows, rows_each)]
    if any(part is None for part in parts):
        return None
    return [_finish(part, batch.get("layout"), trims) for part in parts]


def copy_batch(batch: Any) -> Any:
    """A mapping of the same class with the same values; anything else as it is."""
    # A class says something (`RepeatedRows`), or is what a model expects (`BatchEncoding`).
    return cast(Any, type(batch))(dict(batch)) if isinstance(batch, Mapping) else batch


def _tensors(batch: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in batch.values():
        found += [value] if torch.is_tensor(value) else _tensors(value) if isinstance(value, Mapping) else []
    return found


def _take(batch: Any, start: int, end: int, rows: int) -> Any:
    """Rows `start` to `end` of a batch of `rows`; None where a tensor has other rows."""
    batch = copy_batch(batch)
    batch.pop("layout", None)
    if "owner" in batch or "place" in batch:
        return _take_input(batch, start, end, rows)
    shared = _take_antigens(batch, start, end) if "antigen_index" in batch else {}
    for name, value in batch.items():
        if name in shared:
            continue
        part = _take_value(value, start, end, rows)
        if part is None and value is not None:
            return None
        batch[name] = part
    batch.update(shared)
    return batch


def _take_value(value: Any, start: int, end: int, rows: int) -> Any:
    if torch.is_tensor(value):
        return value[start:end] if value.dim() and len(value) == rows else None
    if isinstance(value, Mapping):
        return _take(value, start, end, rows)
    if isinstance(value, list):
        return value[start:end] if len(value) == rows else None
    return value if isinstance(value, str | int | float | bool) else None


def _take_input(batch: Any, start: int, end: int, rows: int) -> Any:
    """Of one encoder input: its sequences are fewer than the rows (`place`), or several of a row (`owner`)."""
    place, owner, num_inputs = batch.pop("place", None), batch.pop("owner", None), batch.pop("num_rows", None)
    first, last = start, end
    if place is not None:
        if len(place) != rows:
            return None
        place = place[start:end]
        present = place[place >= 0]
        # Where no row has the input, one stands in that no row reads.
        first, last = (int(present[0]), int(present[-1]) + 1) if len(present) else (0, 1)
        place = torch.where(place >= 0, place - first, place)
    kept: Any = slice(first, last)
    if owner is not None:
        kept = ((owner >= first) & (owner < last)).nonzero().squeeze(1)
        owner, num_inputs = owner[kept] - first, torch.full_like(num_inputs, last - first)
    for name, value in batch.items():
        batch[name] = value[kept]
    added = {"place": place, "owner": owner, "num_rows": num_inputs}
    batch.update({name: value for name, value in added.items() if value is not None})
    return batch


def _take_antigens(batch: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    """The antigens that these rows name, in the order in which they first do, and which of them each row has."""
    index = batch["antigen_index"][start:end]
    numbers = index.tolist()
    place = {number: i for i, number in enumerate(dict.fromkeys(numbers))}
    chosen = torch.tensor([*place], device=index.device)
    shared: dict[str, Any] = {"antigen_index": torch.tensor([place[number] for number in numbers]).to(index)}
    for name in ("input_ids", "attention_mask"):
        if name in batch:
            shared[name] = batch[name][chosen]
    if "encoder_outputs" in batch:
        shared["encoder_outputs"] = tuple(states[chosen] for states in batch["encoder_outputs"])
    return shared


def _finish(part: Any, layout: BatchLayout | None, trims: bool) -> Any:
    if trims:
        _trim(part)
    if layout is None:
        return part
    segments = layout.segments
    maker = LayoutMaker(segments is not None, bool(segments and segments.rounds_up), layout.labelled is not None)
    return maker.add_to(part)


def _trim(batch: Any) -> None:
    """Takes columns away, at the end, in which no row has a token; of a decoder's labels, those without a label."""
    for value in batch.values():
        if isinstance(value, Mapping):
            _trim(value)
    if "antigen_index" in batch and torch.is_tensor(labels := batch.get("labels")):
        batch["labels"] = labels[:, : _last_used(labels.ne(IGNORED))]
    mask = batch.get("attention_mask")
    if not torch.is_tensor(mask) or mask.dim() != 2:
        return
    shape, longest = tuple(mask.shape), _last_used(mask)
    for name, value in batch.items():
        if torch.is_tensor(value) and value.dim() >= 2 and tuple(value.shape[:2]) == shape:
            batch[name] = value[:, :longest]
        elif name == "encoder_outputs":
            batch[name] = tuple(states[:, :longest] for states in value)


def _last_used(mask: torch.Tensor) -> int:
    """Columns of a (rows, columns) mask up to the last one that a row uses; all where none does."""
    used = mask.any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else mask.shape[1]
