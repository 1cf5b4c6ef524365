"""Muon for the weight matrices of repeated layers, AdamW for everything else, in one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from transformers.pytorch_utils import Conv1D

from .blocks import find_blocks

ADJUST_LR = "match_rms_adamw"


class MuonAdamW(Optimizer):
    """Takes matrices out of an AdamW: Muon orthogonalizes their updates, AdamW goes on with the rest.

    One `state_dict`; schedulers, clipping and accumulation see ordinary parameter groups. A group says under
    `"algorithm"` ("muon" or "adamw") who steps it and holds that one's settings. Matrices keep the learning rate and
    weight decay of the group they came from: an update of n x m is scaled by 0.2 sqrt(max(n, m)), which gives it the
    root mean square of an AdamW update.

    Args:
        adamw: freshly made; its groups and settings are taken over, and it must not be stepped itself any more.
        matrices: two-dimensional parameters of `adamw`.

    Raises:
        ValueError: no matrices, one that `adamw` does not have, or a parameter that is not two-dimensional.

    Cost: per n x m matrix (n <= m) and step 10 n^2 m + 5 n^3 multiply-adds in bfloat16; one number kept per weight.
    Source: torch.optim.Muon; https://kellerjordan.github.io/posts/muon; scaling: arXiv:2502.16982.
    """

    def __init__(self, adamw: AdamW, matrices: Iterable[nn.Parameter]):
        chosen = {id(matrix) for matrix in matrices}
        held = {id(p) for group in adamw.param_groups for p in group["params"]}
        if not chosen or not chosen <= held:
            raise ValueError(f"{len(chosen - held)} of {len(chosen)} matrices are not among AdamW's parameters.")
        moved, rest = [], []
        for group in adamw.param_groups:
            own = [p for p in group["params"] if id(p) in chosen]
            left = [p for p in group["params"] if id(p) not in chosen]
            if own:
                moved.append({"params": own, "lr": group["lr"], "weight_decay": group["weight_decay"]})
            if left:
                rest.append({**group, "params": left, "algorithm": "adamw"})
        self._muon, self._adamw = Muon(moved, adjust_lr_fn=ADJUST_LR), adamw
        super().__init__([*({**group, "algorithm": "muon"} for group in self._muon.param_groups), *rest], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, inner in (("muon", self._muon), ("adamw", self._adamw)):
            # Handed over anew each time: loading a state and splitting groups replace both.
            inner.state = self.state
            inner.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            inner.step()
        return loss


def block_matrices(model: nn.Module | None) -> list[nn.Parameter]:
    """Weights of linear maps, attention and feed-forward, in the repeated layers of a model; those that train.

    Of `nn.Linear`, of what has its `in_features` and `out_features`, of GPT-2's `Conv1D`, and of
    `nn.MultiheadAttention`, whose query, key and value are one matrix. Not embeddings and what is tied to them, tables
    of positions, convolutions and stacks of matrices (three dimensions and more, which torch's Muon does not take),
    norms, biases, and nothing outside of the layers: heads, poolers, a patch projection. Not adapters either: LoRA's
    two factors are no matrix of the model, and orthogonalizing each by itself is not what Muon does to their product.

    Args:
        model: any; None has none.
    """
    if model is None:
        return []
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found: dict[int, Any] = {
        id(weight): weight
        for block in find_blocks(model)
        for name, module in block.named_modules()
        if "lora_" not in name
        for weight in _maps(module)
    }
    return [weight for key, weight in found.items() if weight.requires_grad and weight.ndim == 2 and key not in tables]


def _maps(module: Any) -> list[nn.Parameter]:
    """The weights that a module multiplies what comes in with."""
    names: tuple[str, ...]
    if isinstance(module, nn.MultiheadAttention):
        names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # what goes out is a Linear
    else:
        is_map = isinstance(module, Conv1D) or (hasattr(module, "in_features") and hasattr(module, "out_features"))
        names = ("weight",) if is_map else ()
    found = (getattr(module, name, None) for name in names)
    return [weight for weight in found if isinstance(weight, nn.Parameter)]
