"""What depends on how processes hold a model, with the answers for one that is whole on each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ...checkpoints.retention import Sizes


class Backend:
    """The whole model on each process: one alone, DataParallel, DDP. And FSDP 1, which is left to accelerate.

    Attributes:
        is_zero: whether it is DeepSpeed, which steps inside the last backward pass.
        has_own_loss_scale: whether a library steps with a loss scale of its own, which no `GradScaler` shows.
    """

    is_zero = False
    has_own_loss_scale = False

    def __init__(self, trainer: Any):
        self._trainer = trainer

    @property
    def is_spread(self) -> bool:
        """Whether a process may hold no more than its part of the model: a library then writes weights and optimizer
        into checkpoints, in files that it alone reads.
        """
        return bool(self._trainer.is_fsdp_enabled)

    @property
    def written_by(self) -> str:
        """What writes weights and states into checkpoints, and alone can read them."""
        return "FSDP 1" if self.is_spread else "Trainer"

    # --- before training --------------------------------------------------------------------------------------------

    def configure(self) -> None:
        """Sets what Trainer has no argument for, in the Accelerator at hand, before that wraps a model."""
        if self._trainer._ext_planned.applied("ddp"):
            self._trainer.accelerator.ddp_handler.gradient_as_bucket_view = True

    def begin_preparing(self) -> None:
        """Before there is an optimizer, and accelerate wraps it and the model for training."""
        self.configure()  # each trial of a search has an Accelerator of its own

    # --- computing --------------------------------------------------------------------------------------------------

    def carry_not_finite(self, loss: Any, is_training: bool) -> Any:
        """A training loss whose gradients are not finite either, if it is not."""
        return loss

    def prepare_to_evaluate(self, model: nn.Module, make_optimizer: Callable[[], Any]) -> tuple[nn.Module, Any] | None:
        """Model and optimizer as accelerate prepares them, where evaluating needs that and training has not begun."""
        return None

    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around an evaluation of the model."""
        return nullcontext()

    def encoding(self, model: nn.Module) -> AbstractContextManager[None]:
        """Encoders can be called by themselves in here, by all processes equally often."""
        return nullcontext()

    # --- saving -----------------------------------------------------------------------------------------------------

    def whole_weights(self) -> dict[str, torch.Tensor] | None:
        """The whole state dict, gathered; None where the model at hand has it. All processes call it."""
        return self._trainer.accelerator.get_state_dict(self._trainer.model) if self.is_spread else None

    def checkpoint_sizes(self, model: nn.Module, small_bytes: int) -> Sizes | None:
        """Upper bounds of what one checkpoint takes, `small_bytes` of it for what is neither weights nor optimizer.

        None where the files are ours, and their writers can be asked.
        """
        return None
