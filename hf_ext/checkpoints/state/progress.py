"""What a checkpoint says of the run beside its tensors: `trainer_state.json`, and `progress.json`, which is ours."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from transformers import TrainerState

from ...errors import CheckpointError
from ..format.tensor_files import read_json

PROGRESS = "progress.json"
STATE = "trainer_state.json"
_NUMBERS = ("epoch", "global_step", "max_steps", "num_train_epochs", "num_input_tokens_seen", "total_flos")
_NUMBERS_OR_NONE = ("logging_steps", "eval_steps", "save_steps", "train_batch_size", "best_metric", "best_global_step")
_KNOWN = frozenset(field.name for field in dataclasses.fields(TrainerState))


def read_progress(folder: str | Path) -> dict[str, Any]:
    """What a checkpoint's `progress.json` holds.

    Raises:
        CheckpointError: it is missing, damaged, or a value is of another type; says which.
    """
    path = Path(folder) / PROGRESS
    content = read_json(path)
    wrong = [
        *(name for name in ("evaluation_pending", "only_model") if not isinstance(content.get(name), bool)),
        *(["last_logged_step"] if not _is_count(content.get("last_logged_step")) else []),
        *(["num_left_out"] if not _is_count(content.get("num_left_out", 0)) else []),
        *(["best_saved_step"] if not _is_count(content.get("best_saved_step", ""), or_none=True) else []),
        *(["logged_loss"] if content.get("logged_loss") is not None and not _is_number(content["logged_loss"]) else []),
        *(name for name in ("run_clock", "evaluation_seconds") if not isinstance(content.get(name, {}), dict)),
        *(["begun_loaders"] if not _are_names(content.get("begun_loaders", [])) else []),
        *(["data_position"] if not isinstance(content.get("data_position", ""), dict | None) else []),
    ]
    _refuse(path, content, wrong)
    return content


def check_trainer_state(folder: str | Path, step: int) -> None:
    """Refuses a `trainer_state.json` that Trainer would fail on, or that tells of another step than the manifest.

    Args:
        folder: a checkpoint.
        step: of its manifest.

    Raises:
        CheckpointError: it is missing, damaged, of another step, or a value is of another type; says which.
    """
    path = Path(folder) / STATE
    content = read_json(path)
    callbacks, log = content.get("stateful_callbacks"), content.get("log_history")
    wrong = [
        *sorted(content.keys() - _KNOWN),
        *(name for name in _NUMBERS if not (_is_number(content.get(name, 0)) and math.isfinite(content.get(name, 0)))),
        # The best metric is infinite until an evaluation gave a number.
        *(n for n in _NUMBERS_OR_NONE if content.get(n) is not None and not _is_number(content[n])),
        *([] if isinstance(log, list) and all(isinstance(entry, dict) for entry in log) else ["log_history"]),
        *([] if callbacks is None or _are_callbacks(callbacks) else ["stateful_callbacks"]),
    ]
    _refuse(path, content, wrong)
    if content.get("global_step") != step:
        raise CheckpointError(f"{path}: tells of step {content.get('global_step')}, but the manifest of step {step}.")


def _refuse(path: Path, content: dict[str, Any], wrong: list[str]) -> None:
    if wrong:
        shown = ", ".join(f"{name} = {content.get(name)!r:.60}" for name in wrong)
        raise CheckpointError(f"{path}: not what a run writes there: {shown}. Continue from another checkpoint.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any, or_none: bool = False) -> bool:
    return (or_none and value is None) or (type(value) is int and value >= 0)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _are_callbacks(states: Any) -> bool:
    """As `ExportableState` writes them: by class name one state, or a list of them."""
    if not isinstance(states, dict):
        return False
    every = [state for value in states.values() for state in (value if isinstance(value, list) else [value])]
    return all(
        isinstance(state, dict) and isinstance(state.get("args"), dict) and isinstance(state.get("attributes"), dict)
        for state in every
    )
