"""One forward and backward pass of a model's own classes on tensors without memory, with the ledger beside it.

Cost: 0.05 to 0.1 s on one core for a layer's classes of any width, the weights of no model read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..models import unwrap_peft
from .fakes import HALF, LayerSlice, autocast_rule

Direction = Literal["forward", "backward"]
BLOCK_BYTES = 512  # CUDA's caching allocator rounds to it (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)
WEIGHTS = "weights"
GRADIENTS = "gradients"
OTHER = "other"


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
        """Finds the fullest moment.

        Args:
            standing: bytes of all gradients where they are there from a pass before; 0 where they are made in this one.
        """
        levels = np.stack([self.others, self.gradients])
        pieces = []
        shift = np.zeros((2, 1), np.int64)
        start = 0
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

    def with_rows(self, factor: float) -> Timeline:
        """Returns the timeline of `factor` times as many rows: exact, but for rounding."""
        others = self.others + (factor - 1) * self.growing
        return replace(self, others=np.rint(others).astype(np.int64), growing=factor * self.growing)


class Ledger(TorchDispatchMode):
    """Counts the bytes of all storages that operations inside of it make, from when they are made to when they end.

    A dispatch mode sees each operation below autograd, so also what the backward pass makes and what it keeps, of real
    tensors and of fake ones; torch's own tracker (`torch.distributed._tools`) takes minutes and fails where a parameter
    does not train. Views share a storage and are counted once; a tensor that autograd keeps for the backward pass
    counts until that lets it go. Not seen: what a kernel takes and gives back within itself (workspaces of cuBLAS,
    oneDNN, cuDNN), and a storage that an operation enlarges in place.
    Where `follow` tells it which kept layer computes, some storages stand for those of layers that were left out too;
    what lives until all layers are done, as autocast's copies of weights do, is released for all of them at once.

    Attributes:
        current: category -> bytes held at this moment.
        levels: after each operation, bytes of all but gradients; of those, what grows with the rows; of gradients.
        repeats: what was passed so far of what the whole model repeats.

    Args:
        block: allocations are rounded up to a multiple of it.
        rows: of the batch, a prime that no width of a model has as a factor: tensors whose bytes it divides, and no
            others, grow with the rows. 0: not told apart.
    """

    def __init__(self, block: int = BLOCK_BYTES, rows: int = 0):
        super().__init__()
        self.block = block
        self.rows = rows
        self.current: dict[str, int] = dict.fromkeys((WEIGHTS, GRADIENTS, OTHER), 0)
        self.growing = 0
        self.levels: list[tuple[int, int, int]] = []
        self.repeats: list[Repeat] = []
        # Storage -> [category, bytes, bytes that grow with the rows, layers left out that have one of their own].
        self._entries: dict[int, list[Any]] = {}
        self._num_left_out = 0  # layers that the one that computes stands for
        self._is_between = True  # whether none computes
        self._freed = self._freed_growing = 0  # of the layers that were left out
        self._begun: dict[tuple[str, Direction], int] = {}

    @property
    def total(self) -> int:
        """Bytes held at this moment."""
        return sum(self.current.values())

    def know(self, tensors: Iterable[Tensor], category: str = WEIGHTS) -> None:
        """Counts tensors that were made before, whose views would else count, each storage once.

        What is counted already is put into the other category.
        """
        for tensor in tensors:
            entry = self._entries.get(tensor.untyped_storage()._cdata)
            if entry is None:
                self._add(tensor, category)
            else:
                self._count(entry, -1)
                entry[0] = category
                self._count(entry, 1)
        self._note()

    def follow(self, layer: nn.Module, number: int, piece: LayerSlice) -> None:
        """Hears when a layer begins and ends, the one of this number among those that `piece` keeps."""
        layer.register_forward_pre_hook(partial(self._begin, number, piece))
        layer.register_forward_hook(partial(self._end, number, piece))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for six times per operation, and slow to come by
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, Tensor):
                self._add(part)
        self._note()
        return result

    def _add(self, tensor: Tensor, category: str = OTHER) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # two views of one have the same address
        num_bytes = storage.nbytes()
        if key in self._entries:
            return
        grows = self.rows and num_bytes and num_bytes % self.rows == 0
        rounded = -(-num_bytes // self.block) * self.block
        self._entries[key] = entry = [category, rounded, rounded if grows else 0, self._num_left_out]
        self._count(entry, 1)
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        entry = self._entries.pop(key)
        _, num_bytes, growing, num_left_out = entry
        if self._is_between:
            self._freed += num_left_out * num_bytes
            self._freed_growing += num_left_out * growing
        self._count(entry, -1)

    def _count(self, entry: list[Any], sign: int) -> None:
        category, num_bytes, growing, _ = entry
        self.current[category] += sign * num_bytes
        self.growing += sign * growing

    def _note(self) -> None:
        gradients = self.current[GRADIENTS]
        others = self.total - gradients - self._freed
        self.levels.append((others, self.growing - self._freed_growing, gradients))

    def _begin(self, number: int, piece: LayerSlice, module: nn.Module, args: Any) -> None:
        self._mark("forward", number, piece)
        self._is_between = False
        self._num_left_out = piece.copies - 1 if number == piece.first else 0

    def _end(self, number: int, piece: LayerSlice, module: nn.Module, args: Any, output: Any) -> None:
        self._is_between = number == piece.kept - 1
        self._num_left_out = 0
        states = output[0] if isinstance(output, tuple) else output
        if states.requires_grad:
            states.register_hook(partial(self._turn, number, piece))

    def _turn(self, number: int, piece: LayerSlice, gradient: Tensor) -> None:
        self._mark("backward", number, piece)
        self._is_between = False

    def _mark(self, direction: Direction, number: int, piece: LayerSlice) -> None:
        """Marks where the layer that stands for all in the middle begins and ends, in both directions."""
        after = piece.first + (1 if direction == "forward" else -1)
        key = (piece.name, direction)
        moment = len(self.levels)
        if number == piece.first:
            self._begun[key] = moment
        elif number == after and key in self._begun:
            self.repeats.append(Repeat(self._begun.pop(key), moment, piece.copies))


def record_pass(
    ledger: Ledger, model: Any, pieces: Sequence[LayerSlice], batch: dict[str, Any], half: bool, kind: str
) -> Timeline:
    """Records one forward and backward pass with the ledger, of real tensors on a CPU or of fake ones.

    Args:
        pieces: of the model that `model` was copied from; none for a model that stands for itself.
        half: under autocast to bf16 or fp16.
        kind: of the hardware, as `Hardware.kind`.

    Raises:
        Exception: whatever the model raises on tensors without values.
    """
    with ExitStack() as around:
        around.enter_context(autocast_rule(kind))
        ledger.know([*model.parameters(), *model.buffers()])
        weights = ledger.total
        ledger.know(tensors_in(batch), OTHER)
        for parameter in model.parameters():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(lambda p: ledger.know([p.grad], GRADIENTS))
                around.callback(handle.remove)
        for piece in pieces:
            if piece.kept < len(piece.layers):
                for number, layer in enumerate(unwrap_peft(model).get_submodule(piece.name).children()):
                    ledger.follow(layer, number, piece)
        around.enter_context(ledger)
        with torch.autocast("cpu", HALF, enabled=half):
            loss = _loss(model(**batch))
        if loss.requires_grad:
            loss.backward()
        del loss
    others, growing, gradients = np.array(ledger.levels, np.int64).T
    return Timeline(others - weights, gradients, tuple(ledger.repeats), growing)


def _loss(outputs: Any) -> Tensor:
    """Returns the model's own loss; of one without, the sum of what it puts out first."""
    found = outputs.get("loss") if isinstance(outputs, dict) else None
    first = outputs[0] if found is None else found
    return first if first.dim() == 0 else first.float().sum()


def tensors_in(value: object) -> list[Tensor]:
    """Lists the tensors of a batch, those of mappings and objects inside of it too, in their order."""
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
    return [tensor for part in values for tensor in tensors_in(part)]
