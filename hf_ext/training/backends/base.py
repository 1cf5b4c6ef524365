"""What depends on how processes hold a model, with the answers for one that is whole on each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ...checkpoints.retention import Sizes
from ..planned import PlannedRun


class Backend:
    """One way to hold a model on the processes of a run; made with the run's `Accelerator`.

    Models, optimizers and schedules are handed over per call: Trainer replaces them while it runs.

    Attributes:
        is_spread: whether a process may hold no more than its part of the model: a library then writes weights and
            optimizer into checkpoints, in files that it alone reads.
        is_zero: whether that is DeepSpeed, which steps inside the last backward pass.
    """

    is_spread = False
    is_zero = False

    def __init__(self, args: Any, accelerator: Accelerator, planned: PlannedRun):
        self._args, self._planned = args, planned
        self.renew(accelerator)

    def renew(self, accelerator: Accelerator) -> None:
        """Goes on with another Accelerator of the same launch, such as that of a search's next trial."""
        self._accelerator = accelerator

    @property
    def written_by(self) -> str:
        """What writes weights and states into checkpoints, and alone can read them."""
        return "Trainer"

    # --- before training --------------------------------------------------------------------------------------------

    def configure(self, model: nn.Module | None) -> None:
        """Sets what Trainer has no argument for, before accelerate wraps a model. `model`: None for `model_init`."""

    def check_given(self, optimizer: Any, lr_scheduler: Any) -> None:
        """Raises ArgumentError where Trainer would drop the optimizer or schedule it was given."""

    def check_optimizer(self, optimizer: Any) -> None:
        """Raises ArgumentError for an optimizer that accelerate would silently replace."""

    def preparing(self, model: nn.Module, own_loss: str | None) -> AbstractContextManager[None]:
        """Around the preparation for training, in which accelerate wraps model and optimizer.

        Args:
            model: to be trained.
            own_loss: where the user's own loss comes from, by now; None without one.
        """
        return nullcontext()

    def finish_splitting(self, model: nn.Module, optimizer: Any) -> None:
        """As soon as accelerate has prepared both, before there is a schedule."""

    # --- computing --------------------------------------------------------------------------------------------------

    @property
    def has_own_loss_scale(self) -> bool:
        """Whether a library steps with a loss scale of its own, which no `GradScaler` shows."""
        return False

    def autocast(self) -> AbstractContextManager | None:
        """What forward passes run in, where Trainer's own would leave half precision out; None for Trainer's."""
        return None

    def carry_not_finite(self, loss: Any, is_training: bool) -> Any:
        """A training loss whose gradients are not finite either, if it is not."""
        return loss

    def forget_overflow(self, optimizer: Any) -> None:
        """Lets the schedule move on after a step that was left out."""

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

    def whole_weights(self, model: nn.Module) -> dict[str, torch.Tensor] | None:
        """The whole state dict, gathered; None where Trainer finds it itself. All processes call it."""
        return None

    def weights_to_save(self, state_dict: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        """What `_save` is to write of what Trainer hands it; None for the model's own state dict."""
        return state_dict

    def checkpoint_sizes(self, model: nn.Module, small_bytes: int) -> Sizes | None:
        """Upper bounds of what one checkpoint takes, `small_bytes` of it for what is neither weights nor optimizer.

        None where the files are ours, and their writers can be asked.
        """
        return None
