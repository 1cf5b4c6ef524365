"""The end of several processes' run: nothing of a process may hold on to the process group when it is destroyed."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from accelerate.utils import wait_for_everyone
from torch import distributed


class Holder(Protocol):
    """What holds on to the process group, such as by a model that DDP has wrapped, and can let go of it."""

    def let_go(self) -> None: ...


# Who uses a group, as long as there are both. Torch knows of a group only its names and ranks, and accelerate's shared
# state, which stands for the connection, is made anew by every `TrainingArguments` (transformers 5.23).
_holders: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()


def share_group(holder: Holder) -> None:
    """Enters who uses the process group, to be asked to let go of it when it is destroyed; of one process, nobody.

    A wrapped model (DDP) that outlives its group keeps gloo's threads running while the interpreter goes down. torch
    2.13 then aborts now and then ("terminate called without an active exception", status -6), after a run that did
    all its work.
    """
    if is_shared():
        _holders.setdefault(distributed.group.WORLD, WeakSet()).add(holder)


def release_group() -> None:
    """Has all that share the process group let go of it, once no process still works. All processes call it."""
    if is_shared():
        wait_for_everyone()  # nobody takes the group from one that still works
        for holder in [*_holders.get(distributed.group.WORLD, ())]:
            holder.let_go()


def is_shared() -> bool:
    """Whether there is a process group of several processes."""
    return distributed.is_initialized() and distributed.get_world_size() > 1
