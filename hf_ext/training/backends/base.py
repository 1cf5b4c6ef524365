"""What depends on how processes hold a model, with the answers for one that is whole on each."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ...checkpoints.format.stored import Stored
from ...checkpoints.retention.budget import Sizes
from ...errors import CheckpointError
from ...zero import STATE_FACTS
from ..planned import PlannedRun

FROM_WEIGHTS = "or start a new run from its weights (model.safetensors in it; --model_name_or_path)"


class Backend:
    """One way to hold a model on the processes of a run; made with the run's `Accelerator`.

    Models, optimizers and schedules are handed over per call: Trainer replaces them while it runs.

    Attributes:
        is_spread: whether a process may hold no more than its part of the model.
        writes_parts: whether each process writes its part of weights and optimizer state into our checkpoints.
        keeps_library_files: whether checkpoints hold, beside our files, those of a library that alone can gather its
            state: pickles.
        loads_itself: whether weights and states of a checkpoint are loaded here, and not by Trainer.
    """

    is_spread = False
    writes_parts = False
    keeps_library_files = False
    loads_itself = False

    def __init__(self, args: Any, accelerator: Accelerator, planned: PlannedRun):
        self._args, self._planned = args, planned
        self.renew(accelerator)

    def renew(self, accelerator: Accelerator) -> None:
        """Goes on with another Accelerator of the same launch, such as that of a search's next trial."""
        self._accelerator = accelerator

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

    def take_out_spread(self, tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """An optimizer's tree without what is spread over processes, and that by name."""
        return tree, {}

    def write_parts(self, model: nn.Module, folder: Path, spread: dict[str, torch.Tensor]) -> None:
        """Writes this process's part of weights and optimizer state; all processes, where `writes_parts`."""

    def checkpoint_sizes(self, model: nn.Module, small_bytes: int) -> Sizes | None:
        """Upper bounds of what one checkpoint takes, `small_bytes` of it for what is neither weights nor optimizer.

        None where the files are ours, and their writers can be asked.
        """
        return None

    def write_state(self, folder: Path, model: nn.Module, engine: Any, lr_scheduler: Any) -> bool:
        """Writes weights, optimizer and schedule in the library's own way; False, nothing written, to have Trainer do.

        Args:
            folder: of the checkpoint, staged.
            model: as it trains; `engine`: what wraps it.
        """
        return False

    # --- resuming ---------------------------------------------------------------------------------------------------

    @property
    def checks_frozen(self) -> bool:
        """Whether this process can compare frozen weights with a checkpoint's: it has hashed them while whole."""
        return True

    def is_of_library(self, folder: Path, stored: Stored | None) -> bool:
        """Whether DeepSpeed or accelerate wrote the weights and states in a checkpoint, and alone can read them.

        Args:
            folder: of the checkpoint; `stored`: the one that the run goes on from, if it is one of ours.
        """
        return self.keeps_library_files

    def agrees_with(self, stored: Stored, own_folders: Collection[Path]) -> None:
        """Whether this run can take its states from the checkpoint.

        Args:
            own_folders: those in which this run's checkpoints are.

        Raises:
            CheckpointError: it was written by DeepSpeed, and this run is without, or the other way round; or by
                another ZeRO.
        """
        if STATE_FACTS in stored.manifest.files:
            raise CheckpointError(
                f"{stored.path} was written with DeepSpeed, this run is not: launch it as before, {FROM_WEIGHTS}."
            )

    def left_to_trainer(self, checkpoint: str | None, stored: Stored | None) -> str | None:
        """The checkpoint that Trainer itself is to load weights from while it prepares for training.

        Args:
            checkpoint: folder to resume from; `stored`: the same, if it is one of ours.
        """
        return checkpoint

    def restore(self, stored: Stored, allowed: Collection[str], engine: Any, optimizer: Any, lr_scheduler: Any) -> None:
        """Gives a prepared run the states of a verified checkpoint, but for the changes that were `allowed`."""

    def load_model(self, stored: Stored, own_folders: Collection[Path], engine: Any) -> None:
        """Gives the model the weights of a verified checkpoint, where `loads_itself`."""
