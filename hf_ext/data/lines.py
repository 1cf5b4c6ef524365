"""Lines of a text file, plain or gzip: UTF-8, and never more of one record in memory than a bound."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ..errors import DataError
from .contents import NUM_FIRST_BYTES, other_content

# The longest protein known has 35,000 residues: what is longer has lost its line ends, or was made to fill the memory.
MAX_RECORD_BYTES = 64 * 2**20


class Lines:
    """Iterates over the lines of a file as text, line ends kept.

    Readers of records that run over several lines call `begin_record` after each, so that the bound is on a record.

    Args:
        path: of the file.
        max_record_bytes: the bound, if not `MAX_RECORD_BYTES`.

    Attributes:
        number: how many lines were read, which is the last one's number.

    Raises:
        DataError: (while iterating) not UTF-8, damaged or cut gzip data, unreadable, another kind of file, or a record
            above the bound; with file and row.
    """

    def __init__(self, path: Path, max_record_bytes: int | None = None) -> None:
        self.path, self.number = path, 0
        self.max_record_bytes = MAX_RECORD_BYTES if max_record_bytes is None else max_record_bytes
        self._record_bytes = 0

    def begin_record(self) -> None:
        """The line that comes next is the first of a record."""
        self._record_bytes = 0

    def __iter__(self) -> Iterator[str]:
        try:
            with _open(self.path) as file:
                if wrong := other_content(file.peek()):  # type: ignore[attr-defined]
                    raise DataError(f"{self.path}, row 1: {wrong}")
                while raw := file.readline(self.max_record_bytes - self._record_bytes + 1):
                    self.number += 1
                    self._record_bytes += len(raw)
                    if self._record_bytes > self.max_record_bytes:
                        raise DataError(self._too_long())
                    yield (raw.removeprefix(b"\xef\xbb\xbf") if self.number == 1 else raw).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}, row {self.number}: not UTF-8 (byte 0x{error.object[error.start]:02x} at byte "
                f"{error.start + 1} of the line). Save the file as UTF-8."
            ) from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{self.path}: the gzip data is damaged or cut off after row {self.number} ({error}). Copy or download "
                f"it again."
            ) from error
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read after row {self.number} ({error.strerror}).") from error

    def _too_long(self) -> str:
        most = f"{self.max_record_bytes // 2**20} MiB"
        return (
            f"{self.path}, row {self.number}: a record of more than {most}. Look for missing line ends, or a quote "
            f"that is opened and never closed."
        )


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() != ".gz":
        return open(path, "rb")
    with open(path, "rb") as file:
        start = file.read(NUM_FIRST_BYTES)
    if start and not start.startswith(b"\x1f\x8b"):
        wrong = other_content(start) or "its name ends in .gz, but it is not gzip-compressed. Remove .gz from its name."
        raise DataError(f"{path}, row 1: {wrong}")
    return io.BufferedReader(gzip.open(path, "rb"), 1 << 20)
