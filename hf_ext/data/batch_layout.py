"""What a model would otherwise read from a batch on its device, and wait for: found in the collator for nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..overrides import is_from
from .segments import Segments

IGNORED = -100  # labels that transformers' losses leave out


@dataclass(frozen=True)
class BatchLayout:
    """Entry `layout` of a batch; not a tensor, so that nothing cuts it as if its rows were the batch's.

    Attributes:
        shape: of the batch's `input_ids`. A model that got other rows finds out for itself.
        segments: for packed encoders (`models/packing.py`).
        labelled: (k,), int64: where in the flattened `labels` a label stands (`speedups/masked_lm_head.py`).
    """

    shape: tuple[int, ...]
    segments: Segments | None = None
    labelled: torch.Tensor | None = None

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> BatchLayout:
        """The same on a device; what Accelerate calls on each part of a batch."""
        return self._map(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> BatchLayout:
        """The same in memory that a device reads while the host goes on; what torch's loaders call."""
        return self._map(lambda part: part.pin_memory())

    def _map(self, function: Callable[[Any], Any]) -> BatchLayout:
        parts: dict[str, Any] = {"segments": self.segments, "labelled": self.labelled}
        changed = {name: function(part) for name, part in parts.items() if part is not None}
        return replace(self, **changed)


@dataclass
class LayoutMaker:
    """Which parts of a `BatchLayout` the models of a run read.

    Attributes:
        packs: `segments`, which are filled up to a few lengths where `round_up` is set.
        locates_labels: `labelled`.
    """

    packs: bool = False
    round_up: bool = False
    locates_labels: bool = False

    def add_to(self, batch: dict[str, Any]) -> dict[str, Any]:
        """`batch`, with its `layout`."""
        segments = Segments.from_mask(batch["attention_mask"], self.round_up) if self.packs else None
        labelled = locate_labels(batch["labels"]) if self.locates_labels else None
        return {**batch, "layout": BatchLayout(tuple(batch["input_ids"].shape), segments, labelled)}


def locate_labels(labels: torch.Tensor) -> torch.Tensor:
    """Where in the flattened `labels` a label stands, (k,), int64. Cost: one read where they are on a device."""
    return labels.flatten().ne(IGNORED).nonzero().squeeze(1)


def change_layout(collator: Any, **changes: bool) -> None:
    """Sets what a collator that makes layouts adds to its batches; others are left alone.

    So are subclasses with another `__call__`: what that changes in a batch, its layout would not know.
    """
    if not (hasattr(collator, "layout") and is_from(type(collator).__call__, ("hf_ext",))):
        return
    maker = collator.layout or LayoutMaker()
    for name, value in changes.items():
        setattr(maker, name, value)
    collator.layout = maker if maker.packs or maker.locates_labels else None
