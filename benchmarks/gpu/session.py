"""Parts of a session one after the other, each in a process of its own with a time limit; JSON after each.

A part that raises, crashes, hangs or is out of memory becomes an entry with the end of what it printed, and the next
one begins. What it had measured until then is kept.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hf_ext.comparing.running import end_processes
from hf_ext.errors import ArgumentError
from hf_ext.files import write_text

ROOT = Path(__file__).resolve().parents[2]
FORMAT = 1
FINISHED = "finished"
NO_TIME = "no time left"
LOG_LINES, LOG_CHARACTERS = 30, 4000
POLL_S, LOOK_S = 0.05, 1.0  # whether it has ended; what it has started
_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|\bMemoryError\b|MemoryExhausted|CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Part:
    """Something to measure.

    Attributes:
        command: of its process; `{result}`, `{seconds}` become the JSON file that it writes, whole, as often as it
            likes, and its time limit. Of one that writes none the end of its log is kept.
        minutes: of a session of 20; what earlier parts leave is shared out among the later ones.
    """

    name: str
    command: tuple[str, ...]
    minutes: float


@dataclass
class Session:
    """The JSON of a session.

    Args:
        path: the file; it is there, and whole, from the first part on.
        machine: what was measured on. A file of another machine or size is refused, never overwritten.
        code: identifies the sources; parts that finished on the same are kept.
        size: of the shapes.

    Raises:
        ArgumentError: `path` holds something else, or a session of another machine or size.
    """

    path: Path
    machine: dict[str, Any]
    code: dict[str, str]
    size: str
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.parts = _read_parts(self.path, self.machine, self.size)

    def is_done(self, name: str) -> bool:
        """Whether a part finished on these sources."""
        entry = self.parts.get(name, {})
        return entry.get("status") == FINISHED and entry.get("code") == self.code

    def record(self, name: str, entry: dict[str, Any]) -> None:
        """Writes the entry of a part, and with it the file."""
        self.parts[name] = clean({**entry, "code": self.code})
        written = {"format": FORMAT, "size": self.size, "machine": self.machine, "parts": self.parts}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(written, indent=1) + "\n")


def _read_parts(path: Path, machine: dict[str, Any], size: str) -> dict[str, dict[str, Any]]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        there, other = dict(kept["machine"]), kept["size"]
        parts: dict[str, dict[str, Any]] = dict(kept["parts"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{path}: holds no session ({type(error).__name__}). Give another --output.") from error
    if (there.get("device"), there.get("memory_gib"), other) != (machine["device"], machine["memory_gib"], size):
        raise ArgumentError(
            f"{path}: a session on {there.get('device')} at size {other}; this is {machine['device']} at size {size}, "
            "and does not overwrite it. Give another --output, or move that file away."
        )
    return parts


def clean(value: Any) -> Any:
    """Without the paths of this machine, in all texts of a JSON value."""
    if isinstance(value, dict):
        return {name: clean(each) for name, each in value.items()}
    if isinstance(value, list):
        return [clean(each) for each in value]
    if isinstance(value, str):
        for path, name in _places():
            value = value.replace(path, name)
    return value


def _places() -> list[tuple[str, str]]:
    """Paths with what stands for each, the longest first; none so short that it is a part of words."""
    found = {str(ROOT): "PROJECT", sys.prefix: "PYTHON", sys.base_prefix: "PYTHON", tempfile.gettempdir(): "TMP"}
    found |= {str(Path.home()): "HOME"}
    return sorted(((path, name) for path, name in found.items() if len(path) > 3), key=lambda each: -len(each[0]))


class Stop:
    """Whether somebody asked the session to end; a flag and no exception, which could come between two lines."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it Ctrl-C and SIGTERM set the flag, however often they come."""

        def ask(*_: Any) -> None:
            self.asked = True

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_session(session: Session, parts: Sequence[Part], minutes: float) -> bool:
    """Runs the parts that are not done; whether all are now. To be called from the main thread.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM, after the part at hand has ended and was written down.
    """
    stop = Stop()
    with stop.listening():
        _run_open_parts(session, parts, minutes, stop)
    if stop.asked:
        raise KeyboardInterrupt
    return all(session.is_done(part.name) for part in parts)


def _run_open_parts(session: Session, parts: Sequence[Part], minutes: float, stop: Stop) -> None:
    open_parts = [part for part in parts if not session.is_done(part.name)]
    for part in parts:
        if part not in open_parts:
            print(f"{part.name}: finished before, on these sources", flush=True)
    ends = time.monotonic() + 60 * minutes
    for number, part in enumerate(open_parts):
        if stop.asked:
            return
        share = part.minutes / sum(each.minutes for each in open_parts[number:])
        limit_s = share * (ends - time.monotonic())
        print(f"{part.name}: at most {limit_s:.0f} s", flush=True)
        entry = run_part(part, limit_s, stop) if limit_s > 0 else {"status": NO_TIME}
        session.record(part.name, entry)
        print(f"{part.name}: {entry['status']} after {entry.get('seconds', 0):.0f} s", flush=True)


def run_part(part: Part, limit_s: float, stop: Stop) -> dict[str, Any]:
    """The entry of a part: status, seconds, what it wrote, and the end of its log where it did not finish."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        given = {"result": str(result), "seconds": f"{limit_s:.1f}"}
        command = [word.format(**given) if word in ("{result}", "{seconds}") else word for word in part.command]
        began = time.monotonic()
        with log.open("w") as stream:
            status, code = _wait(command, stream, limit_s, stop)
        entry: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - began, 1)}
        entry["limit_s"] = round(limit_s, 1)
        printed = log.read_text(errors="replace")
        if status == "failed" and _MEMORY.search(_last_lines(printed)):
            entry["status"] = "out of memory"
        if code:
            entry["exit_code"] = code
        entry["result"] = json.loads(result.read_text()) if result.exists() else None
        if entry["status"] != FINISHED or entry["result"] is None:
            entry["log_end"] = _last_lines(printed)
        return entry


def _last_lines(printed: str) -> str:
    return "\n".join(printed.strip().splitlines()[-LOG_LINES:])[-LOG_CHARACTERS:]


def find_descendants(pid: int) -> set[psutil.Process]:
    """Of a process; launchers give their ranks sessions of their own, so that its group does not have them all."""
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _wait(command: list[str], stream: Any, limit_s: float, stop: Stop) -> tuple[str, int | None]:
    """Status and exit code; the process, and all that it started, are gone afterwards."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    # A session of its own: Ctrl-C reaches us alone, and what it launches ends with it.
    given: dict[str, Any] = {"stdout": stream, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    with psutil.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **given) as process:
        ends, status, looked = time.monotonic() + limit_s, "", 0.0
        started: set[psutil.Process] = set()
        while process.poll() is None and not status:
            if time.monotonic() > looked + LOOK_S:
                looked, started = time.monotonic(), started | find_descendants(process.pid)
            time.sleep(POLL_S)
            status = "interrupted" if stop.asked else "timed out" if time.monotonic() > ends else ""
        end_processes([*(started | find_descendants(process.pid)), process])
        code = process.returncode
    if not status:
        status = FINISHED if code == 0 else "failed" if code > 0 else f"crashed ({signal.Signals(-code).name})"
    return status, code
