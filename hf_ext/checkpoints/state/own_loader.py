"""Models whose class has a `load_state_dict` of its own: for buffers that grow, or entries that it makes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...errors import CheckpointError
from ..format.shards import is_spread
from ..format.tensor_files import as_bytes, describe_names

_LIBRARIES = {"torch", "transformers", "peft", "accelerate", "deepspeed", __name__.partition(".")[0]}


def has_own_loader(model: Any) -> bool:
    """Whether `model.load_state_dict` is the user's code, and the model is whole in this process.

    Not of a `PreTrainedModel`, which leaves entries out of its files that are tied or made anew.
    """
    if isinstance(model, PreTrainedModel):
        return False
    owner = next(cls for cls in type(model).__mro__ if "load_state_dict" in vars(cls))
    return owner.__module__.partition(".")[0] not in _LIBRARIES and not any(map(is_spread, model.parameters()))


def load_by_own(model: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Hands all tensors to the model's loader, as Trainer does, and checks what came of it: the same bits.

    Raises:
        CheckpointError: the model now holds something else; it was changed.
    """
    model.load_state_dict(dict(tensors), strict=False)
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    wrong = [name for name, tensor in tensors.items() if name not in state or not _same(state[name], tensor)]
    absent = [name for name in state if name not in tensors]
    if wrong or absent:
        raise CheckpointError(
            f"{folder}: load_state_dict of {type(model).__name__} did not restore {describe_names([*wrong, *absent])}, "
            "so training would not go on as it was. Its state_dict must give back what load_state_dict was given."
        )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    one = one.detach().cpu()
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(as_bytes(one), as_bytes(other))
