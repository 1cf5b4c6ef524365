"""Batches of an evaluation in parts, where memory does not suffice for all of their rows at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from transformers.trainer_pt_utils import nested_concat

from ..checkpoints.state.rng import capture_rng, restore_rng
from ..data.batch_parts import copy_batch, count_rows, cut_batch
from ..errors import MemoryExhausted
from ..held import replaced
from ..models.exact_loss import count_items
from ..out_of_memory import DidNotFit, attempt
from ..training_args import FastTrainingArguments
from .planned import PlannedRun
from .rungs import ADVICE

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Outputs = tuple[Any, Any, Any]  # loss, logits and labels, as `Trainer.prediction_step` returns them


class EvaluationParts:
    """Computes batches of evaluations and predictions in parts once one was out of memory, where the plan says so.

    Raises (from `predict`):
        MemoryExhausted: one row does not fit, or batches cannot be cut.

    Args:
        args: of the run; `eval_accumulation_steps` is set where `loop` says.
        planned: the plan, whose decision `oom_ladder` says whether.

    Attributes:
        rows: most rows at a time, None for all. It is in checkpoints, and a continued run begins with it.
        num_items: while a batch is computed, a tuple with what its loss is divided by; it is counted once, over all
            processes, of which one may compute more parts than another.
    """

    name = "evaluation_parts"

    def __init__(self, args: FastTrainingArguments, planned: PlannedRun):
        self._args, self._is_on = args, planned.applied("oom_ladder")
        self.rows: int | None = None
        self.num_items: tuple[Any] | None = None

    def state(self) -> int | None:
        """For a checkpoint."""
        return self.rows

    def load(self, tree: int | None) -> None:
        """What `state` gave."""
        self.rows = tree

    def predict(self, batch: Any, compute: Callable[[Any], Outputs], count: Callable[[], Any]) -> Outputs:
        """What `compute` returns of `batch`, from its parts.

        Args:
            count: what the loss of the batch is divided by, over all processes, which all call it; None where each
                batch's is a mean of its own.
        """
        if not self._is_on:
            return compute(batch)
        number = count()
        with replaced(self, num_items=(number,)):
            return self._predict(batch, compute, is_summed=number is not None)

    def _predict(self, batch: Any, compute: Callable[[Any], Outputs], is_summed: bool) -> Outputs:
        while True:
            parts = (cut_batch(batch, self.rows, trims=False) if self.rows else None) or [batch]
            try:
                outputs = [attempt(partial(compute, copy_batch(part))) for part in parts]
                return join_outputs(outputs, None if is_summed else [_count_items(part) for part in parts])
            except DidNotFit as failure:
                self._halve(batch, max(count_rows(part) or 1 for part in parts), failure)

    def loop(self, evaluate: Callable[[], Result]) -> Result:
        """What `evaluate`, a whole pass, returns; again with predictions moved to the host batch by batch, if need be.

        Not of several processes, of which those that fit would wait for one that begins again; nor with
        `batch_eval_metrics`, which has counted some batches already. There the error is raised.
        """
        args = self._args
        is_moved = args.eval_accumulation_steps is not None
        if not self._is_on or is_moved or args.batch_eval_metrics or args.world_size > 1:
            return evaluate()
        rng = capture_rng(self._args.device)
        try:
            return attempt(evaluate)
        except DidNotFit as failure:
            logger.warning("Out of memory in an evaluation (%s): again with --eval_accumulation_steps 1.", failure)
        self._args.eval_accumulation_steps = 1
        restore_rng(rng)
        return evaluate()

    def _halve(self, batch: Any, rows: int, failure: DidNotFit) -> None:
        half = -(-rows // 2)
        if rows == 1 or cut_batch(batch, half) is None:
            raise MemoryExhausted(
                f"Out of memory in an evaluation ({failure}), with {rows} rows that cannot be cut. {ADVICE}"
            ) from None
        self.rows = half
        logger.warning("Out of memory in an evaluation (%s): from here on %d rows at a time.", failure, half)


def _count_items(part: Any) -> int:
    """What the loss of a batch is usually a mean over: its labels, or its rows where there are none."""
    labels = part.get("labels") if isinstance(part, Mapping) else None
    return int(count_items(labels)) if torch.is_tensor(labels) else count_rows(part) or 1


def join_outputs(outputs: Sequence[Outputs], num_items: Sequence[int] | None) -> Outputs:
    """What `Trainer.prediction_step` returns of all rows.

    Args:
        num_items: that the losses of the parts are means over; None where they add up to that of all.
    """
    if len(outputs) == 1:
        return outputs[0]
    losses, *others = zip(*outputs)
    loss = None
    if all(part is not None for part in losses):
        weights = [1.0] * len(losses) if num_items is None else [n / max(1, sum(num_items)) for n in num_items]
        loss = sum(part * weight for part, weight in zip(losses, weights))
    logits, labels = (_concatenate(parts) for parts in others)
    return loss, logits, labels


def _concatenate(parts: Sequence[Any]) -> Any:
    whole = parts[0]
    for part in parts[1:]:
        whole = None if whole is None else nested_concat(whole, part)
    return whole
