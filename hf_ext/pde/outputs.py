"""What an operator returns, what it has computed of a task, and the error that all tasks are measured by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.utils import ModelOutput


@dataclass
class OperatorOutput(ModelOutput):
    """Of a batch of B rows: `loss`, scalar, float32, None without labels; `logits`, (B, tasks, Q), float32, predictions
    in the unit of the data."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


@dataclass(frozen=True)
class TaskStep:
    """What a step has computed of one task.

    Attributes:
        inputs: (B, ...), in the unit of the data.
        encoded: (B, T, d), latents before the trunk.
        latents: (B, T, d), latents after it.
        points: (B, Q), int64: the places on the task's grid that were decoded.
        predictions: (B, Q), there, in the unit of the data, float32.
    """

    inputs: torch.Tensor
    encoded: torch.Tensor
    latents: torch.Tensor
    points: torch.Tensor
    predictions: torch.Tensor


def relative_l2(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The L2 of the error over the L2 of the target, along the last dimension, in float32.

    Args:
        predictions, targets: (..., Q), any float dtype.

    Returns:
        (...), float32. Targets that are 0 everywhere count as of size 1e-12, so the result is finite; where both are
        equal, the gradient is 0.
    """
    true = targets.float()
    error = torch.linalg.vector_norm(predictions.float() - true, dim=-1)
    return error / torch.linalg.vector_norm(true, dim=-1).clamp_min(1e-12)
