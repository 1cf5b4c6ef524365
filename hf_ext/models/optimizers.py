"""Muon for matrices of repeated layers beside AdamW for the rest; and any optimizer of torch, stepped in host memory.

In host memory its states leave the card, in any training loop:

    optimizer = HostOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    optimizer = move_to_host(optimizer)  # one that has stepped already, with its state

Weights and gradients stay on the card, where backward and clipping need them; each step copies both to the host, steps
there, and copies the weights back. Nothing but the states lives on the host from one step to the next, so whatever
changes weights in between (a checkpoint, averaging, clamping) is what the next step starts from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer
from transformers.pytorch_utils import Conv1D

from ..errors import ArgumentError
from .blocks import find_blocks

# --- Muon -------------------------------------------------------------------------------------------------------------


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
        moved = []
        rest = []
        for group in adamw.param_groups:
            own = [p for p in group["params"] if id(p) in chosen]
            left = [p for p in group["params"] if id(p) not in chosen]
            if own:
                moved.append({"params": own, "lr": group["lr"], "weight_decay": group["weight_decay"]})
            if left:
                rest.append({**group, "params": left, "algorithm": "adamw"})
        self._muon = Muon(moved, adjust_lr_fn=ADJUST_LR)
        self._adamw = adamw
        of_muon = [{**group, "algorithm": "muon"} for group in self._muon.param_groups]
        super().__init__([*of_muon, *rest], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step of both; returns what `closure` returns."""
        loss = _compute_loss(closure)
        for name, inner in (("muon", self._muon), ("adamw", self._adamw)):
            # Handed over anew each time: loading a state and splitting groups replace both.
            inner.state = self.state
            inner.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            inner.step()
        return loss


def _compute_loss(closure: Callable[[], Any] | None) -> Any:
    """Returns what `closure` returns, if there is one, with gradients although a step is taken without."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def block_matrices(model: nn.Module | None) -> list[nn.Parameter]:
    """Finds weights of linear maps, attention and feed-forward, in the repeated layers of a model; those that train.

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


def _maps(module: object) -> list[nn.Parameter]:
    """Returns the weights that a module multiplies what comes in with."""
    names: tuple[str, ...]
    if isinstance(module, nn.MultiheadAttention):
        names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # what goes out is a Linear
    else:
        is_map = isinstance(module, Conv1D) or (hasattr(module, "in_features") and hasattr(module, "out_features"))
        names = ("weight",) if is_map else ()
    found = (getattr(module, name, None) for name in names)
    return [weight for weight in found if isinstance(weight, nn.Parameter)]


# --- in host memory ---------------------------------------------------------------------------------------------------


