"""What one process does for all: its result, its error, and waiting for it, shared by every process of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list

from ..checkpoints.disk import describe_failure, is_disk_failure
from ..errors import DiskFailure, HfExtError, RunEnded

_BEAT_S = 0.2


class MainProcessMixin:
    """For what only the main process may do, such as talking to the Hub. All processes call each method."""

    args: Any

    @property
    def _is_main(self) -> bool:
        return bool(self.args.process_index == 0)

    def _on_main(self, work: Callable[[], Any]) -> Any:
        """What `work`, called by the main process alone, returns; on all processes. So is what it raises.

        Raises:
            HfExtError, RunEnded: from `work`.
            DiskFailure: instead of an OSError of the disk's.
        """
        outcome: list[Any] = [None, None]
        if self._is_main:
            try:
                outcome[0] = work()
            except (HfExtError, RunEnded) as error:
                outcome[1] = error
            except OSError as error:
                if not is_disk_failure(error):
                    raise
                outcome[1] = DiskFailure(describe_failure(error, error.filename or self.args.output_dir))
        if self.args.world_size > 1:
            broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def _wait_together(self, is_waiting: Callable[[], bool]) -> None:
        """Until `is_waiting` of the main process is over; others hear of it all the while, since they time out."""
        while self._on_main(is_waiting):
            time.sleep(_BEAT_S)
