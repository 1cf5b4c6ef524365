"""What one process does for all: its result, its error, and waiting for it, shared by every process of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..checkpoints.main_process import do_on_main

_BEAT_S = 0.2


class MainProcessMixin:
    """For what only the main process may do, such as talking to the Hub. All processes call each method."""

    args: Any

    @property
    def _is_main(self) -> bool:
        return bool(self.args.process_index == 0)

    def _on_main(self, work: Callable[[], Any]) -> Any:
        """As `do_on_main`."""
        return do_on_main(self.args, work)

    def _wait_together(self, is_waiting: Callable[[], bool]) -> None:
        """Until `is_waiting` of the main process is over; others hear of it all the while, since they time out."""
        while self._on_main(is_waiting):
            time.sleep(_BEAT_S)
