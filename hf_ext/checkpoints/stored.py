"""A committed checkpoint on disk, and whether a folder is one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..disk import used_bytes
from ..errors import CheckpointError
from .manifest import MANIFEST, Manifest, check_files, is_plain

CHECKPOINT_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
# What stock Trainer never writes: where the manifest was lost, one of these shows that there was one.
_OUR_FILES = ("progress.json", "frozen.json", "trainable.safetensors")


@dataclass(frozen=True)
class Stored:
    """A committed checkpoint: its folder, and the manifest as it was when this was made."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def run_id(self) -> str:
        return self.manifest.run_id

    @property
    def num_bytes(self) -> int:
        """Bytes allocated on disk now. Cost: one stat per file."""
        return used_bytes(self.path)

    @property
    def ends_epoch(self) -> bool:
        """Whether it was saved at the end of an epoch."""
        return self.manifest.epoch > 0 and float(self.manifest.epoch).is_integer()

    @property
    def stripped(self) -> tuple[str, ...]:
        """Files that `CheckpointStore.strip` dropped, without which training cannot continue."""
        names = self.manifest.facts.get("stripped")
        return tuple(n for n in names if isinstance(n, str) and is_plain(n)) if isinstance(names, list) else ()


def is_folder(path: Path) -> bool:
    """Whether `path` is a real folder rather than a link to one."""
    return path.is_dir() and not path.is_symlink()


def is_ours(folder: Path) -> bool:
    """Whether hf_ext wrote this checkpoint, damaged or not: by its manifest, or by files that only hf_ext writes."""
    return os.path.lexists(folder / MANIFEST) or any((folder / name).exists() for name in _OUR_FILES)


def check_unlisted(stored: Stored) -> None:
    """Refuses weights and states that were put into a verified checkpoint later: Trainer might read them.

    Raises:
        CheckpointError: there are such files.
    """
    for path in sorted(stored.path.rglob("*")):
        name = path.relative_to(stored.path).as_posix()
        if path.suffix in (".safetensors", ".bin", ".pt", ".pth") and name not in stored.manifest.files:
            raise CheckpointError(f"{path}: not in its manifest, so it was put there later. Remove it.")


def read_stored(folder: Path, step: int) -> Stored | None:
    """The checkpoint of `step` in a real folder with a sound manifest, else None. Files are not verified."""
    if not is_folder(folder):
        return None
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        return None
    return Stored(folder, manifest) if manifest.step == step else None


def verify(folder: Path, step: int | None = None) -> tuple[Stored | None, list[str]]:
    """The checkpoint in `folder` if every byte is as its manifest says, and what is wrong otherwise, one line each.

    Args:
        step: which step it should be; None takes the manifest's.

    Cost: reads every file, see `hash_file`.
    """
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        return None, [str(error)]
    wrong = step is not None and manifest.step != step
    problems = [f"{MANIFEST}: expected step {step}, found step {manifest.step}"] if wrong else []
    problems += check_files(folder, manifest)
    return (None, problems) if problems else (Stored(folder, manifest), [])
