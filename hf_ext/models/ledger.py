"""The ledger: every allocation that torch makes for a model, and when it is let go.

A dispatch mode sees each operation below autograd, so also what the backward pass makes and what it keeps. It holds for
real tensors and for fake ones, which have shapes and no memory; torch's own tracker (`torch.distributed._tools`) takes
minutes and fails where a parameter does not train.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK_BYTES = 512  # CUDA's caching allocator rounds to it (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)
WEIGHTS, GRADIENTS, OTHER = "weights", "gradients", "other"


def rounded_bytes(num_bytes: int, block: int = BLOCK_BYTES) -> int:
    """What an allocator takes for `num_bytes`: the next multiple of `block`."""
    return -(-num_bytes // block) * block


class Ledger(TorchDispatchMode):
    """Counts the bytes of all storages that operations inside of it make, from when they are made to when they end.

    Views share a storage and are counted once; a tensor that autograd keeps for the backward pass counts until that
    lets it go. Not seen: what a kernel takes and gives back within itself (workspaces of cuBLAS, oneDNN, cuDNN), and a
    storage that an operation enlarges in place.

    Attributes:
        current: category -> bytes held at this moment.
        peak: most bytes held at one moment, of all categories.
        levels: after each operation, bytes of all but gradients; of those, what grows with the rows; of gradients.

    Args:
        block: allocations are rounded up to a multiple of it.
        left_out: shapes that do not count, such as those of weights that autocast rounds.
        rows: of the batch, a prime that no width of a model has as a factor: tensors whose bytes it divides, and no
            others, grow with the rows. 0: not told apart.
    """

    def __init__(self, block: int = BLOCK_BYTES, rows: int = 0, left_out: Collection[tuple[int, ...]] = ()):
        super().__init__()
        self.block, self.rows, self._left_out = block, rows, left_out
        self.current: dict[str, int] = dict.fromkeys((WEIGHTS, GRADIENTS, OTHER), 0)
        self.peak = 0
        self.growing = 0
        self.levels: list[tuple[int, int, int]] = []
        self._entries: dict[int, list[Any]] = {}  # storage -> [category, bytes, bytes that grow with the rows]

    @property
    def total(self) -> int:
        """Bytes held at this moment."""
        return sum(self.current.values())

    def know(self, tensors: Iterable[torch.Tensor], category: str = WEIGHTS) -> None:
        """Counts tensors that were made before, whose views would else count, each storage once.

        What is counted already is put into the other category.
        """
        for tensor in tensors:
            entry = self._entries.get(storage_key(tensor))
            if entry is None:
                self._add(tensor, category)
            else:
                self._count(entry, -1)
                entry[0] = category
                self._count(entry, 1)
        self._note()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for six times per operation, and slow to come by
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._add(result)
        elif isinstance(result, tuple | list):
            for part in result:
                if isinstance(part, torch.Tensor):
                    self._add(part)
        self._note()
        return result

    def _add(self, tensor: torch.Tensor, category: str = OTHER) -> None:
        key = storage_key(tensor)
        if key in self._entries or (self._left_out and category == OTHER and tuple(tensor.shape) in self._left_out):
            return
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        grows = self.rows and num_bytes and num_bytes % self.rows == 0
        rounded = rounded_bytes(num_bytes, self.block)
        self._entries[key] = entry = [category, rounded, rounded if grows else 0]
        self._count(entry, 1)
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self._count(self._entries.pop(key), -1)

    def _count(self, entry: list[Any], sign: int) -> None:
        category, num_bytes, growing = entry
        self.current[category] += sign * num_bytes
        self.growing += sign * growing

    def _note(self) -> None:
        gradients = self.current[GRADIENTS]
        others = self.total - gradients
        self.levels.append((others, self.growing, gradients))
        self.peak = max(self.peak, others + gradients)


def storage_key(tensor: torch.Tensor) -> int:
    """A storage's address: two views of one have the same."""
    return tensor.untyped_storage()._cdata
