"""An optimizer's step that is made whole or not at all, where memory does not suffice for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from typing import Any

import torch

from ..errors import MemoryExhausted
from ..out_of_memory import DidNotFit, attempt
from .rungs import ADVICE

logger = logging.getLogger(__name__)


class TornStep(Exception):
    """A step was out of memory after it had begun to change weights or states."""


def guard_step(optimizer: Any, relieve: Callable[[Any], bool]) -> None:
    """Has `optimizer.step`, of one that Accelerate prepared, try again what did not fit and changed nothing.

    Args:
        relieve: makes room for `optimizer`, where memory that is freed is not enough; whether there was a way.

    Raises (from `optimizer.step`):
        MemoryExhausted: that did not fit either, or the step was torn.
    """
    if not isinstance(vars(optimizer).get("step"), partial):  # of a second training with the same one
        # With the mark by which torch's schedules know a step that they count.
        step = partial(_step_until_it_fits, optimizer, relieve, optimizer.step)
        optimizer.step = update_wrapper(step, optimizer.step)


def _step_until_it_fits(
    optimizer: Any, relieve: Callable[[Any], bool], step: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    remedies: list[tuple[str, Callable[[], bool]]] = [
        ("with its states in host memory", partial(relieve, optimizer)),
        ("with memory freed", lambda: True),
    ]
    while True:
        try:
            return step_whole(getattr(optimizer, "optimizer", optimizer), partial(step, *args, **kwargs))
        except TornStep as failure:
            raise _torn(failure) from None
        except DidNotFit as failure:
            said = str(failure)
        while remedies:
            words, remedy = remedies.pop()
            if remedy():
                logger.warning("Out of memory in the optimizer (%s): tried again, %s.", said, words)
                break
        else:
            raise MemoryExhausted(f"Out of memory in the optimizer ({said}). {ADVICE}")


def _torn(failure: TornStep) -> MemoryExhausted:
    return MemoryExhausted(
        f"Out of memory in the optimizer ({failure}), which had begun to change weights: what is in memory is no state "
        "of the run. --resume auto goes on from the last checkpoint; --optim adamw_torch_fused steps whole or not at "
        "all."
    )


def step_whole(optimizer: Any, step: Callable[[], Any]) -> Any:
    """What `step` returns.

    Where it is out of memory before it has changed anything, states that it had begun to make are taken away, so that
    it can be tried again. torch's fused optimizers change nothing before all that they need is there.

    Raises:
        DidNotFit: it was out of memory, and nothing is changed.
        TornStep: it was out of memory halfway.

    Cost: a number read per parameter and state, and their dicts copied.
    """
    versions = {id(tensor): tensor._version for tensor in _tensors(optimizer)}
    plain = [(holder, dict(holder)) for holder in [*optimizer.param_groups, *optimizer.state.values()]]
    known = set(optimizer.state)
    try:
        return attempt(step)
    except DidNotFit as failure:
        for parameter in set(optimizer.state) - known:
            del optimizer.state[parameter]
        for holder, values in plain:  # entries that are new, and numbers that count steps
            holder.clear()
            holder.update(values)
        if any(versions.get(id(tensor)) != tensor._version for tensor in _tensors(optimizer)):
            raise TornStep(str(failure)) from None
        raise


def _tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Weights, and what the optimizer keeps of them."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))
