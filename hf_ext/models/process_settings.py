"""Settings that several runs of one process share, what float32 products are computed in among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast

import torch

T = TypeVar("T")


class Held(Generic[T]):
    """One setting. The value held last counts; runs may let go in any order, and more than once.

    Args:
        read, write: of the setting, as it is now.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], object]):
        self._read, self._write = read, write
        self._before: T | None = None
        self._holds: list[list[T]] = []  # each a list of its own, since values may be equal

    def read_before(self) -> T:
        """What is set where no run holds it."""
        return self._before if self._holds else self._read()  # type: ignore[return-value]

    def hold(self, value: T) -> Callable[[], None]:
        """Sets it; what it returns lets go of it."""
        before = self.read_before()
        self._write(value)
        mine = [value]
        self._before, self._holds = before, [*self._holds, mine]
        return lambda: self._let_go(mine)

    def _let_go(self, mine: list[T]) -> None:
        before, self._holds = self._holds, [hold for hold in self._holds if hold is not mine]
        if before and before[-1] is mine:
            self._write(self._holds[-1][0] if self._holds else self._before)  # type: ignore[arg-type]


@contextmanager
def replaced(holder: Any, **values: Any) -> Iterator[None]:
    """Other attributes of an object, for a while."""
    before = {name: getattr(holder, name) for name in values}
    try:
        for name, value in values.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


General = Literal["highest", "high", "medium"]


@dataclass(frozen=True)
class MatmulPrecision:
    """`on_gpu` and `on_cpu` (oneDNN): "none" and "ieee" are float32, others "tf32" and "bf16"."""

    on_gpu: str
    on_cpu: str

    @property
    def general(self) -> General:
        """The general setting that agrees with both."""
        if self.on_cpu == "bf16":
            return "medium"
        return "high" if "tf32" in (self.on_gpu, self.on_cpu) else "highest"

    def name(self, device_type: str) -> str:
        """ "float32", "tf32" or "bf16": what products of a device ("cuda", "cpu", ...) are computed in."""
        found = {"cuda": self.on_gpu, "cpu": self.on_cpu}.get(device_type, "none")
        return "float32" if found in ("none", "ieee") else found


FAST_GPU = MatmulPrecision("tf32", "tf32")  # what "high" means
FAST_CPU = MatmulPrecision("tf32", "bf16")  # what "medium" means


def read_matmul_precision() -> MatmulPrecision:
    """The settings of this process; raises nothing."""
    return MatmulPrecision(torch.backends.cuda.matmul.fp32_precision, _onednn().fp32_precision)


def set_matmul_precision(precision: MatmulPrecision) -> None:
    """Sets all of torch's settings so that they agree."""
    torch.set_float32_matmul_precision(precision.general)
    torch.backends.cuda.matmul.fp32_precision = precision.on_gpu
    _onednn().fp32_precision = precision.on_cpu


def _onednn() -> Any:
    return cast(Any, torch.backends.mkldnn).matmul  # not in torch's type stubs


HELD_MATMUL = Held(read_matmul_precision, set_matmul_precision)
