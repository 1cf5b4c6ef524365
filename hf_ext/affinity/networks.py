"""Trains networks of several seeds and folds side by side on embeddings, in a plain loop: no checkpoints, no logs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import get_linear_schedule_with_warmup

from ..models.ensemble import NetworkStack
from ..training_args import FastTrainingArguments

WARMUP = 0.05  # of the steps
MIN_ROWS_PER_STEP = 32
EVALUATED_ROWS = 2048  # at a time


def train_networks(
    inputs: torch.Tensor,
    labels: NDArray[np.float64],
    parts: Sequence[NDArray[np.int64]],
    sizes: Sequence[int],
    dropout: float,
    args: FastTrainingArguments,
    rate: float,
    num_seeds: int,
) -> tuple[NetworkStack, NDArray[np.float64]]:
    """Trains `num_seeds` networks without the rows of each part, all in one pass; of the epoch with the lowest error.

    That is the squared error of all parts together, by networks that have not seen them. The global random state is as
    before.

    Args:
        inputs: (n, d) float32, on the device that trains.
        labels: (n,), label units.
        parts: numbers of rows that are held out together.
        sizes, dropout: of hidden layers.
        args: epochs, rows per step, weight decay and seed.
        rate: factor of `args.learning_rate`.

    Returns:
        The networks, in label units, and predictions of each row by those without its part, (n,).
    """
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(args.seed)
        number = len(parts) * num_seeds
        stack = NetworkStack(number, inputs.shape[1], sizes, dropout).to(inputs.device)
        return stack, _train(stack, inputs, labels, parts, args, rate, num_seeds)


def _train(
    stack: NetworkStack,
    inputs: torch.Tensor,
    labels: NDArray[np.float64],
    parts: Sequence[NDArray[np.int64]],
    args: FastTrainingArguments,
    rate: float,
    num_seeds: int,
) -> NDArray[np.float64]:
    mean, std = float(labels.mean()), float(labels.std()) or 1.0
    scaled, held_out = (labels - mean) / std, np.concatenate(parts)
    targets = torch.from_numpy(scaled).float().to(inputs.device)
    seen = [torch.from_numpy(np.setdiff1d(np.arange(len(labels)), part)) for part in parts]
    fewest = min(map(len, seen))
    size = min(fewest, max(MIN_ROWS_PER_STEP, args.train_batch_size * args.gradient_accumulation_steps))
    num_steps = fewest // size
    epochs = math.ceil(args.max_steps / num_steps) if args.max_steps > 0 else math.ceil(args.num_train_epochs)
    groups = [
        {"params": [*stack.weights], "weight_decay": args.weight_decay},
        {"params": [*stack.biases], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate * rate, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, int(WARMUP * num_steps * epochs), num_steps * epochs)
    lowest, best = math.inf, stack.state_dict()
    predicted = _predict_unseen(stack, inputs, parts, num_seeds) * std + mean
    for _ in range(epochs):
        stack.train()
        orders = [rows[torch.randperm(len(rows))[: num_steps * size]] for rows in seen for _ in range(num_seeds)]
        for chosen in torch.stack(orders).to(inputs.device).split(size, dim=1):
            (stack(inputs[chosen]) - targets[chosen]).square().mean(1).sum().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        unseen = _predict_unseen(stack, inputs, parts, num_seeds)
        error = float(np.square(unseen - scaled)[held_out].sum())
        if error < lowest:
            lowest, predicted = error, unseen * std + mean
            best = {name: value.clone() for name, value in stack.state_dict().items()}
    stack.load_state_dict(best)
    stack.eval().cpu().scale_outputs(std, mean)
    return predicted


@torch.no_grad()
def _predict_unseen(
    stack: NetworkStack, inputs: torch.Tensor, parts: Sequence[NDArray[np.int64]], num_seeds: int
) -> NDArray[np.float64]:
    """The mean over seeds for each row, by the networks of its part, (n,)."""
    stack.eval()
    longest = max(map(len, parts))
    padded = torch.from_numpy(np.stack([np.resize(part, longest) for part in parts for _ in range(num_seeds)]))
    found = [stack(inputs[rows]) for rows in padded.to(inputs.device).split(EVALUATED_ROWS, dim=1)]
    means = torch.cat(found, dim=1).view(len(parts), num_seeds, longest).mean(1).double().cpu().numpy()
    predicted = np.zeros(len(inputs))
    for part, values in zip(parts, means):
        predicted[part] = values[: len(part)]
    return predicted
