"""What looks at each evaluation of a run, and has to forget one that is given up."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from transformers import TrainerControl, TrainerState

from ..checkpoints.resume import Resumed
from .evaluation_passes import Evaluation

logger = logging.getLogger(__name__)


class Watcher(Protocol):
    """Sees every evaluation that the loop asked for, once, before its metrics are logged.

    `see` returns what is logged with them; it may end training by `control`. `snapshot` is what `rollback` puts back
    where the evaluation is given up: of several sets, some may have been seen. `missing` says what it means that a
    checkpoint has no state of it, or "".
    """

    name: str
    missing: str

    def state(self) -> Any: ...

    def load(self, tree: Any) -> None: ...

    def see(
        self, evaluation: Evaluation, logs: Mapping[str, float], state: TrainerState, control: TrainerControl
    ) -> dict[str, float]: ...

    def snapshot(self) -> Any: ...

    def rollback(self, snapshot: Any) -> None: ...


def load_watching(watchers: Sequence[Watcher], resumed: Resumed | None) -> None:
    """Lets each begin afresh, or where a checkpoint was."""
    for watcher in watchers:
        tree = None if resumed is None else resumed.state_of(watcher.name)
        if resumed is not None and tree is None and watcher.missing:
            logger.info("%s has %s", resumed.folder, watcher.missing)
        watcher.load(tree)


@contextmanager
def extended(logs: dict[str, float], added: Mapping[str, float]) -> Iterator[None]:
    """`logs` with what it lacks of `added`, while it is logged.

    Afterwards without: Trainer sums what `evaluate` returns into the objective of a hyperparameter search.
    """
    new = {name: value for name, value in added.items() if name not in logs}
    logs.update(new)
    try:
        yield
    finally:
        for name in new:
            logs.pop(name, None)
