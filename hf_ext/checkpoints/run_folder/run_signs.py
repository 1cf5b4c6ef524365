"""What shows that a run of ours wrote in a folder: content, since other programs' files have the same names."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..format.manifest import MANIFEST, Manifest
from .finished_model import MODEL_MANIFEST

_CHECKPOINT = re.compile(r"((damaged|previous)-|\.staging-|\.trash-)?checkpoint-\d+.*")
_LOG_LINE = re.compile(rb"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ hf_ext[\w.]*: ", re.M)
_PLAN = {"preset", "hardware", "versions", "facts", "decisions"}
_RESULTS = {"format", "task", "trainer", "settings", "environment", "costs"}
_MAX_BYTES = 1 << 26  # a record above it is none of ours


def is_of_a_run(folder: Path) -> bool:
    """Whether `run.log`, a plan, results, a model's manifest or a checkpoint in `folder` is what a run of ours writes.

    Links are not followed. Cost: reads at most these files.
    """
    if _has_keys(folder / "plan.json", _PLAN) or _has_keys(folder / "all_results.json", _RESULTS):
        return True
    if _LOG_LINE.search(_read(folder / "run.log", 1 << 20)) or _has_manifest(folder, MODEL_MANIFEST):
        return True
    names = [name for name in os.listdir(folder) if _CHECKPOINT.fullmatch(name)]
    return any(_has_manifest(folder / name, MANIFEST) for name in names)


def _has_keys(path: Path, keys: Collection[str]) -> bool:
    try:
        content: Any = json.loads(_read(path, _MAX_BYTES))
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.keys() >= set(keys)


def _has_manifest(folder: Path, name: str) -> bool:
    try:
        Manifest.read(folder, name)
    except CheckpointError:
        return False
    return not folder.is_symlink()


def _read(path: Path, num_bytes: int) -> bytes:
    """The beginning of a regular file; nothing where there is none that this user may read."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return b""
        with path.open("rb") as file:
            return file.read(num_bytes)
    except OSError:
        return b""
