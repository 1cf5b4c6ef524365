"""What of an optimizer's state could be NaN or infinite, by names that say something."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .state import optimizer_tree


def optimizer_tensors(
    optimizer: Any, named_parameters: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of an optimizer's state, as "exp_avg of head.weight"; for `not_finite`.

    Args:
        optimizer: as for `optimizer_tree`.
        named_parameters: `model.named_parameters()`.

    Cost: no tensor is copied.
    """
    known = {id(parameter): name for name, parameter in named_parameters}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    saved = optimizer_tree(optimizer)["state_dict"]
    for key, value in saved.get("state", saved).items():  # optimizers made of others arrange it as they like
        is_index = isinstance(key, int) and key < len(parameters)
        owner = known.get(id(parameters[key]), key) if is_index else key
        for path, tensor in _leaves(value, ()):
            yield f"{'.'.join(map(str, path)) or 'state'} of {owner}", tensor


def _leaves(value: Any, path: tuple) -> Iterator[tuple[tuple, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
