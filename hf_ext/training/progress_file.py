"""`trainer_state.json` and `progress.json` of a checkpoint: how far the run is."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from ..checkpoints.state.progress import PROGRESS
from .now import Training


@dataclass(frozen=True)
class Moment:
    """What moves inside an optimizer step, as it was when the step began, of one process.

    Attributes:
        rng: random states, see `capture_rng`.
        unlogged_loss: sum of training losses since the last log, a scalar on the device.
        num_input_tokens_seen: as in `TrainerState`.
        at_step: state of the parts that are carried so, by name.
    """

    rng: dict[str, Any]
    unlogged_loss: torch.Tensor
    num_input_tokens_seen: int
    at_step: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LossSums:
    """Trainer's sums of training losses, of one process.

    Attributes:
        unlogged: since the last log, a scalar on the device.
        logged: of all steps until then; None where that is not known.
        last_logged_step: when the last log was.
    """

    unlogged: torch.Tensor
    logged: float | None
    last_logged_step: int


def write_progress(folder: Path, now: Training, sums: LossSums, moment: Moment, entries: dict[str, Any]) -> None:
    """Writes `trainer_state.json` as Trainer writes it, and what only we keep.

    Args:
        entries: further ones of `progress.json`.
    """
    state = now.state
    exported = [c for c in [*now.callback_handler.callbacks, now.control] if isinstance(c, ExportableState)]
    states: dict[str, Any] = {}
    for callback in exported:
        states.setdefault(type(callback).__name__, []).append(callback.state())
    named: Any = {name: s[0] if len(s) == 1 else s for name, s in states.items()}
    state.stateful_callbacks = named  # declared as what Trainer makes of it
    tokens, state.num_input_tokens_seen = state.num_input_tokens_seen, moment.num_input_tokens_seen
    best, state.best_model_checkpoint = state.best_model_checkpoint, None  # found by step: folders move
    # What JSON does not hold as a list or as text: a checkpoint is worth more than a log.
    history = json.dumps(state.log_history, default=lambda value: getattr(value, "tolist", lambda: str(value))())
    state.log_history[:] = json.loads(history)
    state.save_to_json(str(folder / "trainer_state.json"))
    state.num_input_tokens_seen, state.best_model_checkpoint = tokens, best
    logged = None if sums.logged is None or not math.isfinite(sums.logged) else sums.logged
    progress = {"format": 1, "logged_loss": logged, "last_logged_step": sums.last_logged_step, **entries}
    (folder / PROGRESS).write_text(json.dumps(progress, indent=2) + "\n")
