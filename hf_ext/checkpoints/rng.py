"""Random states of a process: Python's, NumPy's, torch's, and those of its accelerators."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError

logger = logging.getLogger(__name__)


def capture_rng(device: str | torch.device = "cpu") -> dict[str, Any]:
    """States of the generators of Python, NumPy, torch's CPU and all accelerators of `device`'s kind.

    All of them, also in a process that uses one: a state is 16 bytes, and DataParallel uses several. Copies: drawing on
    does not change them.
    """
    kind = torch.device(device).type
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002  the generator that libraries draw from
        "torch": torch.get_rng_state(),
    }
    if kind != "cpu":
        module = torch.get_device_module(kind)
        every = hasattr(module, "get_rng_state_all")
        states["accelerator"] = {
            "kind": kind,
            "states": module.get_rng_state_all() if every else [module.get_rng_state()],
        }
    return states


def restore_rng(tree: dict[str, Any]) -> None:
    """Sets every generator to the state that `capture_rng` found, accelerators as far as they are here.

    Warns, once, where an accelerator of the tree is absent now: its draws (dropout) will be others.

    Raises:
        CheckpointError: the tree is none of `capture_rng`'s.
    """
    try:
        random.setstate(tree["python"])
        np.random.set_state(tree["numpy"])  # noqa: NPY002
        torch.set_rng_state(tree["torch"])
        saved = tree.get("accelerator", {"kind": "cpu", "states": []})
        kind, states = saved["kind"], list(saved["states"])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"Not the states of random generators: {type(error).__name__}: {error}") from error
    num_here = _count_devices(kind)
    if num_here < len(states):
        logger.warning(
            "The checkpoint holds generators of %d %s device(s), %d are here: random numbers drawn on the others' "
            "(dropout) will differ from the uninterrupted run's.",
            len(states),
            kind,
            num_here,
        )
    for index, state in enumerate(states[:num_here]):
        module = torch.get_device_module(kind)
        # A backend without get_rng_state_all has one device, and its setter takes no index.
        module.set_rng_state(state, index) if hasattr(module, "get_rng_state_all") else module.set_rng_state(state)


def _count_devices(kind: str) -> int:
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # this torch was built without it
        return 0
    return module.device_count() if kind != "cpu" and module.is_available() else 0
