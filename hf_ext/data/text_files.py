"""Text files, plain or gzip, checked while they are read: UTF-8, lines that end, and no other kind of file."""

from __future__ import annotations

import codecs
import gzip
import logging
import re
import stat
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import DataError

BLOCK_BYTES = 4 * 2**20

_LONE_CR = re.compile(rb"\r(?!\n)").search

logger = logging.getLogger(__name__)


def irregular_kind(path: Path) -> str:
    """Returns what `path` is, or links to, if not a regular file, else "": a pipe or a device may never end."""
    kind = stat.S_IFMT(path.stat().st_mode)
    names = {stat.S_IFREG: "", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return names.get(kind, "a device")


def check_regular(path: Path) -> None:
    """Raises DataError unless `path` is, or links to, a regular file."""
    try:
        kind = irregular_kind(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    if kind:
        raise DataError(f"{path}: is {kind}, not a regular file. Save the rows in a file, and name that.")


class TextFile:
    """The bytes of a text file, unpacked if its name ends in .gz, without a byte order mark: a file object for pyarrow.

    Attributes:
        row: number of the line that the next byte belongs to.
        has_quotes: whether what was read holds a `"`.

    Raises:
        DataError: not a regular file; (while reading) damaged or cut gzip data, unreadable, not UTF-8 text, or a line
            that ends in CR alone; with file and row.
    """

    def __init__(self, path: Path) -> None:
        check_regular(path)
        self.path, self.row, self.has_quotes, self.closed = path, 1, False, False
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            self._file: Any = (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb")
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}).") from error

    def read(self, size: int = BLOCK_BYTES) -> bytes:
        """Returns at most `size` (at least 4) bytes; none at the end."""
        block = self._read(size - 1)
        if block.endswith(b"\r"):
            block += self._read(1)
        self._check(block)
        is_marked = self.row == 1 and block.startswith(codecs.BOM_UTF8)
        self.row += block.count(b"\n")
        self.has_quotes = self.has_quotes or b'"' in block
        return block.removeprefix(codecs.BOM_UTF8) if is_marked else block

    def _read(self, size: int) -> bytes:
        try:
            block: bytes = self._file.read(size)
            return block
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{self.path}: the gzip data is damaged or cut off after row {self.row - 1} ({error}). Copy or "
                f"download it again; if it is not packed, take .gz off its name."
            ) from error
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read after row {self.row - 1} ({error.strerror}).") from error

    def _check(self, block: bytes) -> None:
        place = block.find(0)
        try:
            if not block.isascii() or not block or self._decoder.getstate()[0]:
                self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            block, place = error.object, error.start
        if place >= 0:
            row = self.row + block.count(b"\n", 0, place)
            raise DataError(
                f"{self.path}, row {row}: not UTF-8 text (byte 0x{block[place]:02x}). Save the file as UTF-8; of a "
                f"workbook or an archive (Excel, zip), save or unpack the table as CSV; name gzip .gz and Parquet "
                f".parquet."
            )
        if b"\r" in block and (lone := _LONE_CR(block)):
            row = self.row + block.count(b"\n", 0, lone.start())
            raise DataError(f"{self.path}, row {row}: a line ends in CR alone. Save the file with LF or CRLF.")

    def close(self) -> None:
        """Closes the file."""
        self.closed = True
        self._file.close()

    def __enter__(self) -> TextFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of every line, without its end; DataError as `TextFile`."""
    number, rest = 1, b""
    with TextFile(path) as file:
        while block := file.read():
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                yield number, line.decode().removesuffix("\r")
                number += 1
    if rest:
        yield number, rest.decode()


@lru_cache(maxsize=1000)
def warn_once(text: str) -> None:
    """Logs a warning the first time only: streams read their file in every pass."""
    logger.warning("%s", text)
