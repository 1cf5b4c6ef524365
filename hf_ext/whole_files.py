"""Files that appear whole or not at all, and never inside another folder that shares them by hard links."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives the path of a draft, `.NAME.tmp` beside `path`, that takes the place of `path` if the block ends well.

    Raises:
        OSError: the draft cannot be moved there; it is then removed, as after any error of the block.
    """
    target, draft = Path(path), _draft_of(Path(path))
    draft.unlink(missing_ok=True)  # a killed process left it, perhaps as a link
    try:
        yield draft
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def try_replacing(path: str | os.PathLike[str]) -> None:
    """Finds out, before there is anything to write, whether `replacing` could begin; changes nothing.

    Raises:
        OSError: the draft cannot be made, or the file that is there may not be written to.
    """
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    draft = _draft_of(Path(path))
    draft.unlink(missing_ok=True)
    draft.touch()
    draft.unlink(missing_ok=True)


def _draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes UTF-8, whole or not at all.

    Raises:
        OSError: as `replacing`, or the disk refuses; what stood there still does.
    """
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
