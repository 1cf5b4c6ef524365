"""`--optim_ext cpu_offload`: the AdamW that Trainer makes is stepped on the host by torchao."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import AdamW

from ..errors import ArgumentError
from ..plan import Plan
from ..speedups.cpu_offload import offload_adamw, refresh_host_weights


class CpuOffloadMixin:
    """Makes the optimizer that decision `cpu_offload` of the plan stands for, once its groups are what they will be.

    Raises (when the optimizer is made):
        ArgumentError: the caller brought an optimizer of its own.
    """

    optimizer: Any
    plan: Plan

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As in Trainer; where torchao was decided, its optimizer takes over the groups of AdamW."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        decision = self.plan["cpu_offload"]
        if decision.status != "applied" or decision.settings["by"] != "torchao":
            return optimizer
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper holds it
        if not is_new and hasattr(inner, "param_d2h_map"):
            refresh_host_weights(inner)
            return optimizer
        if not is_new or not isinstance(optimizer, AdamW):
            raise ArgumentError(
                f"--optim_ext cpu_offload: the trainer was given an optimizer ({type(inner).__name__}). Leave one of "
                "them out."
            )
        self.optimizer = offload_adamw(optimizer)
        return self.optimizer
