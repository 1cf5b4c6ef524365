"""What a part must offer for a checkpoint to carry its state."""

from __future__ import annotations

from typing import Any, Protocol


class Stateful(Protocol):
    """State of a part, in every checkpoint of the run under `name`.

    `state` is a tree of plain values, tensors and arrays, or None where there is nothing to keep; `load` takes what
    `state` gave, in another process, or None where a checkpoint has nothing of it.
    """

    name: str

    def state(self) -> Any: ...

    def load(self, tree: Any) -> None: ...
