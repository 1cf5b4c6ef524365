"""What a folder of checkpoints holds, whether it verifies, and what a resumed run would do with it. Changes nothing."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ...disk import used_bytes
from ...errors import CheckpointError
from ..format.stored import CHECKPOINT_NAME, is_folder, is_ours, verify
from ..format.tensor_files import find_file, read_json
from ..state.weights import check_listed
from .remains import Remains, find_remains
from .resumable_content import Contents, read_contents, read_stock_contents

STATE = "trainer_state.json"
OURS, STRIPPED, STOCK, DAMAGED, FOREIGN = "ours", "stripped", "stock", "damaged", "foreign"


@dataclass(frozen=True)
class Checkpoint:
    """One folder that is, was or looks like a checkpoint.

    Attributes:
        kind: "ours" (verified), "stripped" (verified; its optimizer was dropped), "stock" (of stock Trainer: readable,
            which is all that can be told), "damaged", "foreign".
        is_ours: whether hf_ext wrote it, damaged or not.
        problems: each "NAME: expected ..., found ...".
        refusal: why a run could not continue from it although it verifies; "" where it could.
        roles: of "newest", "best".
        fate: what `--resume auto` would do with it.
        facts: of the run that wrote it, as `describe_run` recorded them.
    """

    name: str
    kind: str
    num_bytes: int
    is_ours: bool = False
    step: int | None = None
    epoch: float | None = None
    run_id: str | None = None
    problems: tuple[str, ...] = ()
    refusal: str = ""
    contents: Contents = field(default_factory=Contents)
    roles: tuple[str, ...] = ()
    fate: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Inspection:
    """What `inspect_folder` found.

    Attributes:
        continues_from: name of the checkpoint from which a run would go on; None where it would not.
        outcome: that, in a sentence.
    """

    folder: str
    checkpoints: tuple[Checkpoint, ...]
    remains: tuple[Remains, ...]
    continues_from: str | None
    outcome: str


def inspect_folder(folder: str | os.PathLike[str]) -> Inspection:
    """Looks at an output folder, as `--resume auto` would, or at one checkpoint, as if a run were told to take it.

    Nothing is written, renamed or deleted, and nothing that is pickled is read. A run that is given other arguments,
    data or another model than those recorded may still refuse.

    Raises:
        CheckpointError: no such folder.

    Cost: reads every file of every checkpoint, see `hash_file`.
    """
    place = Path(folder)
    if not place.is_dir():
        raise CheckpointError(f"{folder}: expected a folder, found {'a file' if place.exists() else 'nothing'}.")
    if _is_checkpoint(place):
        return _inspect_one(place)
    names = sorted(os.listdir(place), key=_by_step)
    checkpoints = [_inspect_named(place / name) for name in names if name.startswith("checkpoint-")]
    remains = find_remains(place)
    # The next run first commits what a killed one had finished but for its rename.
    staged = [
        replace(inspect_checkpoint(place / entry.name, entry.commits_step), name=f"checkpoint-{entry.commits_step}")
        for entry in remains
        if entry.commits_step is not None
    ]
    chosen = _choose([*checkpoints, *staged])
    marked = _mark(checkpoints, chosen)
    continues = chosen is not None and not chosen.refusal
    return Inspection(
        str(folder), marked, remains, chosen.name if chosen and continues else None, _describe_choice(chosen)
    )


def inspect_checkpoint(path: Path, step: int | None = None) -> Checkpoint:
    """One checkpoint, without its place among others.

    Args:
        step: which step it should be; None takes the number in the folder's name, if there is one.
    """
    numbered = CHECKPOINT_NAME.fullmatch(path.name)
    step = step if step is not None or numbered is None else int(numbered[1])
    start = Checkpoint(path.name, FOREIGN, used_bytes(path), step=step)
    if not is_folder(path):
        other = "a link" if path.is_symlink() else "a file"
        return replace(start, problems=(f"{path.name}: expected a folder, found {other}",))
    if is_ours(path):
        return _inspect_ours(path, replace(start, is_ours=True))
    if not (path / STATE).is_file():
        return replace(start, problems=(f"{path.name}: expected manifest.json or {STATE}, found neither",))
    return _inspect_stock(path, start)


def _inspect_named(path: Path) -> Checkpoint:
    """What stands in an output folder under a checkpoint's name, or under one that only looks like it."""
    if CHECKPOINT_NAME.fullmatch(path.name):
        return inspect_checkpoint(path)
    return Checkpoint(path.name, FOREIGN, used_bytes(path), problems=(f"{path.name}: not checkpoint-<step>",))


