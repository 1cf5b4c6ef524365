"""What a run is besides its weights: optimizer, schedule and loss scale, as trees for `save_tree`.

What `optimizer_tree` and `scheduler_tree` return refers to live state: save it before the next step changes it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from ...errors import ArgumentError, CheckpointError
from ...models.host_optimizer import HostOptimizer
from ...optional import require
from ..format.trees import tree_bytes

logger = logging.getLogger(__name__)

_KIND = "hf_ext:kind"  # marks what stands for a tensor in an optimizer tree
_QUANTIZED = {f"OptimState{bits}": f"torchao.optim.subclass_{bits.lower()}" for bits in ("8bit", "4bit", "Fp8")}
_FOREIGN_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


def optimizer_tree(optimizer: Any, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The optimizer's state, with the class, shapes and dtypes that `load_optimizer_tree` checks.

    torchao's 8-bit, 4-bit and FP8 states are stored as they are.

    Args:
        optimizer: of torch, or anything with its `state_dict` and `param_groups`; wrapped by Accelerate or not.
        dtype: `torch.bfloat16` halves float32 state on disk; the run then continues with rounded state, not exactly.
            Only tensors at least as large as their parameter are rounded: step counts, Adafactor's factors and scales
            of 8-bit states are small and would lose most.

    Raises:
        ArgumentError: another dtype.
    """
    if dtype not in (None, torch.bfloat16):
        raise ArgumentError(f"dtype={dtype}: optimizer state is kept exact (None) or rounded to torch.bfloat16.")
    state_dict = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sizes = {i: parameter.numel() for i, parameter in enumerate(parameters)}
    if "state" in state_dict:
        state = state_dict["state"].items()
        packed = {"state": {key: _pack_state(value, dtype, max(2, sizes.get(key, 2))) for key, value in state}}
    else:  # optimizers made of others arrange it as they like
        packed = _pack_state(state_dict, dtype, 2)
    return {
        "class": _class_name(optimizer),
        "parameters": _describe_parameters(optimizer),
        "state_dict": {**state_dict, **packed},
    }


def load_optimizer_tree(optimizer: Any, tree: dict[str, Any]) -> None:
    """Gives a live optimizer the saved state, in the dtypes it had; takes over the tree's tensors where it can.

    `torch.optim` casts loaded state to the dtype of the parameter, which rounds float32 state of bfloat16 parameters
    and turns 8-bit codes into floats; what it changed is put back. As with torch, hyperparameters of the groups (the
    learning rate too) become those of the checkpoint.

    Raises:
        CheckpointError: another class of optimizer, number of groups or parameters, shape or dtype of a parameter (says
            which; nothing has been changed then), or an optimizer that does not keep the state it is given.
    """
    try:
        problems = _compare_parameters(optimizer, tree)
        saved = _unpack_state(tree["state_dict"])
        _move_rates(saved.get("param_groups", []), optimizer.param_groups)
    except _FOREIGN_ERRORS as error:
        raise CheckpointError(f"Not the state of an optimizer: {type(error).__name__}: {error}") from error
    if problems:
        raise CheckpointError("The optimizer state does not fit this run's optimizer: " + "; ".join(problems) + ".")
    try:
        optimizer.load_state_dict(saved)
    except _FOREIGN_ERRORS as error:
        raise CheckpointError(f"{tree['class']} refused the saved state: {type(error).__name__}: {error}") from error
    _put_back(saved, optimizer)
    lost = [path for path, *_ in _changed_leaves(saved, optimizer.state_dict())]
    if lost:
        raise CheckpointError(f"{tree['class']} does not keep the state it is given: {', '.join(lost[:3])}.")


def _move_rates(saved_groups: list[dict[str, Any]], live_groups: list[dict[str, Any]]) -> None:
    """Puts tensors of the groups (a tensor learning rate) where the live ones are; torch moves only state."""
    for saved, live in zip(saved_groups, live_groups):
        for name, value in live.items():
            if isinstance(value, torch.Tensor) and isinstance(saved.get(name), torch.Tensor):
                saved[name] = saved[name].to(value.device)


def _put_back(saved: dict[str, Any], optimizer: Any) -> None:
    """Replaces what loading cast to another dtype; a state dict holds the live containers."""
    for _, value, live, holder, key in list(_changed_leaves(saved, optimizer.state_dict())):
        if isinstance(live, torch.Tensor) and isinstance(holder, dict | list):
            holder[key] = value.to(live.device)


