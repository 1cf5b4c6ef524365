"""Muon for the weight matrices of encoder layers, AdamW for everything else, in one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel

from .affinity import AffinityModel
from .lora import unwrap_peft

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

    def unstepped_twin(self, groups: list[dict[str, Any]]) -> MuonAdamW:
        """Another one that has not stepped, over `groups` like this one's; this one's state and groups stay its own.

        For whoever has to know what a step adds, such as the size of a checkpoint.
        """
        twin = object.__new__(type(self))
        twin._muon, twin._adamw = self._muon, self._adamw  # handed all that they hold anew in each step
        Optimizer.__init__(twin, groups, {})
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """With the two that step, which torch's own leaves out of copies."""
        return {**super().__getstate__(), "_muon": self._muon, "_adamw": self._adamw}


def encoder_matrices(model: nn.Module | None) -> list[nn.Parameter]:
    """Weights of linear layers, attention and feed-forward, in the repeated layers of encoders; those that train.

    Not embeddings, poolers, ESM's contact head, heads, norms and biases. Not adapters either: LoRA's two factors are no
    matrix of the model, and orthogonalizing each by itself is not what Muon does to their product.
    """
    inner = unwrap_peft(model)
    if not isinstance(inner, PreTrainedModel):
        return []
    encoder = inner.encoders if isinstance(inner, AffinityModel) else inner.base_model
    found: dict[int, Any] = {
        id(linear.weight): linear.weight
        for layers in encoder.modules()
        if isinstance(layers, nn.ModuleList)
        for name, linear in layers.named_modules()
        if isinstance(linear, nn.Linear) and "lora_" not in name
    }
    return [weight for weight in found.values() if weight.requires_grad and weight.ndim == 2]
