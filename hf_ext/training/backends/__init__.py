"""How the processes of a run hold its weights, gradients and optimizer states: one face, and who answers for it."""

from __future__ import annotations

from typing import Any

from .base import Backend
from .deepspeed import DeepSpeed
from .fsdp2 import Fsdp2

__all__ = ["Backend", "DeepSpeed", "Fsdp2", "choose_backend"]


def choose_backend(trainer: Any) -> Backend:
    """The one that fits what accelerate made of the launch and of the trainer's arguments."""
    if trainer.is_deepspeed_enabled:
        return DeepSpeed(trainer)
    return (Fsdp2 if trainer.accelerator.is_fsdp2 else Backend)(trainer)
