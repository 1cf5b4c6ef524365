"""Looking at data or at a loss before training, without moving what training draws from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def kept_random_states(*holders: Any) -> Iterator[None]:
    """The random states of the process are afterwards as they were; so are those of the generators of `holders`.

    Args:
        holders: objects that may have generators (of torch, numpy or Python) as attributes.
    """
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002  what datasets draw from
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    held = [(value, _state_of(value)) for holder in holders for value in getattr(holder, "__dict__", {}).values()]
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
            for generator, state in held:
                if state is not None:
                    _put_back(generator, state)


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.getstate() if isinstance(value, random.Random) else None


def _put_back(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)
