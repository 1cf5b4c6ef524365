"""Where memory does not suffice: the most rows that fit, found before training; a step that did not fit, made again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback

from ..data.batch_cutting import copy_batch, count_rows, cut_batch
from ..data.batching import count_tokens
from ..data.random_states import States, capture_rng, restore_rng
from ..errors import ArgumentError, DataError, MemoryExhausted
from ..hardware import detect_hardware
from ..memory.out_of_memory import DidNotFit, attempt
from ..memory.stored import gradient_bytes, optimizer_bytes
from ..speedups.base import optimizer_name
from ..speedups.sample import modes_kept

RESERVE = 0.03  # of a card's memory, for what fragmentation loses while training
SMALLER_BATCH = (
    "Begin anew with fewer rows at a time and as many per step: --speedups all find_batch_size (not where weights are "
    "split over processes), or half of --per_device_train_batch_size and twice --gradient_accumulation_steps. "
)
ADVICE = (
    "What would help changes numbers or learning, so it is yours to choose, for a run that begins anew: --optim "
    "adamw_8bit, --use_peft (with --load_in_8bit or --load_in_4bit), --max_residues, a smaller model; "
    "--activation_policy attention changes neither. Where there is more room, the same command with --resume auto goes "
    "on from the last checkpoint."
)

logger = logging.getLogger(__name__)


class OomPolicy(TrainerCallback):
    """Carries out `oom_policy`: "step_down" makes an optimizer step that was out of memory again, with less at a time.

    All its micro-batches are computed again, since the one that failed may have added to gradients, from the same
    random states: in parts of half as many rows, down to one. Later steps stay there. Parts add up to the same gradient
    only where the loss is a sum over the items of the step.

    Raises (from `compute`):
        MemoryExhausted: nothing is left that leaves learning as it is. At once where the plan skipped the policy
            (several processes, of which those that have room would wait), where the loss is no such sum, and of a model
            that normalises over batches, since the pass that failed has counted in its running means already.

    Cost: random states once per optimizer step; nothing else until memory does not suffice.

    Attributes:
        is_on: whether running out of memory is answered at all.
        rows: most rows computed at a time; None for whole batches.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._can_repeat = trainer._ext_planned.applied("oom_ladder")
        decisions = {decision.name: decision.status for decision in trainer.plan.decisions}
        is_skipped = decisions.get("oom_ladder") == "skipped" and not trainer.args.auto_find_batch_size
        self.is_on = self._can_repeat or is_skipped
        self.rows: int | None = None
        self._batches: list[Any] = []  # of the optimizer step at hand; and what was before the first of them
        self._rng: States = []
        self._loss_before: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first micro-batch of a step comes next."""
        self._batches = []

    def compute(self, batch: Any, compute: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The loss of one micro-batch, after forward and backward; those before it are computed again where needed.

        Args:
            compute: forward and backward of a batch, which adds to gradients; its loss.
        """
        if not self.is_on:
            return compute(batch)
        trainer = self._trainer
        if not self._batches:
            self._rng, self._loss_before = capture_rng(trainer.args.device), trainer._tr_loss.detach().clone()
        self._batches.append(batch)
        try:
            return attempt(partial(self._pass, batch, compute))
        except DidNotFit as failure:
            problem = str(failure)
        while True:
            self._take_fewer(problem)
            trainer.model.zero_grad(set_to_none=True)
            restore_rng(self._rng)
            trainer.throughput.begin_again()
            try:
                *before, loss = [attempt(partial(self._pass, batch, compute)) for batch in self._batches]
                break
            except DidNotFit as failure:
                problem = str(failure)
        trainer._ext_parts.nan_guard.losses = before
        trainer._tr_loss.copy_(sum(before, start=self._loss_before))
        return loss

    def _pass(self, batch: Any, compute: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        parts = cut_batch(batch, self.rows) if self.rows else None
        first, *others = parts or [copy_batch(batch)]  # what is computed takes entries out
        return sum(map(compute, others), start=compute(first))

    def _take_fewer(self, problem: str) -> None:
        """Half as many rows at a time; MemoryExhausted where that would learn something else, or there is one."""
        trainer, step = self._trainer, self._trainer.state.global_step + 1
        at_a_time = min(self.rows or 1 << 62, max(count_rows(batch) or 1 for batch in self._batches))
        half = -(-at_a_time // 2)
        can_repeat = self._can_repeat and trainer.loss_counts_items() and not normalises_over_batches(trainer.model)
        if not can_repeat or half == at_a_time or not any(cut_batch(batch, half) for batch in self._batches):
            advice = ADVICE if self._can_repeat else SMALLER_BATCH + ADVICE
            raise MemoryExhausted(
                f"Out of memory in step {step} ({problem}), with {_describe(self.rows)}: nothing is left to try that "
                f"leaves learning as it is. {advice}"
            )
        self.rows = half
        logger.warning(
            "Out of memory in step %d (%s). The step is made again, and those after it, with %s; the rows of a step "
            "and learning stay the same.",
            *(step, problem, _describe(half)),
        )
        taken = trainer.plan["oom_ladder"].evidence.get("taken", [])
        trainer._ext_planned.record("oom_ladder", taken=[*taken, {"step": step, "rung": _describe(half)}])


def _describe(rows: int | None) -> str:
    return f"{rows} row{'s' if rows > 1 else ''} at a time" if rows else "whole batches"


def normalises_over_batches(model: nn.Module) -> bool:
    """Whether a row's numbers depend on the others of its batch."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())


# --- before training ------------------------------------------------------------------------------------------------


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
    if normalises_over_batches(trainer.model):
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
        raise MemoryExhausted(f"There is no room for one of the longest rows ({problem}). {ADVICE}")
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
                    loss = trainer.compute_loss(model, copy_batch(batch), num_items_in_batch=num_items)
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
