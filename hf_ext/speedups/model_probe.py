"""Any model on the first real rows of its own data: what parity, compiled blocks and layers' costs are measured on."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from accelerate.utils import send_to_device
from torch import nn
from transformers import default_data_collator

from ..data.random_states import kept_random_states
from ..models.blocks import find_blocks
from .base import Run

logger = logging.getLogger(__name__)

STATES = ("last_hidden_state", "logits")  # of what a model puts out, which is compared; else the first tensor
LABELS = ("label", "labels", "label_ids")  # that Trainer leaves in rows whatever the model takes


@dataclass(frozen=True)
class ModelProbe:
    """A whole model in memory, and one batch of its data.

    Attributes:
        module: the model.
        batch: arguments of its forward.
        autocast: dtype that training runs under; None for that of the weights.
        pattern: of the names of repeated layers, as of `find_blocks`.
    """

    module: nn.Module
    batch: dict[str, Any]
    autocast: torch.dtype | None
    pattern: str | None = None
    least_scale: ClassVar[float] = 0.0  # differences are relative to what is put out, however small

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(weight.dtype for weight in self.module.parameters() if weight.is_floating_point())

    @property
    def trains(self) -> bool:
        return any(weight.requires_grad for weight in self.module.parameters())

    @property
    def num_rows(self) -> int:
        return next((len(value) for value in self.batch.values() if isinstance(value, torch.Tensor) and value.dim()), 1)

    @property
    def num_tokens(self) -> int:
        """Of the attention mask; rows where there is none."""
        mask = self.batch.get("attention_mask")
        return int(mask.sum()) if isinstance(mask, torch.Tensor) else self.num_rows

    def states(self, autocast: torch.dtype | None) -> torch.Tensor:
        """What the model puts out, (tokens or rows, width), float32; without padding where there is a mask.

        With the same random numbers each time, for models that draw while they evaluate; none is taken from the run's.
        """
        device, half = self.device, autocast is not None
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            with torch.autocast(device.type, autocast, enabled=half):
                states = _first_tensor(self.module(**self.batch))
        mask = self.batch.get("attention_mask")
        if isinstance(mask, torch.Tensor) and states.dim() == 3 and mask.shape == states.shape[:2]:
            return states[mask.bool()].float()
        return states.reshape(-1, states.shape[-1] if states.dim() else 1).float()

    def gradients(self, autocast: torch.dtype | None) -> torch.Tensor:
        """Of a fixed sum of states with respect to the weights of the first layer that trains, (1, n), float32.

        They come through the backward pass of every later layer. None stays on weights.
        """
        layers = [layer for layer in find_blocks(self.module, self.pattern) if _trained(layer)]
        weights = _trained(layers[0] if layers else self.module)
        with torch.enable_grad():
            states = self.states(autocast)
            # After a norm, a plain sum is constant: every value gets a factor of its own.
            factors = torch.arange(1.0, states.numel() + 1, device=states.device).sin().view_as(states)
            found = torch.autograd.grad((states * factors).sum(), weights, allow_unused=True)
        return torch.cat([gradient.float().flatten() for gradient in found if gradient is not None])[None]


@dataclass(frozen=True)
class LossProbe(ModelProbe):
    """A whole model by its loss alone: in it shows what reads positions that the attention mask leaves out."""

    @property
    def trains(self) -> bool:
        """Nothing of it is compared backward: encoders are, by themselves."""
        return False

    @property
    def has_labels_left_out(self) -> bool:
        """Whether a label stands where the attention mask is 0."""
        labels, mask = self.batch.get("labels"), self.batch.get("attention_mask")
        if not (isinstance(labels, torch.Tensor) and isinstance(mask, torch.Tensor) and labels.shape == mask.shape):
            return False
        return bool(((labels != -100) & (mask == 0)).any())

    def states(self, autocast: torch.dtype | None) -> torch.Tensor:
        """The loss, (1, 1), float32; what the model puts out where it has none."""
        found: list[torch.Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            loss = output.get("loss") if isinstance(output, Mapping) else None
            found.extend([loss] if isinstance(loss, torch.Tensor) else [])

        handle = self.module.register_forward_hook(keep)
        try:
            states = super().states(autocast)
        finally:
            handle.remove()
        return found[0].float().nan_to_num().reshape(1, -1) if found else states


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def _first_tensor(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        named = [output[name] for name in STATES if isinstance(output.get(name), torch.Tensor)]
        output = named or [value for name, value in output.items() if name != "loss"] or [*output.values()]
    for value in output if isinstance(output, list | tuple) else ():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    raise TypeError(f"no tensor is in what the model puts out ({type(output).__name__})")


def probe_model(run: Run, rows: list[Any], autocast: torch.dtype | None) -> ModelProbe | None:
    """`rows` as a batch for the model of a run, on its device; None where that does not compute.

    Cost: the collator, and one forward pass without gradients.
    """
    if not rows or not isinstance(run.model, nn.Module) or not any(True for _ in run.model.parameters()):
        return None
    try:
        with kept_random_states(run.train_dataset, run.collator):
            batch = collate(run.model, run.collator, run.args, rows)
        if not run.args.use_cache and "use_cache" in inspect.signature(run.model.forward).parameters:
            batch["use_cache"] = False  # which Trainer sets in the configuration later
        probe = ModelProbe(run.model, send_to_device(batch, run.args.device), autocast, run.args.block_pattern)
        with evaluating(run.model), torch.no_grad():
            probe.states(autocast)
    except Exception:  # a collator, a model and a loss of the user's own, which may only fit together in their trainer
        logger.debug("no batch at hand", exc_info=True)
        return None
    return probe


def collate(model: Any, collator: Any, args: Any, rows: list[Any]) -> dict[str, Any]:
    """Rows as a batch, as Trainer makes it: without columns that the model's forward does not name."""
    if args.remove_unused_columns and isinstance(model, nn.Module) and all(isinstance(row, Mapping) for row in rows):
        named = (*inspect.signature(model.forward).parameters, *LABELS)
        rows = [{name: value for name, value in row.items() if name in named} for row in rows]
    return dict((collator or default_data_collator)(rows))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and then each module in the one it was in."""
    with modes_kept(model):
        model.eval()
        yield


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Leaves each module in the mode it was in, and every buffer, such as a batch norm's means, as it was."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
