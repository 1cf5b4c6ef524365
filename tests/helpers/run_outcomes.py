"""What a run has trained: its losses, its weights, and whether another run has the same ones; and what ends one."""

from typing import Any

import torch
from transformers import TrainerCallback


class Killed(Exception):
    """What interrupts a run."""


class KillAt(TrainerCallback):
    """Raises at the end of optimizer step `step`."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def losses(trainer: Any) -> list[float]:
    """Training losses in the order in which they were logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the weights that train, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def same_weights(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two models have the same entries to the bit."""
    return same_tensors(model.state_dict(), other.state_dict())


def same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether two dictionaries have the same names with equal tensors."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
