"""How long a run has trained, over all the sessions it took."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback


class RunClockCallback(TrainerCallback):
    """Counts seconds of training and sessions (calls of `train`); a resumed run counts on.

    Both are in every checkpoint, but not in `trainer_state.json`, which is the same for two runs that learn the same.
    What a kill cost after the last checkpoint is not counted: that session could not write it down any more.
    """

    name = "run_clock"

    def __init__(self) -> None:
        self.seconds_before = 0.0
        self.num_sessions = 0
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """Of training, evaluations and saves included, loading and scoring not."""
        return self.seconds_before + (0.0 if self._began is None else time.monotonic() - self._began)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a resumed run has got its state back."""
        self._began = time.monotonic()
        self.num_sessions += 1

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The time after it is not training."""
        self.seconds_before, self._began = self.seconds, None

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON-able."""
        return {"seconds": self.seconds, "num_sessions": self.num_sessions}

    def load(self, tree: dict[str, Any] | None) -> None:
        """Goes on from the `state` of a checkpoint, in the session that has begun; None where it does not say."""
        before = tree or {}
        self.seconds_before = float(before.get("seconds", 0.0))
        self.num_sessions = int(before.get("num_sessions", 0)) + 1
