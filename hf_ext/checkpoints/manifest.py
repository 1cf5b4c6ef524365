"""What a checkpoint promises (size and hash of every file, whose, which step), and whether a folder keeps it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..errors import CheckpointError
from ..files import Json, StrPath, parse_json, sync, used_bytes

MANIFEST = "manifest.json"
MANIFEST_DRAFT = f"{MANIFEST}.tmp"
PROGRESS = "progress.json"  # what parts of hf_ext keep in a checkpoint
CHECKPOINT_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
# What stock Trainer never writes: where the manifest was lost, one of these shows that there was one.
_OUR_FILES = (PROGRESS, "trainable.safetensors")


@dataclass(frozen=True)
class FileRecord:
    """Length in bytes and sha256 (64 hex digits) of one file."""

    size: int
    sha256: str


def hash_file(path: StrPath) -> FileRecord:
    """Reads a whole file. Cost: 0.5 to 2 s per GB; the interpreter lock is free meanwhile.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(file.tell(), digest)


@dataclass(frozen=True)
class Manifest:
    """What stands in a checkpoint's `manifest.json`.

    Attributes:
        run_id: the run that may delete the checkpoint.
        step: optimizer steps done. epoch: epochs done, as in `TrainerState`.
        facts: JSON-able; what else a resumed run should know.
        files: every other file of the checkpoint, by its path relative to the folder, with `/`.

    Raises:
        CheckpointError: a file name that is absolute, leaves the folder, or means different things on other systems.
    """

    run_id: str
    step: int
    epoch: float
    facts: Json = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.files:
            # Relative, with `/`, and inside its folder.
            if {"", ".", ".."} & set(name.split("/")) or {"\\", "\0"} & set(name):
                raise CheckpointError(
                    f"File name {name!r}: expected a plain path inside the checkpoint, such as 'a/b.json'."
                )

    def write(self, folder: StrPath, name: str = MANIFEST) -> None:
        """Puts `manifest.json`, or `name`, into `folder`, whole or not at all, and waits until it is on the disk.

        Raises:
            OSError: the disk failed; a manifest that stood there still does.
        """
        draft = Path(folder) / f"{name}.tmp"
        with draft.open("w", encoding="ascii") as file:
            file.write(self._text())
        sync(draft)
        os.replace(draft, Path(folder) / name)
        sync(folder)

    @classmethod
    def read(cls, folder: StrPath, name: str = MANIFEST, may_link: bool = False) -> Manifest:
        """Reads the manifest of `folder`.

        Raises:
            CheckpointError: it is missing, unreadable, or not byte for byte what was written.
        """
        path = Path(folder) / name
        content = read_json(path.resolve() if may_link else path)
        try:
            promised = content.pop("sha256")
            files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
            manifest = cls(files=files, **content)
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: expected the fields of a manifest, found others ({error!r}).") from error
        if path.read_bytes() != manifest._text().encode("ascii"):
            raise CheckpointError(f"{path}: expected the bytes that were written (sha256 {promised}), found others.")
        return manifest

    def _text(self) -> str:
        body = json.loads(json.dumps(asdict(self)))  # as it will be read: keys are str
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode("ascii")).hexdigest()
        return json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def read_json(path: Path) -> Json:
    """Reads a JSON object from a regular file: never from a link, nor from a pipe, which could block for ever.

    Raises:
        CheckpointError: it is not there, no file, no JSON, nested too deeply, or no object.
    """
    if path.is_symlink() or not path.is_file():
        found = "a link, folder, pipe or device" if os.path.lexists(path) else "nothing"
        raise CheckpointError(f"{path}: expected a file, found {found}.")
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{path}: expected JSON, found bytes that are not ({error}).") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found a {type(content).__name__}.")
    return content


def check_files(folder: StrPath, manifest: Manifest, may_link: bool = False) -> list[str]:
    """Checks the files in `folder` against the manifest; one line per fault: "NAME: expected ..., found ...".

    Files that the manifest does not name are not looked at. Cost: reads every file of the right size, see `hash_file`.
    """
    problems = []
    for name, record in sorted(manifest.files.items()):
        path = Path(folder, name)
        expected = f"{record.size} bytes"
        found = ""
        links = [part for part in (path, *path.parents) if part.is_symlink() and part.is_relative_to(folder)]
        if links and not may_link:
            expected = "a file"
            found = f"a symlink to {os.readlink(links[0])}"
        elif not path.is_file():
            found = "something else" if path.exists() else "nothing"
        elif (size := path.stat().st_size) != record.size:
            found = f"{size} bytes"
        else:
            expected = f"sha256 {record.sha256}"
            try:
                actual = hash_file(path).sha256
                found = "" if actual == record.sha256 else f"sha256 {actual}"
            except OSError as error:
                found = f"an unreadable file ({error.strerror})"
        if found:
            problems.append(f"{name}: expected {expected}, found {found}")
    return problems


# --- a folder that keeps its promise ----------------------------------------------------------------------------------


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


def is_folder(path: Path) -> bool:
    """Returns whether `path` is a real folder rather than a link to one."""
    return path.is_dir() and not path.is_symlink()


def is_ours(folder: Path) -> bool:
    """Returns whether hf_ext wrote this checkpoint, damaged or not: by its manifest, or by files of its own."""
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
    """Reads the checkpoint of `step` in a real folder with a sound manifest, else None. Files are not verified."""
    if not is_folder(folder):
        return None
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        return None
    return Stored(folder, manifest) if manifest.step == step else None


def verify(folder: Path, step: int | None = None) -> tuple[Stored | None, list[str]]:
    """Verifies the checkpoint in `folder`: returns it, or None, and what is wrong, line by line.

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
