"""Terms of a loss that cost much, computed in every n-th step; and points of a row, of which each step takes a few.

    class Mine(FastTrainer):  # or Trainer
        def compute_loss(self, model, inputs, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, **{**kwargs, "return_outputs": True})
            when = {"step": self.state.global_step, "training": model.training}
            loss = loss + compute_every(4, lambda: inverse_loss(outputs), **when)
            return (loss, outputs) if kwargs.get("return_outputs") else loss

Neither counts anything or draws from a generator: what is due follows from the optimizer step, and which points are
taken from seed, epoch and row. So both are the same in a run that goes on from a checkpoint, for any batch size,
accumulation and number of processes, and in any order of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from ..data.masking import splitmix64
from ..errors import ArgumentError


def compute_every(n: int, term: Callable[[], Any], *, step: int, training: bool, scale: bool = False) -> Any:
    """What `term()` returns in every n-th optimizer step, the first one included; 0.0 in between, without calling it.

    All micro-batches of a step and all processes agree, since they have the same `step`. In an evaluation the term is
    always computed, and never scaled: its loss must not depend on the step at which it is evaluated.

    Args:
        n: 1 computes it always. The gradient of an n-th is on average that of 1 / n times the term.
        term: a tensor or number to be added to the loss.
        step: optimizer steps taken so far, `trainer.state.global_step`; in a model's forward, `OptimizerStep.taken`.
        training: `model.training`.
        scale: multiplies the term by n, so that its gradient is on average that of every step.

    Raises:
        ArgumentError: n is no whole number from 1 on.

    Under DDP, weights that only the term reaches have no gradient in between: leave `ddp_find_unused_parameters` on,
    which is Trainer's default.
    """
    if type(n) is not int or n < 1:
        raise ArgumentError(f"compute_every: n={n!r} must be at least 1, and whole: 1 computes the term in every step.")
    if not training:
        return term()
    if step % n:
        return 0.0
    return term() * n if scale and n > 1 else term()


class OptimizerStep(TrainerCallback):
    """Tells a model's forward the optimizer step: give the same object to the model and to `trainer.add_callback`.

    Attributes:
        taken: optimizer steps taken before the present one, also by the run that this one continues.
    """

    def __init__(self) -> None:
        self.taken = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first micro-batch of a step."""
        self.taken = state.global_step


def subsample(
    points: Any, k: int, *, seed: int, epoch: int, row_ids: Sequence[Any] | torch.Tensor, training: bool
) -> Any:
    """k of the n points of each row, another choice in every epoch; all points in an evaluation.

    Args:
        points: (rows, n, ...), or a tuple of such tensors with one n, such as coordinates and values, which are taken
            alike; tensors on any device.
        k: how many, in the order in which they were; all of them where n is not larger.
        seed, epoch, row_ids: see `choose_points`.
        training: `model.training`.

    Returns:
        (rows, k, ...), or a tuple of such tensors. Gradients reach the points that were taken.

    Raises:
        ArgumentError: k is no whole number from 1 on; tensors do not have the same n, or a row for each of `row_ids`.
    """
    several = points if isinstance(points, tuple) else (points,)
    shapes = {tuple(one.shape[:2]) for one in several}
    if len(shapes) != 1 or {rows for rows, _ in shapes} != {len(row_ids)}:
        raise ArgumentError(f"subsample: points of shapes {sorted(shapes)} for {len(row_ids)} rows of row_ids.")
    ((_, n),) = shapes
    if type(k) is not int or k < 1:
        raise ArgumentError(f"subsample: k={k!r} must be at least 1, and whole.")
    if not training or k >= n:
        return points
    chosen = torch.from_numpy(choose_points(n, k, seed=seed, epoch=epoch, row_ids=row_ids))
    taken = tuple(_take(one, chosen) for one in several)
    return taken if isinstance(points, tuple) else taken[0]


def choose_points(n: int, k: int, *, seed: int, epoch: int, row_ids: Sequence[Any] | torch.Tensor) -> np.ndarray:
    """k different places of n for each row, ascending; every set of k is as likely as every other.

    Args:
        n, k: n at least k.
        seed, epoch: any integers; the epoch is `int(trainer.state.epoch)`, or what a collator's `set_epoch` was told.
        row_ids: what identifies a row in the data set (its number, name or content); not its place in the batch. A
            tensor counts as the numbers in it; one on a device makes the host wait.

    Returns:
        (rows, k), int64. Cost: 60 ns per point of n, on the CPU.
    """
    names = row_ids.tolist() if isinstance(row_ids, torch.Tensor) else row_ids
    digests = [hashlib.blake2b(f"points\t{seed}\t{epoch}\t{row}".encode(), digest_size=8).digest() for row in names]
    draws = splitmix64(np.frombuffer(b"".join(digests), "<u8").astype(np.uint64), n)
    return np.sort(np.argpartition(draws, k - 1, axis=1)[:, :k], axis=1)


def _take(points: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    index = chosen.to(points.device).view(*chosen.shape, *[1] * (points.dim() - 2))
    return points.take_along_dim(index, dim=1)
