"""The end of a run of several processes: together, with no thread left that could bring a process down."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import distributed

_trainers: WeakSet[Any] = WeakSet()  # of this process: they share its process group


class LeavingMixin:
    """`end` waits for all processes and releases what holds on to the process group, so that its threads end.

    A wrapped model (DDP) that outlives its group keeps gloo's threads running while the interpreter goes down. torch
    2.13 then aborts now and then ("terminate called without an active exception", status -6), after a run that did
    all its work. A single process is left as it is.
    """

    accelerator: Any
    model: Any
    model_wrapped: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        _trainers.add(self)

    def end(self) -> None:
        """As in Trainer, for all trainers of the process; ends this one's data workers that live on.

        To be called by all processes, once each; waits for the slowest. `trainer.model` stays, but of several
        processes none can train or evaluate afterwards.
        """
        self._end_workers()  # type: ignore[attr-defined]
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            self.accelerator.wait_for_everyone()  # nobody takes the group from one that still works
            for trainer in list(_trainers):
                trainer.model_wrapped = trainer.model
                trainer.accelerator.free_memory()
        super().end()  # type: ignore[misc]

    def close(self) -> None:
        """Lets go of what this trainer holds, while others of the process go on: its processes stay connected.

        For a trainer inside a run, such as one head of several; `end` comes after the last of them. Never waits.
        """
        self._end_workers()  # type: ignore[attr-defined]
        self.model_wrapped = self.model
        self.accelerator.free_memory()
