"""Any optimizer of torch, stepped in host memory: its states leave the card, in any training loop.

    optimizer = HostOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    optimizer = move_to_host(optimizer)  # one that has stepped already, with its state

Weights and gradients stay on the card, where backward and clipping need them; each step copies both to the host, steps
there, and copies the weights back. Nothing but the states lives on the host from one step to the next, so whatever
changes weights in between (a checkpoint, averaging, clamping) is what the next step starts from.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import ArgumentError

# Of the pieces that host memory is asked for: torch rounds each piece of pinned memory up to a power of two.
CHUNK_BYTES = 64 * 2**20
_ALIGNED = 64  # elements, so that vector instructions find their tensors aligned
_SCALE: tuple[str, ...] = ("grad_scale", "found_inf")  # attributes by which torch's GradScaler talks to a kernel


@dataclass
class HostTimes:
    """Seconds that steps have taken so far: copies in both directions, and the wrapped optimizer."""

    num_steps: int = 0
    copy_s: float = 0.0
    step_s: float = 0.0


class HostOptimizer(Optimizer):
    """Takes the place of `optimizer`, whose states move to host memory; same numbers, groups and `state_dict`.

    Groups are shared with `optimizer`: a schedule may write to either. Call `step` once gradients are what the step
    shall see: accumulated, averaged over processes, unscaled and clipped. Parameters without a gradient are left alone.
    Parameters may lie on any device; host copies have their dtype, so the states do, too.

    Args:
        optimizer: new or after steps; it must not be stepped itself any more.

    Attributes:
        wrapped: `optimizer`. `times`: what steps took.

    Raises:
        ArgumentError: not of torch; of bitsandbytes or torchao, which have kernels of their own; with sharded
            parameters, which FSDP2 offloads itself.

    Cost: per step and trained number one weight and one gradient copied to the host and one weight back, and the step
    on the CPU. Host memory: one weight, one gradient and the states; of a CUDA device, the first two pinned.
    """

    def __init__(self, optimizer: Optimizer):
        _check(optimizer)
        self.wrapped, self.times = optimizer, HostTimes()
        self._twins: dict[torch.Tensor, _Twin] = {}
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups  # one list: a schedule made for `optimizer` goes on acting
        self.state = optimizer.state
        self._move_state()
        # Fused kernels take the loss scale off themselves: GradScaler leaves that to us, and we to them.
        self._step_supports_amp_scaling = getattr(optimizer, "_step_supports_amp_scaling", False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the host; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        twins = self._find_twins()
        moving = {parameter: twin for parameter, twin in twins.items() if parameter.grad is not None}
        devices = {parameter.device for parameter in moving if parameter.is_cuda}
        start = _wait_for(devices)  # for backward, which is not ours
        for parameter, twin in twins.items():
            twin.take(parameter)
        copied = _wait_for(devices)
        with self._on_host(twins), self._loss_scale():
            self.wrapped.step()
        stepped = _wait_for(set())
        for parameter, twin in moving.items():
            parameter.copy_(twin.weight, non_blocking=parameter.is_cuda)
        self.times.num_steps += 1
        self.times.copy_s += copied - start + _wait_for(devices) - stepped
        self.times.step_s += stepped - copied
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of the wrapped optimizer's class, saved with or without this wrapper, into host memory."""
        with self._on_host(self._find_twins()):
            self.wrapped.load_state_dict(state_dict)
        self._move_state()  # torch leaves some values where they were loaded to

    def state_bytes(self) -> int:
        """Bytes of the states in host memory, which the device does not hold; 0 before the first step of most."""
        return sum(tensor.nbytes for values in self.state.values() for tensor in _tensors(values))

    def _move_state(self) -> None:
        for parameter, values in self.state.items():
            self.state[parameter] = _to_host(values)  # one at a time, so that each frees its part of the device

    @contextmanager
    def _on_host(self, twins: dict[torch.Tensor, _Twin]) -> Iterator[None]:
        """While `wrapped` holds the twins in place of the parameters; takes over what it made of groups and state."""
        live, wrapped = self.param_groups, self.wrapped
        originals = {id(twin.weight): parameter for parameter, twin in twins.items()}
        state = {twins[p].weight if p in twins else p: values for p, values in self.state.items()}
        wrapped.state = defaultdict(dict, state)
        wrapped.param_groups = [
            {
                name: [twins[p].weight for p in value] if name == "params" else _to_host(value)
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

    @contextmanager
    def _loss_scale(self) -> Iterator[None]:
        """Hands on what a GradScaler has set for the kernel of this one step."""
        given = {name: _to_host(vars(self)[name]) for name in _SCALE if name in vars(self)}
        vars(self.wrapped).update(given)
        try:
            yield
        finally:
            for name in given:
                del vars(self.wrapped)[name]

    def _find_twins(self) -> dict[torch.Tensor, _Twin]:
        """Those of all parameters; made where there are none yet."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if missing := [p for p in parameters if p not in self._twins]:
            places = zip(missing, _reserve(missing), _reserve(missing))
            self._twins |= {p: _Twin(nn.Parameter(weight), gradient) for p, weight, gradient in places}
        return {p: self._twins[p] for p in parameters}

    def __getstate__(self) -> dict[str, Any]:
        """With what torch's own leaves out of copies; a copy makes host memory of its own."""
        kept = {name: vars(self)[name] for name in ("wrapped", "times", "_step_supports_amp_scaling")}
        return {**super().__getstate__(), **kept, "_twins": {}}


@dataclass
class _Twin:
    """A parameter's place in host memory."""

    weight: nn.Parameter
    gradient: torch.Tensor

    def take(self, parameter: torch.Tensor) -> None:
        """Weight and gradient as they are on the device; no gradient where there is none, so that nothing steps it."""
        self.weight.grad = None if parameter.grad is None else self.gradient
        if parameter.grad is not None:
            self.weight.copy_(parameter, non_blocking=parameter.is_cuda)  # only CUDA is waited for
            self.gradient.copy_(parameter.grad, non_blocking=parameter.is_cuda)


def move_to_host(optimizer: Any) -> Any:
    """The optimizer, with its state in host memory from now on; for between two steps, also in the middle of a run.

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
    return optimizer if isinstance(optimizer, HostOptimizer) else HostOptimizer(optimizer)


def find_host_optimizer(optimizer: Any) -> HostOptimizer | None:
    """The `HostOptimizer` that this is, or that Accelerate's wrapper holds; None for another."""
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return inner if isinstance(inner, HostOptimizer) else None


def _check(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"{name} is no torch.optim.Optimizer: it cannot be stepped in host memory.")
    for library in {cls.__module__.partition(".")[0] for cls in type(optimizer).__mro__} & {"bitsandbytes", "torchao"}:
        raise ArgumentError(f"{name} ({library}) steps by kernels of its own: use one of torch on the host (AdamW).")
    if any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        raise ArgumentError(
            f"{name} has sharded parameters, which FSDP2 keeps on the host itself (fsdp_offload_params: true)."
        )


def _wait_for(devices: set[torch.device]) -> float:
    """The time once all that was asked of the devices is done."""
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def _reserve(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Uninitialised host tensors of the parameters' shapes and dtypes, in few pieces; pinned for those on CUDA."""
    made: list[torch.Tensor] = []
    room: dict[tuple[torch.dtype, bool], torch.Tensor] = {}
    all_bytes = sum((p.numel() + _ALIGNED) * p.element_size() for p in parameters)
    for parameter in parameters:
        kind = parameter.dtype, parameter.is_cuda
        num = -(-parameter.numel() // _ALIGNED) * _ALIGNED
        if kind not in room or len(room[kind]) < num:
            least = min(CHUNK_BYTES, all_bytes) // parameter.element_size()
            room[kind] = torch.empty(max(num, least), dtype=parameter.dtype, pin_memory=parameter.is_cuda)
        made.append(room[kind][: parameter.numel()].view(parameter.shape))
        room[kind] = room[kind][num:]
    return made


def _to_host(value: Any) -> Any:
    """`value` with the tensors in it in host memory; those that are there stay the same, and so do dicts."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _to_host(item)
        return value
    return type(value)(map(_to_host, value)) if type(value) in (list, tuple) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
