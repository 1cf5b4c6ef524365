"""A step for which memory does not suffice is made again, from the same state, one rung lower."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from ..checkpoints.state.rng import capture_rng, restore_rng
from ..data.batch_parts import copy_batch, count_rows, cut_batch
from ..errors import ArgumentError, MemoryExhausted
from ..models.activation_checkpointing import recomputed_layers, set_policy, unset_policy
from ..models.host_optimizer import find_host_optimizer, move_to_host
from ..out_of_memory import DidNotFit, attempt
from ..training_args import FastTrainingArguments
from .gradient_mean import average_gradients
from .now import Training
from .planned import PlannedRun
from .rungs import ADVICE, BATCH_NORMS, Rung, find_depth, make_rungs, rows_each
from .team import Team

logger = logging.getLogger(__name__)

Compute = Callable[[Any], torch.Tensor]


@dataclass
class Cycle:
    """The micro-batches of one optimizer step, and what was before the first of them.

    Attributes:
        rng: random states; `loss`: the sum of losses since the last log.
    """

    rng: dict[str, Any]
    loss: torch.Tensor
    batches: list[Any] = field(default_factory=list)


class Ladder(TrainerCallback):
    """Carries out `oom_policy`: "step_down" repeats what was out of memory, with the same rows and random numbers.

    Of an optimizer step, all micro-batches are computed again, since the failed one may have added to gradients. On
    several processes all take the same rung, and compute the step again on it: gradients are then averaged after the
    backward pass instead of during it, because a process that failed in the midst of that leaves the others waiting.

    Raises (from `compute`):
        MemoryExhausted: nothing is left that leaves learning as it is; on all processes.

    Cost: random states once per optimizer step; nothing else until memory does not suffice.

    Args:
        planned: the plan, whose decision `oom_ladder` says whether and how.

    Attributes:
        depth: the rung that the run is on, 0 at the top. It is in checkpoints, and a continued run begins there.
    """

    name = "memory_ladder"

    def __init__(self, args: FastTrainingArguments, team: Team, planned: PlannedRun):
        self._args, self._team, self._planned = args, team, planned
        self.is_on = planned.applied("oom_ladder")
        self.depth = 0
        self._rungs = [Rung("top")]
        self._stored: dict[str, Any] | None = None
        self._cycle: Cycle | None = None
        self._taken: list[dict[str, Any]] = []
        self._is_exhausted = ""

    # --- a run ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint."""
        return self.rung.state() if self.depth else self._stored

    def load(self, tree: dict[str, Any] | None) -> None:
        """What `state` gave; `begin` acts on it."""
        self._stored = tree

    def begin(self, now: Training, counts_items: bool) -> None:
        """Training begins: on the rung on which the checkpoint was written.

        Args:
            counts_items: whether the loss is a sum over items, so that parts of a batch add up to it.
        """
        self._cycle, self.depth, self._is_exhausted = None, 0, ""
        if not self.is_on:
            return
        varies, on_card = self._planned.applied("token_budget"), torch.device(self._args.device).type != "cpu"
        rows = None if varies else self._args.per_device_train_batch_size
        # A pass that failed has counted its batch in the statistics already: such a step cannot be made again.
        if any(isinstance(part, BATCH_NORMS) for part in now.model.modules()):
            self._rungs = [Rung("top")]
        else:
            self._rungs = make_rungs(rows, cuts=counts_items, recomputes=True, to_host=on_card)
        for _ in range(find_depth(self._rungs, self._stored)):
            self._go_down(now)
        if self.depth:
            logger.warning("Continues as its checkpoint was written, for want of memory: %s.", self.rung.text)

    @property
    def rung(self) -> Rung:
        """The rung that the run is on."""
        return self._rungs[self.depth]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first micro-batch of a step comes next."""
        self._cycle = None

    # --- forward and backward ---------------------------------------------------------------------------------------

    def compute(
        self, batch: Any, compute: Compute, now: Training, running_loss: torch.Tensor, begin_again: Callable[[], None]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Forward and backward of one micro-batch, and where memory does not suffice, of those before it again.

        Args:
            compute: forward and backward of a batch, which adds to gradients; its loss.
            running_loss: to which Trainer adds, in place, what this returns.
            begin_again: forgets what was counted of this step.

        Returns:
            The loss of the micro-batch; and those of the step's micro-batches before it, where they were computed
            again: `running_loss` has them already.
        """
        if self._cycle is None:
            self._cycle = Cycle(capture_rng(self._args.device), running_loss.detach().clone())
        self._cycle.batches.append(batch)
        is_last, spread = now.accelerator.sync_gradients, self._team.size > 1
        if self._is_exhausted and not is_last:
            return torch.zeros_like(running_loss), []
        again = partial(self._compute_again, compute, now, running_loss, begin_again, is_last)
        losses: list[torch.Tensor] = []
        if not self._is_exhausted:
            try:
                work = partial(self._pass, batch, compute, now, syncs=is_last and not spread)
                losses = [attempt(work)]
            except DidNotFit as failure:
                losses = again(failure)
        if spread and is_last:
            losses = self._agree(losses, again)
            average_gradients(now.model, self._team.size)
        if is_last:
            self._cycle = None
        return losses[-1], losses[:-1]

    def _pass(self, batch: Any, compute: Compute, now: Training, syncs: bool) -> torch.Tensor:
        """One micro-batch, in the parts that the rung says; `syncs`: its gradients complete the step."""
        num_rows = count_rows(batch)
        parts = cut_batch(batch, rows_each(self._rungs, self.depth, num_rows)) if self.depth and num_rows else None
        total: Any = None
        parts = parts or [copy_batch(batch)]  # what is computed takes entries out
        for i, part in enumerate(parts):
            if syncs and i == len(parts) - 1:
                loss = compute(part)
            else:
                with _alone(now):
                    loss = compute(part)
            total = loss if total is None else total + loss
        return total

    def _compute_again(
        self,
        compute: Compute,
        now: Training,
        running_loss: torch.Tensor,
        begin_again: Callable[[], None],
        is_last: bool,
        failure: DidNotFit | None,
        depth: int | None = None,
    ) -> list[torch.Tensor]:
        """All micro-batches so far, one rung lower or on the rung at `depth`, until they fit; their losses."""
        cycle = self._cycle
        assert cycle is not None
        while True:
            if depth is None:
                largest = max(count_rows(batch) or 1 for batch in cycle.batches)
                self._step_down(now, "forward and backward", str(failure), largest)
            else:
                while self.depth < depth:
                    self._go_down(now)
                self._note(now, "on another process", "it was out of memory")
            if self._is_exhausted:
                return [torch.zeros_like(running_loss) for _ in cycle.batches]
            depth = None
            now.model.zero_grad(set_to_none=True)
            restore_rng(cycle.rng)
            begin_again()
            syncs = is_last and self._team.size == 1
            try:
                losses = [
                    attempt(partial(self._pass, batch, compute, now, syncs and i == len(cycle.batches) - 1))
                    for i, batch in enumerate(cycle.batches)
                ]
            except DidNotFit as again:
                failure = again
                continue
            running_loss.copy_(cycle.loss)
            for loss in losses[:-1]:
                running_loss += loss
            return losses

    def _agree(self, losses: list[torch.Tensor], again: Callable[..., list[torch.Tensor]]) -> list[torch.Tensor]:
        """Until all processes have computed the step on one rung; on all of them, or raises on all."""
        while True:
            is_deeper = [self.depth >= depth for depth in range(1, len(self._rungs))]
            *deeper, exhausted = self._team.agree([*is_deeper, bool(self._is_exhausted)])
            if exhausted:
                raise MemoryExhausted(self._is_exhausted or f"Another process is out of memory. {ADVICE}")
            deepest = sum(deeper)
            is_short = self._team.agree([self.depth < deepest])[0]
            if not is_short:
                return losses
            if self.depth < deepest:
                losses = again(None, deepest)

    # --- stepping down ----------------------------------------------------------------------------------------------

    def _step_down(self, now: Training, where: str, said: str, num_rows: int) -> None:
        """Takes the next rung that changes something for a batch of `num_rows`.

        Raises:
            MemoryExhausted: there is none; of several processes, each only notes it until all agree.
        """
        before = rows_each(self._rungs, self.depth, num_rows)
        while self.depth + 1 < len(self._rungs):
            changes = self._go_down(now)
            if changes or rows_each(self._rungs, self.depth, num_rows) < before:
                self._note(now, where, said)
                return
        problem = f"Out of memory in step {now.state.global_step + 1} ({where}: {said}), on the last rung"
        self._is_exhausted = f"{problem}, {self.rung.text}. {ADVICE}"
        if self._team.size == 1:
            raise MemoryExhausted(self._is_exhausted)

    def _go_down(self, now: Training) -> bool:
        """Takes the next rung; whether that changes something beside the rows at a time."""
        self.depth += 1
        if self.rung.kind == "host":
            return self._move(now.optimizer)
        return self.rung.kind == "recompute" and self._recompute(now.model)

    def _recompute(self, model: Any) -> bool:
        if recomputed_layers(model):  # by the user's own word
            return False
        self._planned.run.on_end(partial(unset_policy, model))
        return set_policy(model, "attention", self._args.block_pattern) > 0

    def _move(self, optimizer: Any) -> bool:
        if find_host_optimizer(optimizer) is not None:
            return False
        try:
            move_to_host(optimizer)
        except ArgumentError:  # of a library, with kernels of its own
            return False
        return True

    def relieve(self, optimizer: Any) -> bool:
        """Makes room for the optimizer's step, which fewer rows would not; whether there was a way.

        For one process or several, as each finds it: nothing waits in a step. It is not kept for a continued run, which
        finds out again.
        """
        return self._rungs[-1].kind == "host" and self._move(optimizer)

    def _note(self, now: Training, where: str, said: str) -> None:
        step = now.state.global_step + 1
        logger.warning(
            "Out of memory in step %d (%s: %s). The step is made again, and those after it, with %s; the rows of a "
            "step and learning stay the same.",
            *(step, where, said, self.rung.text),
        )
        self._taken.append({"step": step, "where": where, "rung": self.rung.text})
        self._planned.record("oom_ladder", rung=self.rung.text, taken=list(self._taken))


@contextmanager
def _alone(now: Training) -> Iterator[None]:
    """Forward and backward without a word to other processes, any of which may be out of memory in the midst of it."""
    wrapped = now.model_wrapped
    if isinstance(wrapped, DistributedDataParallel):
        # Else a forward pass that failed would send buffers, which are equal, once more than the others expect.
        wrapped.require_forward_param_sync = False
    with now.accelerator.no_sync(wrapped):
        yield
