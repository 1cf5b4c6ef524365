"""Batches without contents for the models of hf_ext's tasks: as many rows of as many tokens as are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from ..data.batch_layout import BatchLayout
from ..data.segments import Segments
from ..models.packing import find_encoders, is_packed, pack_encoders
from .fakes import fake_batch

LABELLED = 0.15  # of the tokens, in masked language modelling


def masked_lm_batch(length: int, locates_labels: bool = False) -> Callable[[int], dict[str, Any]]:
    """Rows of `length` tokens, with labels.

    Args:
        locates_labels: with where labels stand, for a head that computes there only.
    """

    def make(rows: int) -> dict[str, Any]:
        ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": ids, "labels": ids}
        if locates_labels:
            where = torch.zeros(rows * max(1, round(LABELLED * length)), dtype=torch.long, device="meta")
            batch["layout"] = BatchLayout((rows, length), None, where)
        return batch

    return make


def affinity_batch(lengths: Mapping[str, int], embedded: Mapping[str, int]) -> Callable[[int], dict[str, Any]]:
    """Rows for an `AffinityModel`.

    Args:
        lengths: input name -> tokens, of those that are encoded while training.
        embedded: input name -> width, of those that come from the cache.
    """

    def make(rows: int) -> dict[str, Any]:
        sequences = {}
        for name, length in lengths.items():
            ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
            sequences[name] = {"input_ids": ids, "attention_mask": ids, "residue_mask": ids.bool()}
        embeddings = {name: torch.zeros(rows, width, device="meta") for name, width in embedded.items()}
        return {"sequences": sequences, "embeddings": embeddings, "labels": torch.zeros(rows, device="meta")}

    return make


def give_layouts(model: nn.Module) -> None:
    """Tells packed encoders of a fake copy that every row is full: the mask, where they would read it, is empty."""
    for encoder in find_encoders(model):
        if is_packed(encoder):
            pack_encoders(encoder)  # without filling up
            encoder.__dict__["forward"] = _Full(encoder.forward)


class _Full:
    def __init__(self, packed: Any):
        self.packed = packed

    def __call__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mode: FakeTensorMode = input_ids.fake_mode  # type: ignore[attr-defined]
        layout = fake_batch(mode, _full_rows(*input_ids.shape))
        return self.packed(input_ids, *args, **{**kwargs, "layout": layout})


@lru_cache(maxsize=8)
def _full_rows(rows: int, width: int) -> BatchLayout:
    with unset_fake_temporarily(), torch.device("cpu"):
        return BatchLayout((rows, width), Segments.from_mask(torch.ones(rows, width, dtype=torch.long)))
