"""How the processes of a run hold its weights, gradients and optimizer states: one face, and who answers for it."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from ..planned import PlannedRun
from .base import Backend
from .deepspeed import DeepSpeed
from .fsdp2 import Fsdp2
from .replicated import Fsdp1, Replicated

__all__ = ["Backend", "DeepSpeed", "Fsdp1", "Fsdp2", "Replicated", "choose_backend"]


def choose_backend(args: Any, accelerator: Accelerator, planned: PlannedRun) -> Backend:
    """The one that fits what accelerate made of the launch and of `args`."""
    state = accelerator.state
    if getattr(state, "deepspeed_plugin", None) is not None:
        return DeepSpeed(args, accelerator, planned)
    if accelerator.is_fsdp2:
        return Fsdp2(args, accelerator, planned)
    is_fsdp = getattr(state, "fsdp_plugin", None) is not None
    return (Fsdp1 if is_fsdp else Replicated)(args, accelerator, planned)
