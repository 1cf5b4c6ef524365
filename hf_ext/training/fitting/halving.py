"""A step that was out of memory is made again with half the rows at a time, and so are those after it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from accelerate.utils import find_batch_size, gather_object
from torch import Tensor, nn
from transformers import TrainerCallback

from ...data import RepeatedRows, capture_random_states, cut_batch, kept_random_states
from ...errors import SMALLER_STEP, MemoryExhausted
from ...memory import DidNotFit, attempt, tensors_in
from ...speedups import GRAPHS
from ..backends import Backend
from ..host import Host
from ..losses import Losses

PARTS = "batch_parts"  # in the log: how many parts each batch is computed in from there on
MANY = 1 << 30  # parts: of one row each

logger = logging.getLogger(__name__)

Compute = Callable[[Any], Tensor]


class Halving(TrainerCallback):
    """Makes an optimizer step that was out of memory again, with half the rows at a time; later steps stay there.

    All its micro-batches are computed again from the random states before them, since the one that failed may have
    added to gradients. Parts of a batch add up to its gradient where the loss is a sum over the items of the step;
    elsewhere, with CUDA graphs, and where weights are sharded, the error goes its way. Dropout draws other numbers for
    parts.

    On several processes (DDP) the one that was out of memory repeats its step alone, while others wait for its
    gradients: what may fail is computed without sending, and a pass of one row whose loss counts nothing then sends.
    What may fail is a batch larger than all that fitted since the optimizer has its states; with any other one
    gradients are sent while they are computed, and an error goes its way. After the step all cut batches alike.

    Raises (from `compute`):
        MemoryExhausted: one row does not fit, or the batch cannot be cut.

    Cost: random states once per optimizer step; on several processes a row more for each batch that may fail, and for
    each step once batches are cut.

    Attributes:
        parts: that batches are computed in. is_new: whether this process changed it in the step at hand.
    """

    def __init__(self, trainer: Host, backend: Backend, losses: Losses):
        self._trainer = trainer
        self._backend = backend
        self._losses = losses

    def on_train_begin(self, *event: object, model: Any = None, **kwargs: object) -> None:
        """Goes on as the run was that a checkpoint is of."""
        args = self._trainer.args
        state = self._trainer.state
        self.parts = max((int(entry[PARTS]) for entry in state.log_history if PARTS in entry), default=1)
        self._first_step = state.global_step
        self._largest = 0  # numbers of a batch that fits
        needs_batch = getattr(getattr(model, "config", None), "loss", None) == "ranking"  # which compares its rows
        needs_batch |= any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())
        adds_once = args.compile_mode in GRAPHS  # whose gradients of several passes torch adds up wrongly
        self._is_on = not (needs_batch or adds_once or self._backend.is_sharded or args.auto_find_batch_size)

    def on_step_begin(self, *event: object, **kwargs: object) -> None:
        """Forgets the step before."""
        self._batches: list[Any] = []
        self.is_new = False

    def compute(self, model: Any, batch: Any, compute: Compute) -> Tensor:
        """Computes the loss of one micro-batch, and adds to gradients.

        Args:
            model: as Trainer wrapped it. compute: does so with a batch or a part of it.
        """
        sends = getattr(model, "require_backward_grad_sync", False)  # of DDP, in the last pass of a step
        size = sum(tensor.numel() for tensor in tensors_in(batch)) if sends else 0
        fits = sends and self.parts == 1 and size <= self._largest
        if fits or not (self._is_on and self._losses.counts_items()):
            return compute(batch)
        if not self._batches:
            self._restore = capture_random_states()  # takes 50 us
        self._batches.append(batch)
        with self._trainer.accelerator.no_sync(model):
            loss = self._repeat(model, compute)
        if sends:
            if self._trainer.state.global_step > self._first_step:
                self._largest = size
            with kept_random_states():
                compute(RepeatedRows(cut_batch(batch, MANY)[0]))
        return loss

    def _repeat(self, model: Any, compute: Compute) -> Tensor:
        """Computes the last micro-batch so far; all of them, in more parts each time, where that is out of memory."""
        due = self._batches[-1:]
        while True:
            try:
                return attempt(partial(self._pass, due, compute))
            except DidNotFit as failure:
                self._halve(failure)
            if hasattr(model, "require_forward_param_sync"):  # buffers were sent, which others do once a step
                model.require_forward_param_sync = False
            model.zero_grad()
            self._restore()
            due = self._batches

    def _pass(self, batches: list[Any], compute: Compute) -> Any:
        """Returns the loss of the last of them."""
        return [sum(map(compute, cut_batch(batch, self.parts))) for batch in batches][-1]

    def _halve(self, problem: DidNotFit) -> None:
        step = self._trainer.state.global_step + 1
        before, now = ([cut_batch(batch, parts) for batch in self._batches] for parts in (self.parts, 2 * self.parts))
        if sum(map(len, before)) == sum(map(len, now)):
            text = f"Step {step} does not fit with the fewest rows at a time that its batches can be cut into"
            raise MemoryExhausted(f"{text} ({problem}). {SMALLER_STEP}")
        self.parts *= 2
        self.is_new = True
        logger.warning(
            "Out of memory in step %d (%s): it is made again with %d rows at a time in place of %d, and so are those "
            "after it. Each step has the rows that it had.",
            *(step, problem, find_batch_size(now[0][0]), find_batch_size(before[0][0])),
        )

    def share(self) -> None:
        """Has every process compute in as many parts as the one with most, and writes it down; all of them call it."""
        self.parts = max(gather_object([self.parts]))
        self._trainer.log({PARTS: self.parts})
