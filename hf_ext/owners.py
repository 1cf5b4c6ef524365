"""Which process a file belongs to, and whether that one still lives: by its start too, since numbers come again."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil

_SAME_START_S = 2.0  # without /proc, a start time is told with the precision of the system clock


def describe_process() -> dict[str, Any]:
    """This process, JSON-able: host, place, pid, started."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "place": _place(), "pid": pid, "started": _find_start(pid)}


def is_alive(owner: Mapping[str, Any]) -> bool | None:
    """Whether a process that `describe_process` described lives; None where its processes cannot be seen from here.

    Those are of another machine, of another container, or of before this machine was started anew.

    Raises:
        KeyError, TypeError: not such a description.
    """
    if owner["place"] != _place():
        return None
    try:
        started = _find_start(owner["pid"])
    except PermissionError:
        return None
    return started is not None and abs(started - owner["started"]) < _SAME_START_S


def name_process() -> str:
    """This process as a part of the name of a file that it writes."""
    return f"{_place_hash()}-{os.getpid()}-{_find_start(os.getpid())}"


def is_named_alive(name: str) -> bool | None:
    """As `is_alive`, of what `name_process` returned; None for any other name."""
    place, _, rest = name.partition("-")
    pid, _, started = rest.partition("-")
    try:
        owner = {"place": _place() if place == _place_hash() else None, "pid": int(pid), "started": float(started)}
    except ValueError:
        return None
    return is_alive(owner)


def _place_hash() -> str:
    return hashlib.blake2b(_place().encode(), digest_size=6).hexdigest()


@cache
def _place() -> str:
    """What tells apart those whose process numbers mean different processes; two machines may share a host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _find_start(pid: int) -> float | None:
    """When a process was started; None without one, or where it has ended and only its parent has yet to hear of it.

    Seconds since the machine was, where the kernel says so: those do not move when the clock is set.
    """
    if psutil.LINUX:
        try:
            fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            if psutil.pid_exists(pid):
                raise PermissionError(f"process {pid} is hidden from this user") from None
            return None
        return None if fields[0] in "ZX" else int(fields[19]) / os.sysconf("SC_CLK_TCK")
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
