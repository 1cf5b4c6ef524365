"""The parts of a run whose state is in its checkpoints, by where it stands there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .stateful import Stateful


@dataclass(frozen=True)
class Carried:
    """Names, and so files and keys, are those of the parts.

    Attributes:
        trees: each a file of its own, by the main process, unless its state is None.
        progress: each a key of `progress.json`, plain values.
        at_step: the same, but as it was when the optimizer step at hand began.
        of_process: each an entry of what every process writes for itself.
    """

    trees: Sequence[Stateful] = ()
    progress: Sequence[Stateful] = ()
    at_step: Sequence[Stateful] = ()
    of_process: Sequence[Stateful] = ()
