"""Settings that several runs of one process share, what float32 products are computed in among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch

T = TypeVar("T")


class Held(Generic[T]):
    """One setting. The value set last counts; runs may release theirs in any order, and more than once.

    Args:
        read, write: of the setting, as it is now.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], object]):
        self._read = read
        self._write = write
        self._held: list[list[T]] = []  # what was set before, then each value held: lists, since values may be equal

    def acquire(self, value: T) -> Callable[[], None]:
        """Sets it; what it returns releases it."""
        mine = [value]
        self._held = [*(self._held or [[self._read()]]), mine]
        self._write(value)

        def release() -> None:
            held = self._held
            self._held = [one for one in self._held if one is not mine]
            if held and held[-1] is mine:
                self._write(self._held[-1][0])
            if len(self._held) == 1:
                self._held = []

        return release


@contextmanager
def replaced(holder: object, **values: object) -> Iterator[None]:
    """Gives an object other attributes, for a while."""
    before = {name: getattr(holder, name) for name in values}
    try:
        for name, value in values.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


class MatmulPrecision(NamedTuple):
    """`on_gpu` and `on_cpu` (oneDNN): "none" and "ieee" are float32, others "tf32" and "bf16"."""

    on_gpu: str
    on_cpu: str

    def name(self, device_type: str) -> str:
        """Returns "float32", "tf32" or "bf16": what products of a device ("cuda", "cpu", ...) are computed in."""
        found = {"cuda": self.on_gpu, "cpu": self.on_cpu}.get(device_type, "none")
        return "float32" if found in ("none", "ieee") else found


FAST_GPU = MatmulPrecision("tf32", "tf32")  # what "high" means
FAST_CPU = MatmulPrecision("tf32", "bf16")  # what "medium" means


def read_matmul_precision() -> MatmulPrecision:
    """Reads the settings of this process; raises nothing."""
    return MatmulPrecision(torch.backends.cuda.matmul.fp32_precision, _onednn().fp32_precision)


def set_matmul_precision(precision: MatmulPrecision) -> None:
    """Sets all of torch's settings so that they agree."""
    general = "high" if "tf32" in precision else "highest"
    if precision.on_cpu == "bf16":
        general = "medium"
    torch.set_float32_matmul_precision(general)
    torch.backends.cuda.matmul.fp32_precision = precision.on_gpu
    _onednn().fp32_precision = precision.on_cpu


def _onednn() -> Any:
    return cast(Any, torch.backends.mkldnn).matmul  # not in torch's type stubs


HELD_MATMUL = Held(read_matmul_precision, set_matmul_precision)


@contextmanager
def computing_in_float32(encoder: torch.nn.Module) -> Iterator[None]:
    """Widens weights in half precision, in place; narrows them at the end, which loses nothing.

    Cost: one pass over the weights each way, and memory for them in float32; nothing is read from disk.
    """
    halves = [(p, p.dtype) for p in encoder.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    for parameter, _ in halves:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, dtype in halves:
            parameter.data = parameter.data.to(dtype)
