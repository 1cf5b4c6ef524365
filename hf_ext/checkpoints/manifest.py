"""What a checkpoint promises: size and sha256 of every file, and whose, which step and under what facts it is."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..disk import sync
from ..errors import CheckpointError

MANIFEST = "manifest.json"
MANIFEST_DRAFT = f"{MANIFEST}.tmp"
PROGRESS = "progress.json"  # what parts of hf_ext keep in a checkpoint
FORMAT = 1
_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """Length in bytes and sha256 (64 hex digits) of one file."""

    size: int
    sha256: str


def hash_file(path: str | os.PathLike[str]) -> FileRecord:
    """Reads a whole file. Cost: 0.5 to 2 s per GB; the interpreter lock is free meanwhile.

    Raises:
        OSError: it cannot be read.
    """
    digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


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
    facts: dict[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self) -> None:
        for name in self.files:
            if not is_plain(name):
                raise CheckpointError(
                    f"File name {name!r}: expected a plain path inside the checkpoint, such as 'a/b.json'."
                )

    def write(self, folder: str | os.PathLike[str], name: str = MANIFEST) -> None:
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
    def read(cls, folder: str | os.PathLike[str], name: str = MANIFEST, may_link: bool = False) -> Manifest:
        """The manifest of `folder`.

        Raises:
            CheckpointError: it is missing, unreadable, not byte for byte what was written, or of another format.
        """
        path = Path(folder) / name
        try:
            raw = read_regular(path.resolve() if may_link else path)
            content = json.loads(raw.decode("ascii"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: expected a manifest, found nothing.") from None
        except OSError as error:
            raise CheckpointError(f"{path}: expected a manifest, found an unreadable file ({error}).") from error
        except (ValueError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path}: expected JSON, found {len(raw)} bytes that are not ({error}).") from error
        return cls._from_content(content, raw, path)

    @classmethod
    def _from_content(cls, content: Any, raw: bytes, path: Path) -> Manifest:
        version = content.get("format") if isinstance(content, dict) else None
        if isinstance(version, int) and version > FORMAT:
            raise CheckpointError(f"{path}: expected format {FORMAT} or older, found {version}. Update hf_ext.")
        try:
            promised = content.pop("sha256")
            files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
            manifest = cls(files=files, **content)
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: expected the fields of a manifest, found others ({error!r}).") from error
        found = manifest._digest()
        if promised != found:
            raise CheckpointError(f"{path}: expected content with sha256 {promised}, found {found}.")
        if raw != manifest._text().encode("ascii"):
            raise CheckpointError(f"{path}: expected the bytes that were written, found others with the same content.")
        if not manifest._has_types():
            raise CheckpointError(f"{path}: expected step, epoch, sizes and hashes, found values of other types.")
        return manifest

    def _body(self) -> dict[str, Any]:
        files = {name: {"size": record.size, "sha256": record.sha256} for name, record in self.files.items()}
        head = {"format": self.format, "run_id": self.run_id, "step": self.step, "epoch": self.epoch}
        return json.loads(json.dumps({**head, "facts": self.facts, "files": files}))  # as it will be read: keys are str

    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self._body(), sort_keys=True).encode("ascii")).hexdigest()

    def _text(self) -> str:
        return json.dumps({**self._body(), "sha256": self._digest()}, indent=1, sort_keys=True) + "\n"

    def _has_types(self) -> bool:
        sizes = [record.size for record in self.files.values()]
        return (
            all(type(number) is int and number >= 0 for number in [self.step, *sizes])
            and all(isinstance(text, str) for text in [self.run_id, *(r.sha256 for r in self.files.values())])
            and isinstance(self.epoch, int | float)
            and isinstance(self.facts, dict)
        )


def is_plain(name: str) -> bool:
    """Whether `name` is a relative path, with `/`, that stays inside its folder."""
    return not {"", ".", ".."} & set(name.split("/")) and not {"\\", "\0"} & set(name)


def read_regular(path: Path) -> bytes:
    """A file's content; never that of a link, nor of a pipe or device, which could make the reader wait for ever.

    Raises:
        CheckpointError: it is no regular file.
        OSError: it cannot be read.
    """
    kind = path.lstat().st_mode
    if not stat.S_ISREG(kind):
        found = "a symlink" if stat.S_ISLNK(kind) else "a folder" if stat.S_ISDIR(kind) else "a pipe or device"
        raise CheckpointError(f"{path}: expected a file, found {found}.")
    return path.read_bytes()


def check_files(folder: str | os.PathLike[str], manifest: Manifest, may_link: bool = False) -> list[str]:
    """What in `folder` is not as the manifest says, one line per file: "NAME: expected ..., found ...".

    Files that the manifest does not name are not looked at. Cost: reads every file of the right size, see `hash_file`.
    """
    problems = []
    for name, record in sorted(manifest.files.items()):
        try:
            found = _difference(Path(folder), name, record, may_link)
        except FileNotFoundError:
            found = (f"{record.size} bytes", "nothing")
        except OSError as error:
            found = (f"{record.size} bytes", f"an unreadable file ({error.strerror})")
        if found:
            problems.append(f"{name}: expected {found[0]}, found {found[1]}")
    return problems


def _difference(folder: Path, name: str, record: FileRecord, may_link: bool) -> tuple[str, str] | None:
    """What is expected of a file and what is found instead; None where it is as recorded."""
    place = folder
    for part in PurePosixPath(name).parts:
        place = place / part
        if place.is_symlink() and not may_link:
            return "a file", f"a symlink to {os.readlink(place)}"
    status = place.stat()
    if not stat.S_ISREG(status.st_mode):
        return "a file", "something else"
    if status.st_size != record.size:
        return f"{record.size} bytes", f"{status.st_size} bytes"
    found = hash_file(place)
    return None if found == record else (f"sha256 {record.sha256}", f"sha256 {found.sha256}")
