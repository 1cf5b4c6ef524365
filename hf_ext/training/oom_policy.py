"""A step for which memory does not suffice, made again with less at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ..data.batch_cutting import copy_batch, count_rows, cut_batch
from ..data.random_states import States, capture_rng, restore_rng
from ..errors import MemoryExhausted
from ..memory.out_of_memory import DidNotFit, attempt

SMALLER_BATCH = (
    "Begin anew with fewer rows at a time and as many per step: half of --per_device_train_batch_size and twice "
    "--gradient_accumulation_steps. "
)
ADVICE = (
    "What would help changes numbers or learning, so it is yours to choose, for a run that begins anew: --optim "
    "adamw_8bit, --use_peft, --max_residues, a smaller model; "
    "--activation_checkpointing true changes neither. Where there is more room, the same command with --resume auto "
    "goes on from the last checkpoint."
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
