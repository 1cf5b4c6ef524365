"""What a file holds by its first bytes, where that is not the text or table that its name promises."""

from __future__ import annotations

import stat
from pathlib import Path

from ..errors import DataError

NUM_FIRST_BYTES = 512

_EXPORT = "Open it in the program that wrote it and save the table as CSV (UTF-8)."
_UNPACK = "Unpack it."
# First bytes -> what begins so, and what to do.
_STARTS = (
    (b"\x1f\x8b", "the file is gzip-compressed; add .gz to its name", ""),
    (b"\xff\xfe", "not UTF-8 but UTF-16", "Save the file as UTF-8."),
    (b"\xfe\xff", "not UTF-8 but UTF-16", "Save the file as UTF-8."),
    (b"PK\x03\x04", "the file is a zip archive or an Excel workbook (.xlsx)", f"{_UNPACK} {_EXPORT}"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "the file is an old Excel workbook (.xls)", _EXPORT),
    (b"BZh", "the file is bzip2-compressed", _UNPACK),
    (b"\xfd7zXZ\x00", "the file is xz-compressed", _UNPACK),
    (b"(\xb5/\xfd", "the file is zstd-compressed", _UNPACK),
    (b"7z\xbc\xaf'\x1c", "the file is a 7z archive", _UNPACK),
    (b"%PDF-", "the file is a PDF", _EXPORT),
    (b"ARROW1", "the file is an Arrow (Feather) file", "Write it as Parquet."),
    (b"\x89HDF\r\n", "the file is an HDF5 file", "Write it as Parquet or CSV."),
    (b"SQLite format 3\x00", "the file is an SQLite database", "Export the table as CSV."),
    (b"version https://git-lfs", "the file is a pointer of Git LFS, not the data", "Fetch it with 'git lfs pull'."),
)
_PARQUET = (b"PAR1", "the file is Parquet", "Name it .parquet.")
_ENCRYPTED_PARQUET = (b"PARE", "the file is Parquet with an encrypted footer", "Write it without encryption.")
_PAGES = ("<!doctype html", "<html", "<head", "<body", "<?xml")


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


def other_content(start: bytes, is_parquet: bool = False) -> str:
    """Returns what a file is and what to do about it, or "" where its first bytes can be what is expected.

    Args:
        start: its first bytes, at most `NUM_FIRST_BYTES` are looked at.
        is_parquet: Parquet is expected, not text.
    """
    start = start[:NUM_FIRST_BYTES]
    for begin, what, remedy in (*_STARTS, _ENCRYPTED_PARQUET, *(() if is_parquet else (_PARQUET,))):
        if start.startswith(begin):
            return f"{what}. {remedy}".rstrip()
    if start and not start.strip(b"\0"):
        return "the file begins with zero bytes, as an unfinished download does. Copy or download it again."
    if start[257:262] == b"ustar":
        return f"the file is a tar archive. {_UNPACK}"
    if len(start) >= 8 and (not any(start[1:64:2]) or not any(start[0:64:2])):
        return "not UTF-8 but UTF-16. Save the file as UTF-8."
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith(tuple(page.encode() for page in _PAGES)):
        return "the file is a web page or XML, as a failed download leaves it. Download the data itself."
    return ""
