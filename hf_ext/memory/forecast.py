"""What one training step will take, line by line, of one model in any of the ways to train it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from ..data import WINDOWS, BatchLayout
from ..labels import LabelKind
from ..models import find_base_layers, recompute
from .fakes import LayerSlice, copy_as_fake, fake_batch, give_layouts, slice_layers
from .probe import BLOCK_BYTES, Ledger, Timeline, record_pass
from .stored import CODE_BYTES, HALF_BYTES, gradient_bytes, optimizer_bytes, weight_bytes

# A prime, so that no width is a multiple of it, and large, so that rounding does not count. Nothing is that large.
MANY_ROWS = 1009
LABELLED = 0.15  # of the tokens, in masked language modelling
# What a model raises that asks for values, or uses an operation that knows no tensors without any. All else is a fault.
CANNOT_TRACE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)


@dataclass(frozen=True)
class TrainConfig:
    """One way to train the same model on the same rows.

    Attributes:
        rows: of one pass on one device.
        recomputes: what is computed again in the backward pass, also where the model does not say so itself: True by
            the model's own switch, else `parts` of `models.recompute`.
        half: under autocast to bf16 or fp16.
        has_half_base: frozen linear layers beside adapters are stored in half precision, or, with `has_coded_base`, in
            4 bits, from which half precision is made for each product.
        optimizer: a value of Trainer's `--optim`.
        is_muon: Muon steps the matrices of encoder layers.
        on_host: the optimizer's states lie in host memory.
        passes: per optimizer step; from the second on, gradients are there before a pass begins.
        every_n_layers: which layers are computed again: each n-th.
    """

    rows: int
    recomputes: bool | str = False
    half: bool = False
    has_half_base: bool = False
    has_coded_base: bool = False
    optimizer: str = "adamw_torch_fused"
    is_muon: bool = False
    on_host: bool = False
    passes: int = 1
    every_n_layers: int = 1


@dataclass(frozen=True)
class Forecast:
    """Bytes at the fullest moment of a step.

    Attributes:
        moment: "backward pass" or "optimizer step", whichever is fuller.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buckets: int = 0
    moment: str = "backward pass"

    @property
    def peak(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buckets

    def lines(self) -> list[tuple[str, int]]:
        """Returns (what, bytes), which add up to the peak."""
        working = "activations" if self.moment == "backward pass" else "the optimizer's working copies"
        lines = [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            (working, self.activations),
            ("buckets that gradients are sent in", self.buckets),
        ]
        return [(what, num_bytes) for what, num_bytes in lines if num_bytes]


@dataclass
class MemoryModel:
    """A model, the batches it trains on, and what a step takes; what ways to train have in common is computed once.

    Attributes:
        model: real, or on torch's meta device.
        make_batch: rows -> arguments of its forward, tensors real or on the meta device.
        kind: of the hardware, as `Hardware.kind`: CUDA's autocast keeps norms in float32.
        change: done to the copy before it computes: what a plan will do to the model later.
        block: what the allocator rounds to.
        scales: whether a batch of any number of rows does the same operations, on tensors that grow with it or do not:
            one pass then answers for all. Else `make_batch` may give the same one whatever is asked for.
        sends_gradients: whether several processes do (DDP), which holds all of them once more.
        has_half: whether the hardware computes in half precision.
    """

    model: nn.Module
    make_batch: Callable[[int], dict[str, Any]]
    kind: str = "cuda"
    change: Callable[[Any], Any] | None = None
    block: int = BLOCK_BYTES
    scales: bool = True
    sends_gradients: bool = False
    has_half: bool = True
    timelines: dict[tuple[Any, ...], Timeline] = field(default_factory=dict)

    @cached_property
    def slices(self) -> list[LayerSlice]:
        """As `slice_layers`."""
        return slice_layers(self.model)

    @cached_property
    def all_gradients(self) -> int:
        """Bytes of all gradients."""
        return gradient_bytes(self.model)

    @cached_property
    def base_layers(self) -> list[Any]:
        """Frozen linear layers beside adapters, which could be stored in half precision."""
        return find_base_layers(self.model)

    def has_large_states(self, config: TrainConfig) -> bool:
        """Returns whether AdamW's states are on the device and more than a small fraction of a step."""
        is_adamw = config.optimizer.startswith("adamw_torch") and not config.is_muon and not config.on_host
        return is_adamw and self.all_gradients > self.forecast(config).peak // 50

    def timeline(self, config: TrainConfig) -> Timeline:
        """Records what is held at each moment of a pass. Cost: a pass for each way to compute, if `scales`.

        Raises:
            CANNOT_TRACE: the model does not compute on tensors without values; and whatever else it raises.
        """
        rows = MANY_ROWS if self.scales else config.rows
        key = (config.recomputes, config.every_n_layers, config.half, config.half and config.has_half_base, rows)
        if key not in self.timelines:
            self.timelines[key] = self._run_pass(*key)
        found = self.timelines[key]
        return found.with_rows(config.rows / rows) if self.scales else found

    def _run_pass(self, recomputes: bool | str, every: int, half: bool, is_narrow: bool, rows: int) -> Timeline:
        batch = self.make_batch(rows)
        slices = self.slices if every == 1 else []  # no layer stands for all others
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model: Any = copy_as_fake(self.model, slices, is_narrow)
            if self.change is not None:
                self.change(model)
            give_layouts(model)
            if recomputes is True:
                model.activation_checkpointing_enable(every_n_layers=every)
            elif recomputes:
                recompute(model, recomputes, every)
            ledger = Ledger(self.block, rows if self.scales else 0)
            return record_pass(ledger, model.train(), slices, fake_batch(mode, batch), half, self.kind)

    def stored(self, config: TrainConfig) -> tuple[int, int, int]:
        """Counts bytes of weights, of the optimizer's states, and of what a step of it makes besides."""
        states = optimizer_bytes(self.model, config.optimizer, config.is_muon)
        num_bytes = CODE_BYTES if config.has_coded_base else HALF_BYTES
        return weight_bytes(self.model, self.base_layers if config.has_half_base else (), num_bytes), *states

    def forecast(self, config: TrainConfig) -> Forecast:
        """Predicts the fullest moment of a step; see `timeline` for errors and cost."""
        weights, states, working = self.stored(config)
        peak = self.timeline(config).peak(self.all_gradients if config.passes > 1 else 0)
        buckets = self.all_gradients if self.sends_gradients else 0
        if config.on_host:  # which steps tensor by tensor, fused
            states = 0
            working = 0
        backward = Forecast(weights, peak.gradients, states, peak.activations, buckets)
        step = Forecast(weights, self.all_gradients, states, working, buckets, "optimizer step")
        return max(backward, step, key=lambda found: found.peak)

    def stored_forecast(self, config: TrainConfig) -> Forecast:
        """Predicts by formula what stands between two passes: nothing of what a pass itself holds."""
        weights, states, _ = self.stored(config)
        return Forecast(weights, self.all_gradients, 0 if config.on_host else states, 0)

    def try_forecast(self, config: TrainConfig) -> Forecast | None:
        """Predicts as `forecast` does; None where the model does not compute so on tensors without values."""
        try:
            return self.forecast(config)
        except CANNOT_TRACE:
            return None


# --- batches without contents ---------------------------------------------------------------------------------------


def masked_lm_batch(length: int, locates_labels: bool, rows: int) -> dict[str, Any]:
    """Makes rows of `length` tokens, with labels.

    Args:
        locates_labels: with where labels stand, for a head that computes there only.
    """
    ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": ids, "labels": ids}
    if locates_labels:
        where = torch.zeros(rows * max(1, round(LABELLED * length)), dtype=torch.long, device="meta")
        batch["layout"] = BatchLayout((rows, length), None, where)
    return batch


def affinity_batch(
    lengths: Mapping[str, int],
    embedded: Mapping[str, int],
    rows: int,
    kind: LabelKind,
    windows: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Makes rows for an `AffinityModel`.

    Args:
        lengths: input name -> tokens, of a row or a window, of those that are encoded while training.
        embedded: input name -> width, of those that come from the cache.
        kind: of the labels, one for each row.
        windows: input name -> of each row, where there are several.
    """
    sequences = {}
    for name, length in lengths.items():
        num = (windows or {}).get(name, 1)
        ids = torch.zeros(rows * num, length, dtype=torch.long, device="meta")
        mask = torch.zeros(rows, num * length, dtype=torch.bool, device="meta")
        sequences[name] = {"residue_mask": mask, "input_ids": ids, "attention_mask": ids}
        if num > 1:
            sequences[name][WINDOWS] = ids
    embeddings = {name: torch.zeros(rows, width, device="meta") for name, width in embedded.items()}
    labels = torch.zeros(rows, *kind.label_shape, dtype=kind.stack([]).dtype, device="meta")
    return {"sequences": sequences, "embeddings": embeddings, "labels": labels}
