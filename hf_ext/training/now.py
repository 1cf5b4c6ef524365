"""What Trainer holds, and replaces while it runs, at the moment a part is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler


@dataclass(frozen=True)
class Training:
    """Handed to a part that needs several of these; never kept beyond the call, since Trainer replaces them.

    Attributes:
        model: as it trains; `model_wrapped`: in what wraps it for several processes, or the same.
        optimizer, lr_scheduler: as Accelerate prepared them; None before training begins.
    """

    model: nn.Module
    model_wrapped: nn.Module
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
