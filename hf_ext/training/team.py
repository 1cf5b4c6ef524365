"""The processes of a run: agreeing, waiting, and what one does for all. Of one process, nothing waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from accelerate.utils import gather_object, reduce, wait_for_everyone
from transformers import TrainingArguments

from ..disk import is_disk_failure
from ..errors import CheckpointError
from ..main_process import do_on_main
from ..out_of_memory import is_out_of_memory

Result = TypeVar("Result")
_BEAT_S = 0.2


class Team:
    """All processes call each method, in the same order; of one process, each is what its work is.

    Attributes:
        rank, size: number of this process, and how many there are.
        is_main: whether this one acts for all, such as talking to the Hub.
        writes: whether this one writes what all share (`args.should_save`).
    """

    def __init__(self, args: TrainingArguments):
        self._args = args
        self.rank, self.size = args.process_index, args.world_size
        self.is_main = self.rank == 0
        self.writes = bool(args.should_save)

    def agree(self, wishes: Sequence[bool]) -> list[bool]:
        """Which wishes any process has: the same on all of them, which is what keeps them in step."""
        if self.size == 1:
            return list(wishes)
        counts = reduce(torch.tensor(wishes, dtype=torch.int32, device=self._args.device), "sum")
        return [count > 0 for count in counts.tolist()]

    def together(self, action: Callable[[], None] | None, describe: Callable[[Exception], str]) -> str | None:
        """Runs `action`, if any; returns what the disk refused to any process, as `describe` says it, on all alike.

        So it does where memory did not suffice.

        Raises:
            CheckpointError: another process failed for another reason; this one's own error is raised as it is.
        """
        failure = error = None
        try:
            if action is not None:
                action()
        except Exception as raised:  # whatever it is: the others wait for this process
            if is_disk_failure(raised) or is_out_of_memory(raised):
                failure = describe(raised)
            elif self.size == 1:
                raise
            else:
                error = raised
        if self.size == 1:
            return failure
        outcomes = gather_object([(failure, None if error is None else f"{type(error).__name__}: {error}")])
        if error is not None:
            raise error
        for rank, (_, other) in enumerate(outcomes):
            if other is not None:
                raise CheckpointError(f"Process {rank} failed: {other}")
        return next((text for text, _ in outcomes if text is not None), None)

    def load_together(self, action: Callable[[], None] | None, describe: Callable[[Exception], str]) -> None:
        """As `together`; raises CheckpointError on all processes if the disk failed on one."""
        failure = self.together(action, describe)
        if failure is not None:
            raise CheckpointError(failure)

    def on_main(self, work: Callable[[], Result]) -> Result:
        """What `work`, called by the main process alone, returns or raises, on all: see `do_on_main`."""
        return do_on_main(self._args, work)

    def wait_while(self, is_waiting: Callable[[], bool]) -> None:
        """Until `is_waiting` of the main process is over; others hear of it all the while, since they time out."""
        while self.on_main(is_waiting):
            time.sleep(_BEAT_S)

    def wait_for_everyone(self) -> None:
        """Until all processes are here."""
        wait_for_everyone()
