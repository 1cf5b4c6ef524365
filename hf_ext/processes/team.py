"""The processes of a run: agreeing, waiting, what one does for all, and the end. Of one process, nothing waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakSet

import torch
from accelerate.utils import broadcast_object_list, gather_object, reduce, wait_for_everyone

from ..errors import CheckpointError, DiskFailure, HfExtError, RunEnded, is_out_of_memory
from ..files import describe_failure, is_disk_failure

if TYPE_CHECKING:
    from transformers import TrainingArguments

Result = TypeVar("Result")
_BEAT_S = 0.2
_holders: WeakSet[Any] = WeakSet()  # of the process group, such as by a model that DDP has wrapped


def do_on_main(args: TrainingArguments, work: Callable[[], Result]) -> Result:
    """Returns on all processes what `work`, called by the main process alone, returns. Raises what it raises.

    Args:
        args: `TrainingArguments`; all processes of a run call this.
        work: its result goes to the other processes, so it must be plain.

    Raises:
        HfExtError, RunEnded: from `work`.
        DiskFailure: instead of an OSError of the disk's.
    """
    outcome: list[Any] = [None, None]
    if args.process_index == 0:
        try:
            outcome[0] = work()
        except (HfExtError, RunEnded) as error:
            outcome[1] = error
        except OSError as error:
            if not is_disk_failure(error):
                raise
            outcome[1] = DiskFailure(describe_failure(error, error.filename or str(args.output_dir)))
    if args.world_size > 1:
        broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


class HasArguments(Protocol):
    """A trainer, whose arguments may be replaced."""

    @property
    def args(self) -> TrainingArguments:
        """Returns those of now."""


class Team:
    """All processes call each method, in the same order; of one process, each is what its work is.

    Attributes:
        rank, size: number of this process, and how many there are.
        is_main: whether this one acts for all, such as talking to the Hub.
        writes: whether this one writes what all share (`args.should_save`).
    """

    def __init__(self, trainer: HasArguments):
        self._trainer = trainer
        args = trainer.args
        self.rank = args.process_index
        self.size = args.world_size
        self.is_main = self.rank == 0
        self.writes = bool(args.should_save)

    def agree(self, wishes: Sequence[bool]) -> list[bool]:
        """Returns which wishes any process has: the same on all of them, which is what keeps them in step."""
        if self.size == 1:
            return list(wishes)
        counts = reduce(torch.tensor(wishes, dtype=torch.int32, device=self._trainer.args.device), "sum")
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
            else:
                error = raised
        text = None if error is None else f"{type(error).__name__}: {error}"
        outcomes = gather_object([(failure, text)]) if self.size > 1 else [(failure, text)]
        if error is not None:
            raise error
        for rank, (_, other) in enumerate(outcomes):
            if other is not None:
                raise CheckpointError(f"Process {rank} failed: {other}")
        return next((said for said, _ in outcomes if said is not None), None)

    def load_together(self, action: Callable[[], None] | None, describe: Callable[[Exception], str]) -> None:
        """Runs as `together`; raises CheckpointError on all processes if the disk failed on one."""
        failure = self.together(action, describe)
        if failure is not None:
            raise CheckpointError(failure)

    def on_main(self, work: Callable[[], Result]) -> Result:
        """Returns or raises on all what `work`, called by the main process alone, does: see `do_on_main`."""
        return do_on_main(self._trainer.args, work)

    def wait_while(self, is_waiting: Callable[[], bool]) -> None:
        """Waits until is_waiting() is False on rank 0, broadcasting so that other ranks do not time out."""
        while self.on_main(is_waiting):
            time.sleep(_BEAT_S)

    def wait_for_everyone(self) -> None:
        """Waits until all processes are here."""
        wait_for_everyone()


def share_group(holder: object) -> None:
    """Enters who uses the process group, whose `release` is called before it is destroyed.

    A wrapped model (DDP) that outlives its group keeps gloo's threads running while the interpreter goes down. torch
    2.13 then aborts now and then ("terminate called without an active exception", status -6), after a run that did
    all its work.
    """
    _holders.add(holder)


def release_group() -> None:
    """Has all that share the group of several processes release it, once none still works. All of them call it."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        wait_for_everyone()  # the group is not taken from one that still works
        while _holders:
            _holders.pop().release()
