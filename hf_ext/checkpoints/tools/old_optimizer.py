"""AdamW's state of another training script as a checkpoint to continue from, where it certainly fits the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import TrainerState

from ...errors import CheckpointError
from ..format.trees import save_tree
from ..state.steppers import optimizer_tree, scheduler_tree
from ..state.weights import save_weights
from ..storage.store import CheckpointStore
from .old_files import OldFile

# torch's own; other optimizers with Adam's state keep more, or less, in each entry.
_ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}


def write_old_checkpoint(model: Any, file: OldFile, order: Sequence[str], output_dir: Path) -> dict[str, Any]:
    """Writes `checkpoint-<step>` with the weights and AdamW's moments, where these belong to the model's parameters.

    A run that continues takes the moments, the step count, and the file's learning rate and other settings of AdamW,
    whatever its arguments say; the schedule is the one it asks for, at that step.

    Args:
        model: with the file's weights.
        order: the model's names of the file's entries, in the order of the file: that of the old `parameters()`.

    Returns:
        For a report: `checkpoint`, `step` and `learning_rate`, or `left_out` with the reason.

    Raises:
        OSError: the disk refuses.
    """
    if file.optimizer is None:
        return {"left_out": "the file has none"}
    try:
        names = _match(model, file.optimizer, order)
        optimizer, step = _build(model, file.optimizer, names)
    except CheckpointError as error:
        return {"left_out": f"{error} Start from the weights: the optimizer finds its pace again within its warm-up."}
    state = TrainerState(global_step=step, epoch=float(_number(file, 0, "epoch")))
    # Trainer fails without one, and compares it with this run's; intervals that nobody knows it shall not compare.
    state.train_batch_size = int(_number(file, 1, "batch_size", "train_batch_size"))
    for interval in ("logging_steps", "eval_steps", "save_steps"):
        setattr(state, interval, None)
    staging = CheckpointStore(output_dir).stage(step)
    try:
        _write(model, optimizer, state, staging.path)
        staging.commit(state.epoch or 0.0, {"converted": True})
    except OSError:
        staging.abandon()
        raise
    return {"checkpoint": f"checkpoint-{step}", "step": step, "learning_rate": optimizer.param_groups[0]["lr"]}


def _match(model: Any, state_dict: Mapping[str, Any], order: Sequence[str]) -> list[str]:
    """The model's parameter behind each index of the old state.

    Raises:
        CheckpointError: that is not certain.
    """
    groups, state = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping) or not state:
        raise CheckpointError("It is not what torch's optimizers return as their state.")
    if len(groups) != 1:
        raise CheckpointError(f"It has {len(groups)} parameter groups: which parameter is in which is not recorded.")
    wrong = next((entry for entry in state.values() if set(entry) != _ADAM_STATE), None)
    if wrong is not None:
        raise CheckpointError(f"Its state is {sorted(wrong)}, not AdamW's {sorted(_ADAM_STATE)}.")
    if groups[0].get("decoupled_weight_decay") is False and groups[0].get("weight_decay"):
        raise CheckpointError("It is Adam with weight decay in the gradient, which AdamW does not continue.")
    parameters = dict(model.named_parameters())
    trained = _trained(model)
    indices = list(groups[0].get("params", ()))
    every = [name for name in order if name in parameters]
    names = next((names for names in (every, [n for n in every if n in trained]) if len(names) == len(indices)), None)
    if names is None:
        raise CheckpointError(f"It is of {len(indices)} parameters; {len(trained)} of this model's train.")
    for index, name in zip(indices, names):
        entry = state.get(index)
        if entry is None:
            continue
        shape, expected = tuple(entry["exp_avg"].shape), tuple(parameters[name].shape)
        if shape != expected or name not in trained:
            raise CheckpointError(f"Its entry {index} is of shape {shape}, {name} is {expected} or does not train.")
    return names


def _trained(model: Any) -> list[str]:
    """Names of parameters that train, as the recipes have it: ESM's contact head never gets a gradient."""
    named = model.named_parameters()
    return [name for name, parameter in named if parameter.requires_grad and "contact_head." not in name]


def _build(model: Any, old: Mapping[str, Any], names: Sequence[str]) -> tuple[torch.optim.Optimizer, int]:
    """AdamW over Trainer's two groups, with the old state; and the number of steps taken."""
    parameters, trained = dict(model.named_parameters()), _trained(model)
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]  # it uses no `self`
    groups = [[n for n in trained if n in decayed], [n for n in trained if n not in decayed]]
    optimizer = torch.optim.AdamW([{"params": [parameters[name] for name in group]} for group in groups])
    (old_group,) = old["param_groups"]
    by_name = {name: old["state"][i] for i, name in zip(old_group["params"], names) if i in old["state"]}
    settings = {key: value for key, value in old_group.items() if key != "params"}
    settings.setdefault("initial_lr", settings["lr"])
    fresh, index, state = optimizer.state_dict(), 0, {}
    for group, members in zip(fresh["param_groups"], groups):
        group.update(settings)
        for name in members:
            if name in by_name:
                state[index] = by_name[name]
            index += 1
    optimizer.load_state_dict({"state": state, "param_groups": fresh["param_groups"]})
    steps = {int(entry["step"]) for entry in by_name.values()}
    return optimizer, max(steps)


def _number(file: OldFile, default: int, *names: str) -> int | float:
    """The first of these values of the file that is a positive number."""
    values = (file.values.get(name) for name in names)
    return next((value for value in values if isinstance(value, int | float) and value > 0), default)


def _write(model: Any, optimizer: torch.optim.Optimizer, state: TrainerState, folder: Path) -> None:
    rates = [group["lr"] for group in optimizer.param_groups]
    # All of Trainer's schedules but reduce_lr_on_plateau are of this class; the function is the new run's.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0, last_epoch=state.global_step - 1)
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
    schedule._last_lr = rates
    save_tree(folder, "optimizer", optimizer_tree(optimizer))
    save_tree(folder, "scheduler", scheduler_tree(schedule))
    save_weights(model, folder)
    state.save_to_json(str(folder / "trainer_state.json"))
    progress = {
        "format": 1,
        "last_logged_step": state.global_step,
        "evaluation_pending": False,
        "data_position": None,
        "best_saved_step": None,
        "only_model": False,
    }
    (folder / "progress.json").write_text(json.dumps(progress, indent=2) + "\n")
