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
        """As in Trainer, for all trainers of the process: none of them can train or evaluate afterwards.

        To be called by all processes, once each; `trainer.model` stays. Waits for the slowest process.
        """
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            self.accelerator.wait_for_everyone()  # nobody takes the group from one that still works
            for trainer in list(_trainers):
                trainer.model_wrapped = trainer.model
                trainer.accelerator.free_memory()
        super().end()  # type: ignore[misc]
