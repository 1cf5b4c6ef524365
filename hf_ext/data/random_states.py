"""Looking at data or at a loss before training, without moving what training draws from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@contextmanager
def kept_random_states(*holders: Any) -> Iterator[None]:
    """The random states of the process are afterwards as they were; so are those of the generators of `holders`.

    Args:
        holders: objects that may have generators (of torch, numpy or Python) as attributes.
    """
    states = capture_rng("cuda" if torch.cuda.is_initialized() else "cpu")
    held = [(generator, state_of(generator)) for generator in generators_of(*holders)]
    try:
        yield
    finally:
        restore_rng(states)
        for generator, state in held:
            put_back(generator, state)


def capture_rng(device: str | torch.device) -> dict[str, Any]:
    """States of the generators of the process: Python's, NumPy's, torch's, and of all accelerators of `device`'s kind.

    Copies: drawing on does not change them.
    """
    module = torch.get_device_module(device)
    if hasattr(module, "get_rng_state_all"):
        states = module.get_rng_state_all()
    else:
        states = [module.get_rng_state()] if hasattr(module, "get_rng_state") else []
    numpy = np.random.get_state()  # noqa: NPY002  the generator that libraries draw from
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state(), "of": module, "states": states}


def restore_rng(captured: dict[str, Any]) -> None:
    """Sets every generator to the state that `capture_rng` found in this process."""
    random.setstate(captured["python"])
    np.random.set_state(captured["numpy"])  # noqa: NPY002
    torch.set_rng_state(captured["torch"])
    module, states = captured["of"], captured["states"]
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(states)
    elif states:
        module.set_rng_state(*states)


def generators_of(*holders: Any) -> list[Any]:
    """The generators (of torch, NumPy or Python) that `holders` have as attributes, each once, in a fixed order."""
    values = [value for holder in holders for value in getattr(holder, "__dict__", {}).values()]
    found = {id(value): value for value in values if isinstance(value, KINDS)}
    return list(found.values())


def state_of(generator: Any) -> Any:
    """A copy of a generator's state, of plain values, tensors and arrays."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False) if isinstance(generator, np.random.RandomState) else generator.getstate()


def put_back(generator: Any, state: Any) -> None:
    """Sets a generator to what `state_of` said of one of its kind."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)
