"""Data loaders that take from torch's global generator at known places of a run, whatever is known of workers."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader


class RepeatableLoader(DataLoader):
    """Takes one number from the global generator whenever an iteration begins, as a loader without workers does.

    torch 2.13 takes it when it makes an iterator, to seed workers. Persistent workers keep theirs, so that a process
    that goes on with a run took it at other places than the one before, and all dropout after was another. Remove when
    torch takes the number at every iteration, or none.

    Args (attributes, because `make_repeatable` turns loaders into this class that are made already):
        draws_once: as torch with persistent workers, the first iteration of a run alone takes a number.
        has_begun: there was an iteration before, in this process or in the one that the run was begun in.
        source: the generator that the user gave the loader, to take the number from; None is the global one.
        iterators: those that are still in use; whoever ends a run early can end their workers.
    """

    draws_once: bool
    has_begun: bool
    source: torch.Generator | None
    iterators: WeakSet[Any]

    def __iter__(self) -> Any:
        """As in torch, with workers seeded as there; torch itself then draws from a generator of the loader's own."""
        assert self.generator is not None
        self.generator.set_state(torch.get_rng_state() if self.source is None else self.source.get_state())
        if not (self.draws_once and self.has_begun):
            torch.empty((), dtype=torch.int64).random_(generator=self.source)
        self.has_begun = True
        iterator = super().__iter__()
        self.iterators.add(iterator)
        return iterator


def make_repeatable(loader: Any, draws_once: bool = False, has_begun: bool = False) -> Any:
    """`loader`, of torch or as Accelerate prepared it, as a `RepeatableLoader`.

    Left alone: one that is none of torch's, that has an `__iter__` of its own, or that is a `RepeatableLoader` already.
    """
    base = base_of(loader)
    kind = type(base)
    if not issubclass(kind, RepeatableLoader) and getattr(kind, "__iter__", None) is DataLoader.__iter__:
        # A class of the user's keeps its name, and what else it overrides.
        base.__class__ = RepeatableLoader if kind is DataLoader else type(kind.__name__, (RepeatableLoader, kind), {})
        base.source, base.generator = base.generator, torch.Generator()
        base.iterators = WeakSet()
        base.draws_once, base.has_begun = draws_once, has_begun
    return loader


def base_of(loader: Any) -> Any:
    """The loader that iterates: the one inside of Accelerate's, or `loader` itself."""
    return getattr(loader, "base_dataloader", loader)
