"""What a folder of checkpoints holds, and which one `--resume auto` continues from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..files import used_bytes
from ..reporting.tables import format_table
from .manifest import CHECKPOINT_NAME, is_folder, is_ours, verify

WHOLE, WEIGHTS = "verified", "verified, weights alone"
DAMAGED, STOCK, FOREIGN = "damaged", "of stock Trainer, cannot be verified", "no checkpoint"
HEADERS = ("checkpoint", "what it is", "step", "epoch", "MB")


@dataclass(frozen=True)
class Found:
    """A folder that is named as a checkpoint.

    Attributes:
        kind: one of the constants above.
        problems: of a damaged one, each "NAME: expected ..., found ...".
    """

    name: str
    kind: str
    step: int
    epoch: float | None
    num_bytes: int
    problems: Sequence[str] = ()


def inspect_folder(folder: str | os.PathLike[str]) -> list[Found]:
    """The checkpoints of an output folder, by step; or the one checkpoint that `folder` itself is.

    Raises:
        CheckpointError: no such folder.

    Cost: reads every file of every checkpoint.
    """
    place = Path(folder).resolve()
    if not place.is_dir():
        raise CheckpointError(f"{folder}: expected a folder, found {'a file' if place.exists() else 'nothing'}.")
    if CHECKPOINT_NAME.search(place.name):
        return [_inspect(place)]
    named = [path for path in place.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted(map(_inspect, named), key=lambda found: found.step)


def _inspect(path: Path) -> Found:
    step, num_bytes = int(CHECKPOINT_NAME.findall(path.name)[0]), used_bytes(path)
    if not is_folder(path) or not is_ours(path):
        is_stock = is_folder(path) and (path / "trainer_state.json").is_file()
        return Found(path.name, STOCK if is_stock else FOREIGN, step, None, num_bytes)
    stored, problems = verify(path, step)
    if stored is None:
        return Found(path.name, DAMAGED, step, None, num_bytes, problems)
    kind = WHOLE if any("optim" in name for name in stored.manifest.files) else WEIGHTS
    return Found(path.name, kind, step, stored.manifest.epoch, num_bytes)


def find_next(checkpoints: Sequence[Found]) -> Found | None:
    """The checkpoint that `--resume auto` takes: the highest step that verifies; None where training would begin."""
    return max((one for one in checkpoints if one.kind in (WHOLE, WEIGHTS)), key=lambda one: one.step, default=None)


def format_checkpoints(folder: str, checkpoints: Sequence[Found]) -> str:
    """A table of them, what is wrong with each, and what `--resume auto` would do."""
    rows = [(one.name, one.kind, str(one.step), one.epoch, one.num_bytes / 1e6) for one in checkpoints]
    problems = [f"{one.name}: {problem}" for one in checkpoints for problem in one.problems]
    chosen = find_next(checkpoints)
    if chosen is None:
        outcome = "finds nothing to continue from: training would start at step 0"
    elif chosen.kind == WEIGHTS:
        outcome = f"takes {chosen.name} and refuses it: it holds weights alone; give it as the model to start from"
    else:
        outcome = f"continues from step {chosen.step} (epoch {chosen.epoch or 0:.2f})"
    return "\n".join([folder, *([format_table(rows, HEADERS)] if rows else []), *problems, f"--resume auto {outcome}."])
