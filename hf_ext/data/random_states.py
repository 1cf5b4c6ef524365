"""Looking at data or at a loss before training, without moving what training draws from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

States = list[tuple[Callable[[Any], Any], Any]]  # how a generator is set, and to what


@contextmanager
def kept_random_states(*holders: Any) -> Iterator[None]:
    """The random states of the process are afterwards as they were; so are those of the generators of `holders`.

    Args:
        holders: objects that may have generators (of torch, NumPy or Python) as attributes.
    """
    states = capture_rng("cuda" if torch.cuda.is_initialized() else "cpu")
    for value in (value for holder in holders for value in getattr(holder, "__dict__", {}).values()):
        if isinstance(value, np.random.Generator):
            states.append((partial(setattr, value.bit_generator, "state"), value.bit_generator.state))
        elif isinstance(value, torch.Generator | np.random.RandomState):
            states.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            states.append((value.setstate, value.getstate()))
    try:
        yield
    finally:
        restore_rng(states)


def capture_rng(device: str | torch.device) -> States:
    """States of the generators of the process: Python's, NumPy's, torch's, and of all accelerators of `device`'s kind.

    Copies: drawing on does not change them.
    """
    module = torch.get_device_module(device)
    states: States = [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),  # noqa: NPY002  the generator that libraries draw from
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    for ending in ("_all", ""):
        if hasattr(module, f"get_rng_state{ending}"):
            return [*states, (getattr(module, f"set_rng_state{ending}"), getattr(module, f"get_rng_state{ending}")())]
    return states


def restore_rng(states: States) -> None:
    """Sets every generator to the state that `capture_rng` found in this process."""
    for put_back, state in states:
        put_back(state)
