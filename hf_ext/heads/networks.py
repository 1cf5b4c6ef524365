"""Trains networks of several seeds and folds side by side on embeddings, in a plain loop: no checkpoints, no logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import get_linear_schedule_with_warmup

from ..hardware import detect_hardware
from ..models import LINKS, AffinityModel, NetworkStack
from ..training_args import FastTrainingArguments
from .objectives import FloatArray, Folds, Objective
from .resolving import IDLE_EPOCHS

T = TypeVar("T")

WARMUP = 0.05  # of the steps
MIN_ROWS_PER_STEP = 32
# Of many rows, fewer epochs leave the error as low as it was; of some thousand they leave it higher.
MIN_EPOCHS = 12
MAX_ROWS_READ = 400_000  # of all epochs, if these are more
EVALUATED_ROWS = 2048  # at a time
MIN_PRODUCTS = 2**22  # multiply-adds of a layer from which a step in bfloat16 takes less time


def side_by_side(tasks: Sequence[Callable[[Event], T]], device: torch.device) -> list[T]:
    """Calls tasks, several at a time on a CPU, each with its share of the threads; returns what they do, in order.

    Small products of matrices keep one core busy, and not two. A task ends early when its event is set: where this is
    interrupted.
    """
    stop = Event()
    num_threads = torch.get_num_threads()
    at_once = min(len(tasks), num_threads) if device.type == "cpu" else 1
    if at_once < 2:
        return [task(stop) for task in tasks]
    pool = ThreadPoolExecutor(at_once, "networks", torch.set_num_threads, (num_threads // at_once,))
    try:
        return [one.result() for one in [pool.submit(task, stop) for task in tasks]]
    finally:
        stop.set()
        # Not waited for: a second Ctrl-C would end that, and Python with threads that still run (3.11 aborts).
        pool.shutdown(wait=False, cancel_futures=True)
        torch.set_num_threads(num_threads)  # which is of the process, too


def train_networks(
    stack: NetworkStack,
    inputs: Tensor,
    objective: Objective,
    folds: Folds,
    args: FastTrainingArguments,
    rate: float,
    stop: Event,
) -> FloatArray:
    """Trains as many networks without the rows of each fold, all in one pass; of the epoch with the lowest error.

    That is the error of all folds together, by networks that have not seen them. Products of large steps
    are in bfloat16 where that is native, weights and errors in float32. Random numbers are its own.

    Args:
        stack: the networks of all folds, those of a fold together; on the CPU before and after.
        inputs: (n, d) float32.
        objective: of the n labels.
        folds: numbers of rows that are held out together.
        args: device, epochs at most, rows per step, weight decay and seed.
        rate: factor of `args.learning_rate`.
        stop: no epoch begins when it is set.

    Returns:
        `objective.entries` of the rows of all folds by the mean of the networks without them.
    """
    device = torch.device(args.device)
    inputs = inputs.to(device)
    stack.to(device)
    stack.generator = torch.Generator(device).manual_seed(args.seed)
    held_out = np.concatenate(folds)
    num_seeds = len(stack.weights[0]) // len(folds)
    seen = [torch.from_numpy(np.setdiff1d(np.arange(len(inputs)), fold)) for fold in folds]
    fewest = min(map(len, seen))
    size = min(
        fewest,
        max(
            MIN_ROWS_PER_STEP,
            args.train_batch_size * args.gradient_accumulation_steps,
        ),
    )
    num_steps = fewest // size
    asked = math.ceil(args.max_steps / num_steps if args.max_steps > 0 else args.num_train_epochs)
    epochs = min(asked, max(MIN_EPOCHS, MAX_ROWS_READ // fewest))
    groups = [
        {"params": [*stack.weights], "weight_decay": args.weight_decay},
        {"params": [*stack.biases], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate * rate, fused=True)
    total = num_steps * epochs
    schedule = get_linear_schedule_with_warmup(optimizer, int(WARMUP * total), total)
    lowest = math.inf
    best = stack.state_dict()
    scored = _score_unseen(stack, inputs, objective, folds)
    is_large = size * max(weight[0].numel() for weight in stack.weights) >= MIN_PRODUCTS
    is_fast = is_large and detect_hardware(device).native_bf16
    waited = 0
    while waited < IDLE_EPOCHS and epochs > 0 and not stop.is_set():
        epochs -= 1
        waited += 1
        stack.train()
        orders = []
        for rows in (rows for rows in seen for _ in range(num_seeds)):
            order = torch.randperm(len(rows), generator=stack.generator, device=device)
            orders.append(rows.to(device)[order[: num_steps * size]])
        for chosen in torch.stack(orders).split(size, dim=1):
            with torch.autocast(device.type, torch.bfloat16, is_fast):
                outputs = stack(inputs[chosen])
            objective.loss(outputs.float(), chosen).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        unseen = _score_unseen(stack, inputs, objective, folds)
        error = float(objective.errors(unseen, held_out))
        if error < lowest:
            waited = 0
            lowest = error
            scored = unseen
            best = {name: value.clone() for name, value in stack.state_dict().items()}
    stack.load_state_dict(best)
    stack.generator = None
    stack.eval().cpu().scale_outputs(objective.scale, objective.shift)
    return scored


@torch.no_grad()
def adopt_network(model: AffinityModel, stack: NetworkStack) -> None:
    """Gives the head of `model` the first network of a stack of its sizes, which then puts out what that does."""
    last = None
    weights = iter(zip(stack.weights, stack.biases))
    for layer in model.head.layers.children():
        if isinstance(layer, nn.Linear):
            weight, bias = next(weights)
            layer.weight.copy_(weight[0].T)
            layer.bias.copy_(bias[0, 0])
            last = layer
        elif isinstance(layer, nn.LayerNorm):
            layer.reset_parameters()
    if last is not None:  # of classes mean and deviation are 0 and 1
        last.bias.sub_(model.config.label_mean).div_(model.config.label_std)
        last.weight.div_(model.config.label_std)


@torch.no_grad()
def _score_unseen(stack: NetworkStack, inputs: Tensor, objective: Objective, folds: Folds) -> FloatArray:
    """Predicts rows of each fold by the mean over seeds of its networks, as `objective.entries`, fold after fold."""
    stack.eval()
    longest = max(map(len, folds))
    num_seeds = len(stack.weights[0]) // len(folds)
    padded = torch.from_numpy(np.stack([np.resize(fold, longest) for fold in folds for _ in range(num_seeds)]))
    means = []
    for rows in padded.to(inputs.device).split(EVALUATED_ROWS, dim=1):
        outputs = stack(inputs[rows]) * objective.scale + objective.shift
        outputs = LINKS[objective.link](outputs)
        means.append(outputs.unflatten(0, (len(folds), num_seeds)).mean(1).cpu())
    predicted = torch.cat(means, dim=1).numpy()
    return np.concatenate([objective.entries(one[: len(fold)], fold) for one, fold in zip(predicted, folds)])
