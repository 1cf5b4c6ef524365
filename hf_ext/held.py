"""Settings that several runs of one process share: each run holds its value, and what was before comes back at last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

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