def expected_optimizer_bytes(optimizer: Any, dtype: torch.dtype | None = None) -> int:
    """Upper bound of the bytes on disk of the optimizer's tree once every parameter was stepped; for before that.

    A twin takes a step on the meta device, which costs no memory. Optimizers that ask tensors for their values
    (Adafactor) step zeros on the CPU, up to 100 million elements. Where neither is possible (LBFGS), two states in
    float32 per element are assumed, which a log line says.
    """
    inner = _unwrap(optimizer)
    num_elements = sum(parameter.numel() for group in inner.param_groups for parameter in group["params"])
    reason = "too large to try on the CPU"
    for device in ("meta", "cpu") if num_elements <= 100_000_000 else ("meta",):
        try:
            return tree_bytes(optimizer_tree(_stepped_twin(inner, device), dtype))
        except _FOREIGN_ERRORS as error:
            reason = str(error)
    logger.info("%s cannot be sized (%s): two float32 states assumed.", type(inner).__name__, reason)
    return 2 * num_elements * (dtype or torch.float32).itemsize + 65_536


def _stepped_twin(optimizer: Any, device: str) -> Any:
    """Another optimizer of the class, after a step, with nothing of this one's but its groups.

    Not a copy: `Optimizer.__setstate__`, which copying calls, patches `step` of a class that was never initialised for
    the whole process, and the copy of a wrapper would step the optimizer that both wrap.
    """
    cls = type(optimizer)
    if not getattr(cls.step, "hooked", False):
        raise TypeError("not initialised as a torch.optim.Optimizer")
    groups = [_on_device(group, device) for group in optimizer.param_groups]
    if hasattr(cls, "unstepped_twin"):  # made of other optimizers, as `MuonAdamW` is
        twin = optimizer.unstepped_twin(groups)
    else:
        twin = object.__new__(cls)
        torch.optim.Optimizer.__init__(twin, groups, dict(optimizer.defaults))
        if hasattr(optimizer, "check_overrides"):  # of bitsandbytes
            _tell_bits(optimizer, twin)
    with torch.random.fork_rng(devices=[]):  # some optimizers round at random
        cls.step.__wrapped__(twin)  # of the class: schedulers replace the instance's; without anybody's hooks
    return twin


def _tell_bits(optimizer: Any, twin: Any) -> None:
    """Gives a twin what bitsandbytes' optimizers hold besides groups: bits, maps, which parameters stay in float32."""
    optimizer.check_overrides()  # of embeddings, which are then known by their place, the twin's too
    for name, value in vars(optimizer).items():
        if name not in vars(twin):
            setattr(twin, name, copy.copy(value))  # it moves its maps to the device of the parameters
    twin.initialized = True


def _on_device(group: dict[str, Any], device: str) -> dict[str, Any]:
    parameters = []
    for parameter in group["params"]:
        # Whole, also of a parameter that is spread over processes: one process steps the twin, and none waits for it.
        values = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        twin = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
        twin.grad = torch.zeros_like(twin) if parameter.requires_grad else None
        parameters.append(twin)
    plain: dict[str, Any] = {name: False for name in ("fused", "foreach", "capturable") if name in group}
    return {**group, **plain, "params": parameters}  # without kernels that need the real device


def scheduler_tree(scheduler: Any) -> dict[str, Any]:
    """The schedule's state, of any scheduler of torch or transformers, wrapped by Accelerate or not."""
    return {
        "class": _class_name(scheduler),
        "num_groups": len(getattr(_unwrap(scheduler), "base_lrs", [])),
        "state_dict": scheduler.state_dict(),
    }


def load_scheduler_tree(scheduler: Any, tree: dict[str, Any]) -> None:
    """Gives a live scheduler the saved state. The optimizer's own learning rates come with the optimizer's state.

    Raises:
        CheckpointError: another class of scheduler or number of parameter groups; nothing has been changed then.
    """
    live = scheduler_tree(scheduler)
    for key, what in {"class": "class", "num_groups": "number of parameter groups"}.items():
        if live[key] != tree.get(key):
            raise CheckpointError(f"The schedule's {what} is {live[key]} now, {tree.get(key)} in the checkpoint.")
    try:
        scheduler.load_state_dict(copy.deepcopy(tree["state_dict"]))
    except _FOREIGN_ERRORS as error:
        raise CheckpointError(f"{tree['class']} refused the saved state: {type(error).__name__}: {error}") from error


