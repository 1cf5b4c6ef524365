"""Settings of optimizer and schedule when a run is continued with other ones than its checkpoint has."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import LambdaLR

from ...errors import CheckpointError
from .argument_roles import STEP_SIZE

_RATES = frozenset({"learning_rate", "encoder_learning_rate"})
_SCHEDULE = _RATES | STEP_SIZE | {"lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs"}
_GROUP_KEYS = {
    "learning_rate": ("initial_lr",),
    "encoder_learning_rate": ("initial_lr",),
    "weight_decay": ("weight_decay",),
    "adam_beta1": ("betas",),
    "adam_beta2": ("betas",),
    "adam_epsilon": ("eps",),
}


def read_hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """The settings of every parameter group, copied: what the arguments of this run made, before a state is loaded."""
    groups = _inner(optimizer).param_groups
    return [{key: copy.deepcopy(value) for key, value in group.items() if key != "params"} for group in groups]


def changed_hyperparameters(optimizer: Any, made: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Arguments whose value in the loaded state is not this run's: name -> both values, as a line.

    For checkpoints of stock Trainer, which do not say what their run's arguments were.

    Args:
        optimizer: with the checkpoint's state. made: `read_hyperparameters(optimizer)`, from before that.
    """
    changed: dict[str, str] = {}
    for group, fresh in zip(_inner(optimizer).param_groups, made):
        for name in ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"):
            before, now = _setting(group, name), _setting(fresh, name)
            if before != now:
                changed.setdefault(name, f"{name}: {before} in the checkpoint, {now} now")
    return changed


def _setting(group: Mapping[str, Any], name: str) -> float | None:
    value = group.get(_GROUP_KEYS[name][0])
    if value is not None and name in ("adam_beta1", "adam_beta2"):
        value = value[name == "adam_beta2"]
    return None if value is None else float(value)


def apply_changes(optimizer: Any, scheduler: Any, made: Sequence[Mapping[str, Any]], allowed: Collection[str]) -> None:
    """Makes allowed changes take effect, although the states loaded from the checkpoint brought the old values back.

    With nothing allowed that concerns them, optimizer and scheduler stay as they are, bit for bit. A new learning rate
    goes on where the schedule stands; one that follows a metric (reduce_lr_on_plateau, greedy) starts from it again.

    Args:
        optimizer, scheduler: with the checkpoint's states, wrapped by Accelerate or not.
        made: `read_hyperparameters(optimizer)`, from before the states were loaded.
        allowed: `Changes.allowed`.

    Raises:
        CheckpointError: the parameter groups are not those of `made`.
    """
    groups, schedule = _inner(optimizer).param_groups, _inner(scheduler)
    if len(groups) != len(made):
        raise CheckpointError(
            f"The optimizer has {len(groups)} parameter groups, this run made {len(made)}: its arguments cannot be "
            "applied. encoder_learning_rate can change its value, but not be added or left out."
        )
    before = [group.get("initial_lr") for group in groups]
    for group, fresh in zip(groups, made):
        keys = {key for name in allowed for key in _GROUP_KEYS.get(name, ())}
        keys |= {key for key in fresh if key not in ("lr", "initial_lr")} if "optim_args" in allowed else set()
        group.update({key: copy.deepcopy(fresh[key]) for key in keys if key in fresh})
    if {*allowed} & {*_SCHEDULE, "world_size"}:
        _reschedule(groups, schedule, before, made, bool({*allowed} & _RATES))


def _reschedule(groups: Any, schedule: Any, before: list[Any], made: Any, is_new_rate: bool) -> None:
    """Sets the learning rates of the next step."""
    if isinstance(schedule, LambdaLR):  # all of transformers' schedules that do not follow a metric
        schedule.base_lrs = [group["initial_lr"] for group in groups]
        factors = [function(schedule.last_epoch) for function in schedule.lr_lambdas]
        rates = [base * factor for base, factor in zip(schedule.base_lrs, factors)]
    elif not is_new_rate:
        return
    elif hasattr(schedule, "base_lrs"):
        schedule.base_lrs = [group["initial_lr"] for group in groups]
        rates = [g["lr"] * g["initial_lr"] / old if old else g["lr"] for g, old in zip(groups, before)]
    else:
        rates = [fresh["lr"] for fresh in made]
    for group, rate in zip(groups, rates):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    schedule._last_lr = [group["lr"] for group in groups]


def _inner(wrapped: Any) -> Any:
    """What Accelerate wrapped."""
    if isinstance(wrapped, AcceleratedOptimizer):
        return wrapped.optimizer
    return wrapped.scheduler if isinstance(wrapped, AcceleratedScheduler) else wrapped
