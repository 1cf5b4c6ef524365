"""The most rows at a time that fit in memory, found before training."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data.batching import count_tokens
from ..errors import SMALLER_STEP, ArgumentError, DataError, MemoryExhausted
from ..hardware import detect_hardware
from ..memory.out_of_memory import DidNotFit, attempt
from ..memory.stored import gradient_bytes, optimizer_bytes
from ..speedups.base import optimizer_name
from ..speedups.sample import modes_kept

RESERVE = 0.03  # of a card's memory, for what fragmentation loses while training

logger = logging.getLogger(__name__)


def find_batch_size(trainer: Any) -> None:
    """Sets the rows at a time to the most that fit on every process, and accumulation to what the step then takes.

    Forward and backward run on the longest rows: 1 on each process, then more, by the divisors of a step's rows, beside
    as many bytes as the optimizer and the exchange of gradients will take. Weights, gradients and modes are afterwards
    as before; random states are the caller's to keep.

    Raises:
        ArgumentError: the model normalises over batches.
        MemoryExhausted: not even one row fits.
    """
    args = trainer.args
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in trainer.model.modules()):
        raise ArgumentError(
            "find_batch_size: the model normalises over batches, so that it learns something else with others. Give "
            "--per_device_train_batch_size."
        )
    if not trainer.loss_counts_items():
        logger.warning(
            "find_batch_size: the loss of %s is not known to be a sum over the items of a step. If it is a mean over a "
            "batch, numbers change a little with the batch.",
            type(trainer.model).__name__,
        )
    trainer._ext_parts.embedder.begin()
    whole = args.per_device_train_batch_size * args.gradient_accumulation_steps
    rows, beside = _longest_rows(trainer, whole), _bytes_beside(trainer)
    found, problem, tried = 0, "", []
    for size in (size for size in range(1, whole + 1) if whole % size == 0):
        try:
            # Twice where a step takes several: gradients are then there while activations are kept.
            attempt(partial(_try_rows, trainer, rows[:size], min(2, whole // size), beside))
        except DidNotFit as failure:
            problem = str(failure)
        fits = not trainer._ext_team.agree([bool(problem)])[0]
        problem = problem or ("" if fits else "out of memory on another process")
        tried.append({"size": size, "fits": fits})
        if args.process_index == 0:
            said = "fits" if fits else f"does not fit ({problem})"
            logger.warning("find_batch_size: %d rows at a time: %s", size, said)
        if not fits:
            break
        found = size
    if not found:
        raise MemoryExhausted(f"There is no room for one of the longest rows ({problem}). {SMALLER_STEP}")
    args.per_device_train_batch_size, args.gradient_accumulation_steps = found, whole // found
    trainer._train_batch_size = args.train_batch_size
    trainer._ext_planned.record("find_batch_size", rows=found, passes=whole // found, tried=tried)


def _longest_rows(trainer: Any, number: int) -> list[int]:
    """Rows of the training data, the one with the longest of each input first: padded batches are as wide as that."""
    dataset = trainer.train_dataset
    try:
        tokens = count_tokens(dataset, trainer.data_collator, trainer.args.length_column_name)  # (rows, inputs)
    except DataError:
        logger.warning("find_batch_size: lengths of rows are not known, so the first rows stand for the longest.")
        tokens = np.ones((len(dataset), 1), np.int64)
    longest_first = np.argsort(-tokens.sum(1), kind="stable")
    rows = [*dict.fromkeys([*tokens.argmax(0).tolist(), *longest_first.tolist()])]
    return rows + [rows[0]] * (number - len(rows))  # of fewer rows than that, the longest stands in


def _try_rows(trainer: Any, rows: list[int], num_passes: int, num_bytes: int) -> None:
    """Forward and backward on these rows, that often, beside `num_bytes` that are taken up."""
    model, device = trainer.model, trainer.args.device
    room = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    # Counting items over processes would leave those that fit waiting for one that does not.
    num_items = torch.ones((), device=device)
    with modes_kept(model):
        model.train()
        try:
            batch = _make_batch(trainer, rows)
            for _ in range(num_passes):
                with trainer.accelerator.autocast(), trainer.compute_loss_context_manager():
                    loss = trainer.compute_loss(model, copy.copy(batch), num_items_in_batch=num_items)
                trainer.accelerator.backward(loss)
        finally:
            del room
            model.zero_grad(set_to_none=True)


def _bytes_beside(trainer: Any) -> int:
    """Bytes that a training step holds on the device beside weights, gradients and activations."""
    model, args, planned = trainer.model, trainer.args, trainer._ext_planned
    states, _ = optimizer_bytes(model, optimizer_name(args), planned.applied("muon"))
    beside = 0 if planned.applied("cpu_offload") else states
    if args.world_size > 1:  # DistributedDataParallel's copy of every gradient
        beside += gradient_bytes(model)
    memory_gib = detect_hardware(args.device).memory_gib if torch.device(args.device).type == "cuda" else 0.0
    return int(beside + RESERVE * (memory_gib or 0.0) * 2**30)


def _make_batch(trainer: Any, rows: Sequence[int]) -> Any:
    """A batch of these rows of the training data, as a loader would make it."""
    dataset: Any = trainer.train_dataset
    if trainer._ext_parts.embedder.is_on:
        dataset = trainer.embed_dataset(dataset)
    fetch = getattr(dataset, "__getitems__", None)
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
    return trainer._prepare_inputs(collate(fetch([*rows]) if fetch else [dataset[row] for row in rows]))