def scaler_tree(scaler: Any) -> dict[str, Any]:
    """The state of a `torch.amp.GradScaler`; empty where loss scaling is off. Cost: a device synchronisation."""
    return scaler.state_dict()


def load_scaler_tree(scaler: Any, tree: dict[str, Any]) -> None:
    """Gives a live scaler the saved loss scale and its growth count.

    Raises:
        CheckpointError: loss scaling was on and is off now, or the other way round.
    """
    if set(scaler.state_dict()) != set(tree):
        raise CheckpointError(
            f"Loss scaling is {'on' if scaler.is_enabled() else 'off'} now and was {'on' if tree else 'off'} in the "
            "checkpoint: give the same --fp16."
        )
    scaler.load_state_dict(dict(tree))


def _unwrap(wrapped: Any) -> Any:
    """What steps in the end. One in host memory keeps the state of the one in it, so that a run goes on with either."""
    if isinstance(wrapped, AcceleratedOptimizer):
        return _unwrap(wrapped.optimizer)
    if isinstance(wrapped, HostOptimizer):
        return wrapped.wrapped
    return _unwrap(wrapped.scheduler) if isinstance(wrapped, AcceleratedScheduler) else wrapped


def _class_name(wrapped: Any) -> str:
    return type(_unwrap(wrapped)).__name__


def _describe_parameters(optimizer: Any) -> list[list[str]]:
    return [[f"{_name(p.dtype)} {tuple(p.shape)}" for p in group["params"]] for group in optimizer.param_groups]


def _compare_parameters(optimizer: Any, tree: dict[str, Any]) -> list[str]:
    """What differs between the parameters the state was saved for and those of the live optimizer."""
    saved, live = tree["parameters"], _describe_parameters(optimizer)
    if tree["class"] != _class_name(optimizer):
        return [f"{tree['class']} in the checkpoint, {_class_name(optimizer)} now"]
    if len(saved) != len(live):
        return [f"{len(saved)} parameter groups in the checkpoint, {len(live)} now"]
    counts = [
        f"group {i} has {len(old)} parameters in the checkpoint, {len(new)} now"
        for i, (old, new) in enumerate(zip(saved, live))
        if len(old) != len(new)
    ]
    shapes = [
        f"parameter {j} of group {i} is {before} in the checkpoint, {now} now"
        for i, (old, new) in enumerate(zip(saved, live))
        for j, (before, now) in enumerate(zip(old, new))
        if before != now
    ]
    return counts or [*shapes[:3], *([f"and {len(shapes) - 3} more"] if len(shapes) > 3 else [])]


def _pack_state(value: Any, dtype: torch.dtype | None, min_size: int) -> Any:
    if type(value) is dict:
        return {key: _pack_state(item, dtype, min_size) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_pack_state(item, dtype, min_size) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    if type(value).__name__ in _QUANTIZED:
        names, attributes = value.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: getattr(value, name) for name in names}
        return {_KIND: type(value).__name__, "tensors": parts, "attributes": attributes}
    if dtype and value.is_floating_point() and value.itemsize > dtype.itemsize and value.numel() >= min_size:
        return {_KIND: "rounded", "tensor": value.to(dtype), "dtype": value.dtype}
    return value


def _unpack_state(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_unpack_state, value))
    if type(value) is not dict:
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: _unpack_state(item) for key, item in value.items()}
    if kind == "rounded":
        return value["tensor"].to(value["dtype"])
    cls = getattr(require(_QUANTIZED[kind], "torchao", "this checkpoint's optimizer state"), kind)
    return cls.__tensor_unflatten__(value["tensors"], value["attributes"])


def _changed_leaves(saved: Any, live: Any, holder: Any = None, key: Any = None, path: str = "") -> Iterator[tuple]:
    """Tensors whose type, dtype or shape is not the saved one: (path, saved, live, container of the live one, key)."""
    if isinstance(saved, dict):
        live = live if isinstance(live, dict) else {}
        for name, item in saved.items():
            yield from _changed_leaves(item, live.get(name), live, name, f"{path}[{name!r}]")
    elif isinstance(saved, list | tuple):
        live = live if isinstance(live, list | tuple) and len(live) == len(saved) else [None] * len(saved)
        for i, item in enumerate(saved):
            yield from _changed_leaves(item, live[i], live, i, f"{path}[{i}]")
    elif isinstance(saved, torch.Tensor) and (
        type(live) is not type(saved) or (live.dtype, live.shape) != (saved.dtype, saved.shape)
    ):
        yield path, saved, live, holder, key


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
