"""A batch cut into smaller ones, its rows in their order: what a step computes apart where it does not fit at once.

No collator is asked again: a part is made of the tensors that are there, of padded rows by slices that copy nothing.
What a collator made for a batch as a whole, a layout of its rows without padding, is left out: models find out for
themselves what it would have told them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from accelerate.utils import find_batch_size

from .windows import WINDOWS, take_proteins

# Which of the inputs beside it each row of a batch has, -1 for none: of `SequenceCollator` and of `AntibodyCollator`.
INDICES = {"place", "antigen_index"}
OF_ROWS = {"labels", "affinity"}  # what has an entry for each row beside such an index


def cut_batch(batch: Any, num_parts: int) -> list[Any]:
    """Cuts a batch into `num_parts` of as many rows, the last of what is left; fewer where it has fewer rows.

    Padding stays, so that a part is as wide as the batch. Inputs that rows share or lack go with the rows that have
    them.

    Args:
        batch: a mapping whose tensors have one row each along their first dimension, or of our collators.

    Returns:
        Mappings of the class of `batch`; `batch` alone where it cannot be cut, as of sequences in one packed row.

    Cost: copies nothing but inputs that rows share or lack.
    """
    if num_parts == 1:
        return [batch]
    try:
        rows: Any = find_batch_size(batch)
        each = -(-rows // num_parts)
        return [_take(batch, rows, slice(start, start + each)) for start in range(0, rows, each)]
    except (TypeError, IndexError, ValueError):  # nothing in it, a value without length or with another one
        return [batch]


def _take(value: Any, rows: int, part: Any) -> Any:
    """Takes the rows in `part`, a slice or (k,) int64, of a value that has so many, or of all values in it."""
    if isinstance(value, tuple):
        return tuple(_take(one, rows, part) for one in value)
    if not isinstance(value, Mapping):
        if len(value) != rows:
            raise TypeError(f"{len(value)} rows in a batch of {rows}")
        return value[part]
    shared = rows, part
    numbers = {}
    for name in INDICES & value.keys():
        named = value[name][part]
        used = named.clamp(min=0).unique()  # beside rows that name none, the first goes along unread
        shared = max(1, int(value[name].max()) + 1), used
        numbers[name] = torch.searchsorted(used, named).masked_fill(named < 0, -1)
    others = {name: one for name, one in value.items() if name not in ("layout", *numbers)}
    if WINDOWS in value:
        return cast(Any, type(value))({**take_proteins(others, shared[1]), **numbers})
    taken = {
        name: _take(one, rows, part) if numbers and name in OF_ROWS else _take(one, *shared)
        for name, one in others.items()
    }
    return cast(Any, type(value))({**taken, **numbers})
