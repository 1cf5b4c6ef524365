"""One forward and backward pass of a model's own classes on tensors without memory, with the ledger beside it.

Cost: 0.05 to 0.1 s on one core for a layer's classes of any width, the weights of no model read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from ..models.ledger import BLOCK_BYTES, GRADIENTS, OTHER, Ledger, storage_key
from ..models.lora import unwrap_peft
from .fakes import PERIOD, LayerSlice, autocast_rule

Direction = Literal["forward", "backward"]


class Repeat(NamedTuple):
    """Moments [start, end) that the whole model goes through `copies` times."""

    start: int
    end: int
    copies: int


class Peak(NamedTuple):
    """The fullest moment of a pass, in bytes beside weights and optimizer states.

    Attributes:
        activations: all that is neither weight nor gradient: what backward needs, and what an operation works on.
        gradients: those that exist at that moment.
    """

    activations: int
    gradients: int


@dataclass(frozen=True)
class Timeline:
    """Bytes after each operation of one pass of a model whose middle layers were left out.

    Layers in the middle all do the same: each adds as much in the forward pass, and takes as much away in the backward
    pass, where it may leave its gradients. So the fullest moment of the whole model lies in the first or the last
    copy of what repeats, or outside of it, and is known without the others.

    Attributes:
        others: (moments,), int64: all but weights and gradients.
        gradients: (moments,), int64.
        repeats: in the order of time, none within another.
        growing: (moments,), of `others` what grows with the rows of the batch.
    """

    others: np.ndarray
    gradients: np.ndarray
    repeats: tuple[Repeat, ...] = ()
    growing: np.ndarray = field(default_factory=lambda: np.zeros(1))

    def peak(self, standing: int = 0) -> Peak:
        """The fullest moment.

        Args:
            standing: bytes of all gradients where they are there from a pass before; 0 where they are made in this one.
        """
        levels = np.stack([self.others, self.gradients])
        pieces, shift, start = [], np.zeros((2, 1), np.int64), 0
        for repeat in (*self.repeats, Repeat(len(self.others), len(self.others), 1)):
            pieces.append(levels[:, start : repeat.end] + shift)
            if repeat.end > repeat.start:
                before = levels[:, repeat.start - 1] if repeat.start else 0
                shift = shift + (repeat.copies - 1) * (levels[:, repeat.end - 1] - before)[:, None]
                pieces.append(levels[:, repeat.start : repeat.end] + shift)
            start = repeat.end
        others, gradients = np.concatenate(pieces, axis=1)
        gradients = np.full_like(gradients, standing) if standing else gradients
        moment = int(np.argmax(others + gradients))
        return Peak(int(others[moment]), int(gradients[moment]))

    def with_rows(self, share: float) -> Timeline:
        """The timeline of `share` times as many rows: exact, but for rounding."""
        others = self.others + (share - 1) * self.growing
        return replace(self, others=np.rint(others).astype(np.int64), growing=share * self.growing)


class LayerLedger(Ledger):
    """A ledger that knows which kept layer computes, and which storages stand for those of layers that were left out.

    What lives until all layers are done, as autocast's copies of weights do, is let go for all of them at once.

    Attributes:
        repeats: what was passed so far of what the whole model repeats.
    """

    def __init__(self, block: int = BLOCK_BYTES, rows: int = 0):
        super().__init__(block, rows)
        self.repeats: list[Repeat] = []
        self._num_left_out, self._is_between = 0, True  # whom the layer that computes stands for; whether none computes
        self._made: dict[int, int] = {}
        self._freed = self._freed_growing = 0  # of the layers that were left out
        self._begun: dict[tuple[str, Direction], int] = {}

    def follow(self, layer: nn.Module, number: int, part: LayerSlice) -> None:
        """Hears when a layer begins and ends, the one of this number among those that `part` keeps."""
        layer.register_forward_pre_hook(partial(self._begin, number, part))
        layer.register_forward_hook(partial(self._end, number, part))

    def _begin(self, number: int, part: LayerSlice, module: nn.Module, args: Any) -> None:
        self._mark("forward", number, part)
        self._is_between = False
        self._num_left_out = part.copies - 1 if 0 <= number - part.first < PERIOD else 0

    def _end(self, number: int, part: LayerSlice, module: nn.Module, args: Any, output: Any) -> None:
        self._is_between = number == part.kept - 1
        self._num_left_out = 0
        states = output[0] if isinstance(output, tuple) else output
        if states.requires_grad:
            states.register_hook(partial(self._turn, number, part))

    def _turn(self, number: int, part: LayerSlice, gradient: torch.Tensor) -> None:
        self._mark("backward", number, part)
        self._is_between = False

    def _mark(self, direction: Direction, number: int, part: LayerSlice) -> None:
        """Where the layers that stand for all in the middle begin and end, in both directions."""
        low, high = part.first, part.first + PERIOD
        first, last = (low, high) if direction == "forward" else (high - 1, low - 1)
        key, moment = (part.name, direction), len(self.levels)
        if number == first:
            self._begun[key] = moment
        elif number == last and key in self._begun:
            self.repeats.append(Repeat(self._begun.pop(key), moment, part.copies))

    def _add(self, tensor: torch.Tensor, category: str = OTHER) -> None:
        before = len(self._entries)
        super()._add(tensor, category)
        if self._num_left_out and len(self._entries) > before:
            self._made[storage_key(tensor)] = self._num_left_out

    def _free(self, key: int) -> None:
        num_left_out = self._made.pop(key, 0)
        if self._is_between and num_left_out:
            _, num_bytes, growing = self._entries[key]
            self._freed += num_left_out * num_bytes
            self._freed_growing += num_left_out * growing
        super()._free(key)

    def _note(self) -> None:
        super()._note()
        others, growing, gradients = self.levels[-1]
        self.levels[-1] = others - self._freed, growing - self._freed_growing, gradients


def record_pass(
    ledger: LayerLedger, model: Any, parts: Sequence[LayerSlice], batch: dict[str, Any], half: bool, kind: str
) -> Timeline:
    """One forward and backward pass with the ledger beside it, of real tensors on a CPU or of fake ones.

    Args:
        parts: of the model that `model` was copied from; none for a model that stands for itself.
        half: under autocast to bf16 or fp16.
        kind: of the hardware, as `Hardware.kind`.

    Raises:
        Exception: whatever the model raises on tensors without values.
    """
    with ExitStack() as around:
        opened = around.enter_context(autocast_rule(half, kind))
        ledger.know([*model.parameters(), *model.buffers()])
        weights = ledger.total
        ledger.know(_tensors(batch), OTHER)
        for parameter in model.parameters():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(lambda p: ledger.know([p.grad], GRADIENTS))
                around.callback(handle.remove)
        for part in parts:
            if part.kept < len(part.layers):
                for number, layer in enumerate(unwrap_peft(model).get_submodule(part.name).children()):
                    ledger.follow(layer, number, part)
        around.enter_context(ledger)
        with opened():
            loss = _loss(model(**batch))
        if loss.requires_grad:
            loss.backward()
        del loss
    others, growing, gradients = np.array(ledger.levels, np.int64).T
    return Timeline(others - weights, gradients, tuple(ledger.repeats), growing)


def _loss(outputs: Any) -> torch.Tensor:
    """The model's own; of one without, the sum of what it puts out first."""
    found = outputs.get("loss") if isinstance(outputs, dict) else None
    first = outputs[0] if found is None else found
    return first if first.dim() == 0 else first.float().sum()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
    return [tensor for part in values for tensor in _tensors(part)]
