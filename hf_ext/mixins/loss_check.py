"""Before the first step: whether a loss of the user's reaches the weights at all."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from ..data.columns import has_numbered_rows
from ..data.random_states import kept_random_states
from ..data.streams import is_stream
from ..errors import ArgumentError, HfExtError
from ..overrides import find_override
from .exact_loss import unwrap_peft

NUM_ROWS = 8
NUM_NAMED = 5
_OWN = ("hf_ext", "transformers", "peft")  # losses that are tested where they are written
_CURES = "Compute it from the outputs with torch operations: .item(), .detach(), numpy and torch.no_grad() cut it off."

logger = logging.getLogger(__name__)


class LossCheckMixin:
    """One forward and one backward pass on a few training rows, where the loss is not ours or transformers' own.

    Such a loss is a `compute_loss_func`, a `compute_loss` of a subclass, or that of a model class from elsewhere. The
    rows (8, or a batch where that is smaller) are spread evenly over the training data. Nothing that training depends
    on changes: gradients are not accumulated, modes and random states are put back, the data loader is not read.
    Resumed runs were checked when they began. Left out, with a line in the log: streams, FSDP and DeepSpeed, whose
    passes cannot be repeated outside a step, reentrant activation checkpointing, which lacks `autograd.grad`, data
    loaders that do not read rows by number, and a `training_step` of the user's. So is, with a warning, a loss that
    needs more than a step has made of the trainer; on several processes, which must not part ways, that is an error.

    Warns of trainable parameters that get no gradient, or zero only.

    Raises (when training starts):
        ArgumentError: the loss is no scalar, not finite (a warning with `nan_policy="skip"`), detached from the model,
            or, where speed-ups are asked for, does not change with any trainable parameter (else a warning).

    Cost: once, one step of 8 rows without an optimizer.
    """

    args: Any
    model: Any
    plan: Any
    compute_loss_func: Any
    train_dataset: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        # The model is on its device and wrapped, callbacks have not begun to count.
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]
        if resume_from_checkpoint is None and self._has_foreign_loss():
            if reason := self._why_not_checked(prepared[1]):
                logger.info("The loss is not checked before training: %s.", reason)
            else:
                self._try_loss(prepared[1])
        return prepared

    def _try_loss(self, loader: DataLoader) -> None:
        try:
            self.check_loss(loader)
        except HfExtError:
            raise
        except Exception as error:  # whatever the user's code lacks outside a step: what is wrong in one, shows there
            if self.args.world_size > 1:
                raise
            logger.warning("The loss is not checked before training: %s: %s", type(error).__name__, error)

    def check_loss(self, loader: DataLoader) -> None:
        """Checks the loss on rows of `loader`'s dataset; see the class."""
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        draws = (self, *self.model.modules(), self.compute_loss_func, loader.dataset, loader.collate_fn)
        with (
            kept_random_states(*draws, getattr(loader.collate_fn, "data_collator", None)),
            _left_as_it_was(self.model, bool(self.args.activation_checkpointing), self._compiles()),
        ):
            inputs = self._prepare_inputs(_draw_batch(loader, self.args.train_batch_size))  # type: ignore[attr-defined]
            num_items = self._get_num_items_in_batch([inputs], self.args.device)  # type: ignore[attr-defined]
            with self.compute_loss_context_manager():  # type: ignore[attr-defined]
                loss = self.compute_loss(self.model, inputs, num_items_in_batch=num_items)  # type: ignore[attr-defined]
            self._check_value(loss)
            gradients = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
        missing = [name for name, gradient in zip(named, gradients) if gradient is None]
        zero = [name for name, gradient in zip(named, gradients) if gradient is not None and not gradient.any()]
        if len(missing) + len(zero) == len(named):
            text = (
                f"{self._loss_name()} does not change with any of the {len(named)} trainable parameters: all gradients "
                f"are {'zero' if zero else 'missing'}, so that training would change nothing. {_CURES}"
            )
            if self.args.speedups:
                raise ArgumentError(text)
            logger.warning("On the first rows: %s", text)  # on others it may, and Trainer would train
            return
        # LoRA's first matrix is multiplied by a second one that begins at zero.
        zero = [name for name in zero if "lora_A" not in name]
        for names, what in ((missing, "no gradient"), (zero, "a gradient of zero")):
            if names:
                logger.warning("%d trainable parameters get %s from the loss: %s.", len(names), what, _shorten(names))

    def _check_value(self, loss: Any) -> None:
        name = self._loss_name()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            given = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ArgumentError(f"{name} returned {given}: one number as a torch tensor is needed, such as a mean.")
        if not loss.requires_grad:
            raise ArgumentError(f"{name} is detached from the model: it has no gradient, so nothing trains. {_CURES}")
        if not torch.isfinite(loss):
            text = f"{name} is {loss.item()} on the first batch, before any step: look at its logarithms and divisions."
            if self.args.nan_policy != "skip":
                raise ArgumentError(text)
            logger.warning("%s", text)

    def _compiles(self) -> bool:
        return bool(self.args.torch_compile) or any(
            d.name == "compile" and d.status == "applied" for d in self.plan.decisions
        )

    def _loss_name(self) -> str:
        if self._has_loss_function():
            return f"compute_loss_func ({getattr(self.compute_loss_func, '__qualname__', self.compute_loss_func)})"
        if override := find_override(self, "compute_loss"):
            return f"The loss of {override}"
        return f"The loss of {type(unwrap_peft(self.model)).__name__}"

    def _has_loss_function(self) -> bool:
        return self.compute_loss_func is not None and self.compute_loss_func != self._exact_loss  # type: ignore[attr-defined]

    def _has_foreign_loss(self) -> bool:
        if self._has_loss_function() or find_override(self, "compute_loss"):
            return True
        return _definer(type(unwrap_peft(self.model)), "forward").__module__.split(".")[0] not in _OWN

    def _why_not_checked(self, loader: Any) -> str | None:
        if override := find_override(self, "training_step"):
            return f"{override} may do other things with it than it is checked for"
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return "FSDP and DeepSpeed hold the weights in parts"
        if is_stream(self.train_dataset):
            return "the training data is a stream"
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None or not has_numbered_rows(loader.dataset):
            return "the data loader does not read rows by their number"
        if self.args.activation_checkpointing and (self.args.activation_checkpointing_kwargs or {}).get(
            "use_reentrant"
        ):
            return "activation checkpointing is reentrant"
        return None


def _definer(cls: type, name: str) -> type:
    """The class that `cls` has the method from."""
    return next(base for base in cls.__mro__ if name in vars(base))


def _draw_batch(loader: Any, batch_size: int) -> Any:
    """A batch of rows spread over the data, through the loader's collator."""
    rows = loader.dataset
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(NUM_ROWS, batch_size, len(rows))).astype(int)).tolist()
    collator = copy.copy(loader.collate_fn)  # one that makes its generator when first called makes it for itself
    return next(iter(DataLoader(Subset(rows, chosen), batch_size=len(chosen), collate_fn=collator)))


@contextmanager
def _left_as_it_was(model: nn.Module, checkpoints_activations: bool, compiles: bool) -> Iterator[None]:
    """Evaluation mode (training mode where activations must be recomputed to fit); modes restored."""
    modes = {module: module.training for module in model.modules()}
    with ExitStack() as stack:
        if compiles:  # a graph for this one pass would take longer than all of it
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            model.train(checkpoints_activations)
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def _shorten(names: list[str]) -> str:
    more = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
