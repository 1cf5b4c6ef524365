"""The whole model on each process: one alone, DataParallel, DDP. And FSDP 1, whose files accelerate keeps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from ...speedups.ddp import search_again
from .base import Backend


class Replicated(Backend):
    """Carries out decision `ddp` of the plan where accelerate wraps the model."""

    def configure(self, model: nn.Module | None) -> None:
        """Has DDP keep gradients where they are sent from, which Trainer has no argument for."""
        if self._planned.applied("ddp"):
            self._accelerator.ddp_handler.gradient_as_bucket_view = True

    def preparing(self, model: nn.Module, own_loss: str | None) -> AbstractContextManager[None]:
        """Where DDP was not to look for unused weights, and the user's own loss was assigned after the plan."""
        if own_loss is not None and any(
            d.name == "ddp" and "watched" in d.evidence for d in self._planned.plan.decisions
        ):
            search_again(model, self._accelerator.ddp_handler)
            self._planned.plan.record("ddp", searches_again_for=own_loss)
        return nullcontext()


class Fsdp1(Backend):
    """Left to Trainer and accelerate, whose files checkpoints hold."""

    is_spread = True

    @property
    def written_by(self) -> str:
        """Accelerate."""
        return "FSDP 1"