class HostOptimizer(Optimizer):
    """Takes the place of `optimizer`, whose states move to host memory; same numbers, groups and `state_dict`.

    Groups are shared with `optimizer`: a schedule may write to either. Call `step` once gradients are what the step
    shall see: accumulated, averaged over processes, unscaled and clipped. Parameters without a gradient are left alone.
    Parameters may lie on any device; host copies have their dtype, so the states do, too.

    Args:
        optimizer: new or after steps; it must not be stepped itself any more.

    Attributes:
        wrapped: `optimizer`.

    Raises:
        ArgumentError: not of torch; of bitsandbytes or torchao, which have kernels of their own; with sharded
            parameters, which FSDP2 offloads itself.

    Cost: per step and trained number one weight and one gradient copied to the host and one weight back, and the step
    on the CPU. Host memory: one weight, one gradient and the states; of a CUDA device, the first two pinned, each
    tensor rounded up to a power of two.
    """

    def __init__(self, optimizer: Optimizer):
        _check(optimizer)
        self.wrapped = optimizer
        self._twins: dict[Tensor, tuple[nn.Parameter, Tensor]] = {}  # weight and gradient on the host
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups  # one list: a schedule made for `optimizer` goes on acting
        self.state = optimizer.state
        self._move_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step on the host; returns what `closure` returns."""
        loss = _compute_loss(closure)
        twins = self._find_twins()
        moving = [parameter for parameter in twins if parameter.grad is not None]
        devices = {parameter.device for parameter in moving if parameter.is_cuda}
        for parameter, (weight, gradient) in twins.items():
            weight.grad = None if parameter.grad is None else gradient  # without one nothing steps it
            if parameter.grad is not None:
                weight.copy_(parameter, non_blocking=parameter.is_cuda)  # only CUDA is waited for
                gradient.copy_(parameter.grad, non_blocking=parameter.is_cuda)
        _wait_for(devices)
        with self._on_host():
            self.wrapped.step()
        for parameter in moving:
            parameter.copy_(twins[parameter][0], non_blocking=parameter.is_cuda)
        _wait_for(devices)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of the wrapped optimizer's class, saved with or without this wrapper, into host memory."""
        with self._on_host():
            self.wrapped.load_state_dict(state_dict)
        self._move_state()  # torch leaves some values where they were loaded to

    def _move_state(self) -> None:
        for parameter, values in self.state.items():  # one at a time, so that each frees its part of the device
            self.state[parameter] = send_to_device(values, "cpu")

    @contextmanager
    def _on_host(self) -> Iterator[None]:
        """Puts the twins into `wrapped` in place of the parameters; then takes over its groups and state."""
        live = self.param_groups
        wrapped = self.wrapped
        twins = {parameter: weight for parameter, (weight, _) in self._find_twins().items()}
        originals = {id(weight): parameter for parameter, weight in twins.items()}
        state = {twins.get(p, p): values for p, values in self.state.items()}
        wrapped.state = defaultdict(dict, state)
        wrapped.param_groups = [
            {
                name: [twins[p] for p in value] if name == "params" else send_to_device(value, "cpu")
                for name, value in group.items()
            }
            for group in live
        ]
        try:
            yield
        finally:
            for group, stepped in zip(live, wrapped.param_groups):
                params = group["params"]
                group.clear()
                group.update({**stepped, "params": params})
            state = {originals.get(id(key), key): values for key, values in wrapped.state.items()}
            self.state = wrapped.state = defaultdict(dict, state)
            wrapped.param_groups = live

    def _find_twins(self) -> dict[Tensor, tuple[nn.Parameter, Tensor]]:
        """Returns the twins of all parameters; makes them the first time, of the same dtype, pinned for CUDA."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p in parameters:
            if p not in self._twins:
                weight = torch.empty(p.shape, dtype=p.dtype, pin_memory=p.is_cuda)
                gradient = torch.empty(p.shape, dtype=p.dtype, pin_memory=p.is_cuda)
                self._twins[p] = nn.Parameter(weight), gradient
        return {p: self._twins[p] for p in parameters}


def move_to_host(optimizer: Optimizer) -> Optimizer:
    """Moves the optimizer's state to host memory, where it stays; between two steps, also in the middle of a run.

    Args:
        optimizer: of torch, new or after steps; in Accelerate's wrapper or not.

    Returns:
        Accelerate's wrapper as it was, with a `HostOptimizer` in it; without, a `HostOptimizer`. What is on the host
        already comes back as it is. On CUDA, memory that is free then is torch's to use again, not yet the driver's.

    Raises:
        ArgumentError: see `HostOptimizer`; nothing was moved then.
    """
    if isinstance(optimizer, AcceleratedOptimizer):
        if not isinstance(optimizer.optimizer, HostOptimizer):
            moved = HostOptimizer(optimizer.optimizer)
            # Under a GradScaler the wrapper keeps a reference to `step`, which this makes anew.
            optimizer.__setstate__({**optimizer.__getstate__(), "optimizer": moved})
        return optimizer
    if isinstance(optimizer, HostOptimizer):
        return optimizer
    return HostOptimizer(optimizer)


def find_host_optimizer(optimizer: Optimizer) -> HostOptimizer | None:
    """Finds the `HostOptimizer` that this is, or that Accelerate's wrapper holds; None for another."""
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return inner if isinstance(inner, HostOptimizer) else None


def _check(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"{name} is no torch.optim.Optimizer: it cannot be stepped in host memory.")
    libraries = {cls.__module__.partition(".")[0] for cls in type(optimizer).__mro__}
    for library in libraries & {"bitsandbytes", "torchao"}:
        raise ArgumentError(f"{name} ({library}) steps by kernels of its own: use one of torch on the host (AdamW).")
    if any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        raise ArgumentError(
            f"{name} has sharded parameters, which FSDP2 keeps on the host itself (fsdp_offload_params: true)."
        )


def _wait_for(devices: set[torch.device]) -> None:
    """Waits until all that was asked of the devices is done."""
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
