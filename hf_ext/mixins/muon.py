"""`--optim_ext muon`: the AdamW that Trainer makes gives its encoder matrices to Muon."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import AdamW

from ..errors import ArgumentError
from ..models.muon import MuonAdamW, encoder_matrices
from ..plan import Plan


class MuonMixin:
    """Makes the optimizer that decision `muon` of the plan stands for.

    Raises (when the optimizer is made):
        ArgumentError: the caller brought an optimizer of its own.
    """

    model: Any
    optimizer: Any
    plan: Plan

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As in Trainer; where Muon was decided, AdamW keeps its groups and settings, but for the matrices."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if not self.plan.applied("muon") or (not is_new and _is_ours(optimizer)):
            return optimizer
        if not is_new or not isinstance(optimizer, AdamW):
            raise ArgumentError(
                f"--optim_ext muon: the trainer was given an optimizer ({type(optimizer).__name__}). Leave one of "
                "them out; hf_ext.models.muon.MuonAdamW can be built and passed without the flag."
            )
        self.optimizer = MuonAdamW(optimizer, encoder_matrices(self.model))
        return self.optimizer


def _is_ours(optimizer: Any) -> bool:
    return isinstance(getattr(optimizer, "optimizer", optimizer), MuonAdamW)  # Accelerate's wrapper holds it
