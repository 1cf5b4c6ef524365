"""Trains one candidate of a search in a plain loop: no checkpoints, no logs, only its error after each epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import get_scheduler

from ...models.head import RegressionHead
from ...models.losses import regression_loss
from .candidates import HeadSettings
from .rows import HeadRows

PATIENCE = 0.34  # of the epochs without a lower error, and a candidate is given up;
TRIAL, BEHIND = 0.3, 1.15  # or after this share of its epochs, with this multiple of the error of the best one there
EVALUATION_ROWS = 8192  # at a time

Measure = Callable[[np.ndarray, HeadRows], float]  # of predictions in label units: smaller is better


@dataclass(frozen=True)
class Recipe:
    """What all candidates of a search share.

    Attributes:
        widths: of each input's embedding.
        rows_per_step: over all processes, as in the run.
        warmup: share of the steps, or their number from 1 on.
        scheduler: name, as `lr_scheduler_type`.
        max_grad_norm: 0 or less for none.
        max_steps: at most; 0 for no limit.
        loss, huber_delta, tobit_scale: as in `AffinityConfig`.
        measure: the error of held-out predictions.
        seed: of weights, order and dropout.
    """

    widths: tuple[int, ...]
    rows_per_step: int
    warmup: float
    scheduler: str
    max_grad_norm: float
    max_steps: int
    loss: str
    huber_delta: float
    tobit_scale: float
    measure: Measure
    seed: int

    def loss_sum(self, output: torch.Tensor, labels: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """The run's loss over rows, (n,) each, standardised label units."""
        return regression_loss(
            self.loss, output, labels, bounds, huber_delta=self.huber_delta, tobit_scale=self.tobit_scale
        )

    def num_steps(self, num_rows: int, epochs: float) -> int:
        """Steps of a candidate, at least 1."""
        steps = max(1, math.ceil(epochs * max(1, num_rows // self.rows_per_step)))
        return min(steps, self.max_steps) if self.max_steps else steps


@dataclass(frozen=True)
class Trained:
    """`errors`: of the held-out rows, after each epoch; `steps`: that were taken."""

    errors: list[float]
    steps: int


def train_head(
    settings: HeadSettings,
    recipe: Recipe,
    train: HeadRows,
    held_out: HeadRows,
    rival: Sequence[float] | None = None,
) -> Trained:
    """Trains a head on `train`, and measures it on `held_out` after each epoch.

    It is given up where the error has stopped falling, or is far above that of `rival`, the errors of the best head so
    far by epoch, after the same share of training. The global random state is as before.

    Cost: on two cores 2 ms per step of a small head, 10 ms of one of 2M weights.
    """
    devices = [train.features.device] if train.features.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(recipe.seed)
        head = RegressionHead(recipe.widths, [*settings.sizes], settings.dropout, settings.form)
        # The rows are standardised already; doing it in every step costs more than a small head does.
        return _train(head.layers.to(train.features.device), settings, recipe, train, held_out, rival)


def _train(
    head: nn.Module,
    settings: HeadSettings,
    recipe: Recipe,
    train: HeadRows,
    held_out: HeadRows,
    rival: Sequence[float] | None,
) -> Trained:
    mean, std = float(train.labels.mean()), float(train.labels.std()) or 1.0
    device, size = train.features.device, recipe.rows_per_step
    labels = torch.from_numpy((train.labels - mean) / std).float().to(device)
    bounds = torch.from_numpy(train.bounds).to(device)
    num_steps = recipe.num_steps(len(train), settings.epochs)
    patience = max(1, round(PATIENCE * settings.epochs))
    optimizer = _optimizer(head, settings)
    warmup = int(recipe.warmup if recipe.warmup >= 1 else recipe.warmup * num_steps)
    schedule = get_scheduler(recipe.scheduler, optimizer, warmup, num_steps)
    errors: list[float] = []
    step = 0
    while step < num_steps and not _is_hopeless(errors, patience, step / num_steps, rival):
        order = torch.randperm(len(train)).to(device)
        head.train()
        for rows in order.split(size)[: num_steps - step]:
            output = head(train.features[rows]).squeeze(-1)
            (recipe.loss_sum(output, labels[rows], bounds[rows]) / len(rows)).backward()
            if recipe.max_grad_norm > 0:
                nn.utils.clip_grad_norm_(head.parameters(), recipe.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
        error = recipe.measure(predict(head, held_out.features) * std + mean, held_out)
        errors.append(error if math.isfinite(error) else math.inf)
    return Trained(errors, step)


def _is_hopeless(errors: Sequence[float], patience: int, share: float, rival: Sequence[float] | None) -> bool:
    """Whether a head that has come so far (`share` of its steps) need not go on."""
    if not errors:
        return False
    if len(errors) - errors.index(min(errors)) > patience:
        return True
    if rival is None or share < TRIAL:
        return False
    there = rival[: max(1, math.ceil(share * len(rival)))]
    return min(errors) > BEHIND * min(there)


def _optimizer(head: nn.Module, settings: HeadSettings) -> torch.optim.Optimizer:
    """AdamW with decay on matrices alone, as `Trainer` has it."""
    groups = [
        {"params": [p for p in head.parameters() if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in head.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, fused=True)


@torch.no_grad()
def predict(head: nn.Module, features: torch.Tensor) -> np.ndarray:
    """A head's output in evaluation mode, (n,) float64, standardised label units."""
    head.eval()
    return np.concatenate([head(part).squeeze(-1).double().cpu().numpy() for part in features.split(EVALUATION_ROWS)])