def _inspect_ours(path: Path, start: Checkpoint) -> Checkpoint:
    stored, problems = verify(path, start.step)
    if stored is None:
        return replace(start, kind=DAMAGED, problems=tuple(problems))
    manifest = stored.manifest
    known = replace(start, step=stored.step, epoch=manifest.epoch, run_id=stored.run_id, facts=manifest.facts)
    try:
        check_listed(path, manifest.files)
        contents = read_contents(path, manifest)
    except CheckpointError as error:
        return replace(known, kind=OURS, refusal=str(error))
    if stored.stripped:
        dropped = f"{', '.join(stored.stripped)} were dropped from it"
        return replace(known, kind=STRIPPED, contents=contents, refusal=dropped)
    refusal = f"{', '.join(contents.essential)} missing" if contents.essential else ""
    if contents.only_model:
        refusal = "it holds weights alone (--save_only_model): give it as the model to start from, or --resume no"
    return replace(known, kind=OURS, contents=contents, refusal=refusal)


def _inspect_stock(path: Path, start: Checkpoint) -> Checkpoint:
    problems = [line for file in sorted(path.iterdir()) if (line := _unreadable(file))]
    try:
        state = read_json(path / STATE)
        contents = read_stock_contents(path, state)
    except CheckpointError as error:
        return replace(start, kind=DAMAGED, problems=(str(error), *problems))
    epoch = state.get("epoch")
    known = replace(start, step=start.step or state.get("global_step"), epoch=epoch, contents=contents)
    if problems:
        return replace(known, kind=DAMAGED, problems=tuple(problems))
    return replace(known, kind=STOCK, refusal=f"{', '.join(contents.essential)} missing" if contents.essential else "")


def _unreadable(path: Path) -> str:
    """What is wrong with a file of stock Trainer, as far as its own format tells; "" where nothing is."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                return ""
        if path.suffix in (".pt", ".pth", ".bin"):
            with zipfile.ZipFile(path) as archive:
                wrong = archive.testzip()
            return f"{path.name}: expected an archive with sound checksums, found {wrong} damaged" if wrong else ""
    except (OSError, SafetensorError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        kind = "safetensors file" if path.suffix == ".safetensors" else "zip archive, as torch.save writes it"
        return f"{path.name}: expected a {kind}, found {used_bytes(path)} bytes that are none ({error})"
    return ""


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one checkpoint; an output folder has a `trainer_state.json` too, beside its checkpoints."""
    if CHECKPOINT_NAME.fullmatch(folder.name):
        return True
    if any(name.startswith(("checkpoint-", ".staging-checkpoint-")) for name in os.listdir(folder)):
        return False
    return is_ours(folder) or (find_file(folder, STATE) is not None and any(folder.glob("optimizer.*")))


def _inspect_one(folder: Path) -> Inspection:
    found = inspect_checkpoint(folder.resolve())  # a link that is named is followed, as a run does
    continues = found.kind in (OURS, STOCK) and not found.refusal
    reason = found.refusal or f"it is {found.kind}"
    outcome = (
        f"--resume_from_checkpoint {folder} continues from step {found.step}."
        if continues
        else f"--resume_from_checkpoint {folder} is refused: {reason}."
    )
    return Inspection(str(folder), (found,), (), found.name if continues else None, outcome)


def _choose(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The checkpoint of hf_ext with the highest step that verifies and was not stripped."""
    ours = [found for found in checkpoints if found.kind == OURS and found.step is not None]
    return max(ours, key=lambda found: found.step or 0, default=None)


def _describe_choice(chosen: Checkpoint | None) -> str:
    if chosen is None:
        return "--resume auto finds nothing to continue from: training would start at step 0."
    if chosen.refusal:
        return f"--resume auto takes {chosen.name} and refuses it: {chosen.refusal}."
    return f"--resume auto continues from {chosen.name} (step {chosen.step}, epoch {chosen.epoch or 0:.2f})."


def _mark(checkpoints: Sequence[Checkpoint], chosen: Checkpoint | None) -> tuple[Checkpoint, ...]:
    """Adds to each its roles, and what `--resume auto` would do with it."""
    newest = _choose(checkpoints)
    best = newest.contents.best_step if newest else None
    marked = []
    for found in checkpoints:
        is_valid = found.kind in (OURS, STRIPPED)
        roles = [role for role, step in (("newest", newest and newest.step), ("best", best)) if found.step == step]
        marked.append(replace(found, roles=tuple(roles) if is_valid else (), fate=_fate(found, chosen)))
    return tuple(marked)


def _fate(found: Checkpoint, chosen: Checkpoint | None) -> str:
    if chosen is not None and found.name == chosen.name:
        return "refused" if found.refusal else "continued from"
    if not found.is_ours:
        return "left alone unless it is named" if found.kind == STOCK else "left alone"
    if chosen is not None and (found.step or 0) < (chosen.step or 0):
        return "older"
    return f"renamed damaged-{found.name}" if found.kind == DAMAGED else f"renamed previous-{found.name}"


def _by_step(name: str) -> tuple[int, str]:
    numbered = CHECKPOINT_NAME.fullmatch(name)
    return (int(numbered[1]) if numbered else -1, name)
