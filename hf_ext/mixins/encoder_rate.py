"""A learning rate of their own for encoders that train: a new head needs a far larger one than pretrained weights."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel

from ..errors import ArgumentError
from ..models.affinity import AffinityModel


class EncoderRateMixin:
    """Splits the optimizer's groups into encoder and head where `--encoder_learning_rate` is given.

    Raises (when the optimizer is made):
        ArgumentError: the model does not tell its encoder from its head, or has no encoder that trains.
    """

    args: Any
    model: Any
    optimizer: Any

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As in Trainer; every group keeps its settings, and encoder parameters move to one with their own rate."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        rate = self.args.encoder_learning_rate
        if is_new and rate is not None:
            encoder = {id(p) for p in encoder_parameters(self.model)}
            split_groups(optimizer, encoder, rate)
        return optimizer


def encoder_parameters(model: Any) -> list[torch.nn.Parameter]:
    """Parameters of the pretrained part: an `AffinityModel`'s encoders, or the base model under a task head."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    encoder = inner.encoders if isinstance(inner, AffinityModel) else getattr(inner, "base_model", inner)
    training = [p for p in encoder.parameters() if p.requires_grad]
    if encoder is inner or not training:
        raise ArgumentError(
            f"--encoder_learning_rate: {type(inner).__name__} has no encoder that trains beside a head. Leave it out, "
            "or let encoders train (--use_peft, --tower_training full)."
        )
    return training


def split_groups(optimizer: torch.optim.Optimizer, chosen: set[int], rate: float) -> None:
    """Moves the parameters whose `id` is in `chosen` to groups with learning rate `rate`; state must be empty."""
    for group in list(optimizer.param_groups):
        moved = [p for p in group["params"] if id(p) in chosen]
        group["params"] = [p for p in group["params"] if id(p) not in chosen]
        if moved:
            optimizer.add_param_group({**group, "params": moved, "lr": rate})
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
