"""The most rows of a pass that fit: counted by the memory ledger, confirmed by a step that is taken and undone."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ...data import count_tokens, kept_random_states
from ...errors import SMALLER_STEP, DataError, MemoryExhausted
from ...memory import DidNotFit, MemoryModel, attempt, report_memory
from ...processes import Team
from ...speedups import collate, modes_kept
from ..host import Host
from ..run_plan import PlannedRun

MOST_ROWS = 128  # that are looked for, unless the user gave more
MUCH_GIB = 2**20  # where a device does not say what it has
NAME = "find_batch_size"

logger = logging.getLogger(__name__)


def find_batch_size(trainer: Host, planned: PlannedRun, team: Team, folder: str | None) -> None:
    """Sets rows of a pass to the most that fit on every process, and passes so that a step keeps its rows.

    Rows are divisors of those of a step. The ledger says which fit, and the largest of these makes one real step on
    the longest rows: forward and backward beside the optimizer's bytes; on CUDA its peak must fit, too. Weights,
    gradients, modes, buffers and random states are afterwards as before. A continued run takes what its checkpoint's
    run had. Does nothing where the plan says so.

    Args:
        folder: of the checkpoint that the run continues from; None for a new one.

    Raises:
        MemoryExhausted: not even one row fits.

    Cost: a forward and backward pass without memory, and as a rule one with.
    """
    if not planned.applied(NAME):
        return
    args = trainer.args
    given = args.per_device_train_batch_size
    whole = given * args.gradient_accumulation_steps
    sizes = [size for size in range(max(MOST_ROWS, given), 0, -1) if whole % size == 0]
    rows = TrainerState.load_from_json(f"{folder}/{TRAINER_STATE_NAME}").train_batch_size if folder else None
    if rows not in sizes:
        with kept_random_states(), modes_kept(trainer.model):
            rows = _search(trainer, planned, team, sizes)
    args.per_device_train_batch_size = trainer._train_batch_size = rows
    args.gradient_accumulation_steps = whole // rows
    planned.record(NAME, rows=rows, passes=whole // rows)
    if team.is_main:
        logger.warning("find_batch_size: %d rows at a time, %d passes a step.", rows, whole // rows)


def _search(trainer: Host, planned: PlannedRun, team: Team, sizes: list[int]) -> int:
    args = trainer.args
    dataset = trainer.train_dataset
    collator = trainer.data_collator
    try:
        tokens = count_tokens(dataset, collator, args.length_column_name)
    except DataError:  # of images and the like, whose rows are taken to be alike
        tokens = np.zeros((len(dataset), 1))
    # A batch is as wide as the longest row of each input, which come first.
    order = [*tokens.argmax(0), *np.argsort(-tokens.sum(1), kind="stable")]

    def make(rows: int, numbers: Any = order[: tokens.shape[1]]) -> Any:
        return collate(trainer.model, collator, args, [dataset[int(i)] for i in np.resize(numbers, rows)])

    if planned.run.padding is not None:  # what it noted is no part of the model
        planned.run.padding.forget()
    hardware = planned.plan.hardware
    capacity = int((hardware.memory_gib or MUCH_GIB) * 2**30)
    if hardware.kind == "cpu":
        capacity = min(capacity, psutil.virtual_memory().available) // args.world_size
    costs = replace(planned.plan.count_costs(args), passes=2)
    change = partial(planned.plan.speed_up_traced, costs=costs)
    memory = MemoryModel(trainer.model, make, hardware.kind, change, sends_gradients=args.world_size > 1)
    report = report_memory(memory, costs, 0, capacity)
    beside = report.forecast.optimizer + report.forecast.buckets
    room = report.room or 0
    planned.record(NAME, room_bytes=room, predicted_rows=report.largest)
    # Of a model that does not compute without values the ledger knows too little for more rows than were asked for.
    largest = args.per_device_train_batch_size if report.largest is None else report.largest
    for rows in sizes:
        fits = rows <= largest
        try:
            fits = fits and attempt(partial(_step, trainer, make(rows, order), beside)) <= room
        except DidNotFit:
            fits = False
        if not team.agree([not fits])[0]:
            return rows
    raise MemoryExhausted(f"find_batch_size: not even one of the longest rows fits. {SMALLER_STEP}")


def _step(trainer: Host, batch: Any, num_bytes: int) -> int:
    """Takes two passes beside `num_bytes` that are taken up; returns the peak in bytes on CUDA, elsewhere 0."""
    device = trainer.args.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    room = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    trainer.current_gradient_accumulation_steps = 2
    try:
        with trainer.accelerator.autocast():
            for _ in range(2):  # gradients are there in the second
                trainer.training_step(trainer.model, batch, room.new_ones(()))
    finally:
        trainer.model.zero_grad()
    return torch.cuda.max_memory_allocated()  # 0 where it was never used
