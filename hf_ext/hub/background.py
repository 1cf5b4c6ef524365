"""Pushes in a process of their own: a slow Hub holds nothing up, and one that hangs can be left."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, CheckpointError, DiskFailure
from .attempts import HubError
from .pins import unpin
from .pushing import Push

logger = logging.getLogger(__name__)

_ERRORS = {error.__name__: error for error in (HubError, ArgumentError, CheckpointError, DiskFailure)}
_POLL_S = 0.1


class PushProcess:
    """`push_folder`, and `verify_push` where `into` is given, in a process that this one can end.

    Not a thread: huggingface_hub's requests have no time limit, and a thread that waits for one keeps Python from
    ending. The token goes through a pipe, not through arguments or the environment.

    Args:
        folder, repo_id: as for `push_folder`.
        into: folder for the download that checks the push; None leaves the check out.
        access: token, endpoint, retries, wait_s.
        push: further settings of `push_folder`.

    Cost: 0.5 s of a core to start, beside the push.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        repo_id: str,
        *,
        access: dict[str, Any],
        push: dict[str, Any],
        into: str | os.PathLike[str] | None = None,
    ):
        # Files, not pipes: nobody reads while training goes on, and a full pipe would stop the push.
        self._answer, self._warnings = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hf_ext.hub.worker"],
            stdin=subprocess.PIPE,
            stdout=self._answer,
            stderr=self._warnings,
            env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            start_new_session=True,  # Ctrl-C is for the run, which then decides
        )
        asked = {
            "folder": os.path.abspath(folder),
            "repo_id": repo_id,
            "access": access,
            "push": push,
            "into": None if into is None else os.path.abspath(into),
        }
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(json.dumps(asked).encode())

    def is_done(self) -> bool:
        """Whether `result` returns at once. Cost: some microseconds."""
        return self._process.poll() is not None

    def result(self) -> Push:
        """Waits for the end; what the Hub had refused on the way is logged as a warning.

        Raises: as `push_folder` and `verify_push`; DiskFailure instead of OSError; HubError for what is unforeseen.
        """
        code = self._process.wait()
        with self._warnings as told, self._answer as answered:
            told.seek(0)
            answered.seek(0)
            warnings, written = told.read().decode(errors="replace").strip(), answered.read()
        if code != 0:
            raise HubError(f"The process that pushes ended with status {code}: {warnings[-2000:]}")
        if warnings:
            logger.warning(warnings)
        answer = json.loads(written)
        if "error" in answer:
            raise _ERRORS.get(answer["error"], HubError)(answer["text"])
        return Push(**answer["push"])

    def kill(self) -> None:
        """Ends it at once; what it had not committed is not on the Hub."""
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Job:
    """A push that waits for its turn.

    Attributes:
        name: what is pushed, for messages ("checkpoint-8").
        step: of the model; None where it is not that of a checkpoint.
        pinned: its files, as `pin_files` made them; removed after the push.
        shown: the folder they came from, which messages name.
        start: begins the push of a folder.
    """

    name: str
    step: int | None
    pinned: Path
    shown: Path
    start: Callable[[], PushProcess]


class PushQueue:
    """Pushes from pinned copies, one at a time and in order; nobody waits for them but who asks to.

    Attributes:
        pushed_step: step of the last checkpoint that the Hub accepted; None before the first.
        failure: why the last push failed, and what repeats it; None if it did not.
    """

    def __init__(self) -> None:
        self.pushed_step: int | None = None
        self.failure: str | None = None
        self._waiting: deque[Job] = deque()
        self._running: tuple[Job, PushProcess] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a push is under way or waits."""
        self.advance()
        return self._running is not None

    def add(self, job: Job) -> None:
        """Takes over a push and its pinned copy."""
        self._waiting.append(job)
        self.advance()

    def advance(self) -> None:
        """Notes the end of a push and begins the next. To be called now and then. Cost: some microseconds."""
        if self._running is not None and self._running[1].is_done():
            self._conclude(*self._running)
            self._running = None
        while self._running is None and self._waiting:
            job = self._waiting.popleft()
            try:
                self._running = (job, job.start())
            except OSError as error:  # no memory or no number for another process
                self.note_failure(job.name, f"the process that pushes could not be started: {error}.")
                unpin(job.pinned)

    def wait(self, limit_s: float = float("inf")) -> bool:
        """Until all are done or the time is up; whether all are done."""
        end = time.monotonic() + limit_s
        while self.is_busy:
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        return True

    def give_up(self) -> list[str]:
        """Ends what runs, drops what waits, removes the copies; returns the names of what was not pushed."""
        left = [*self._waiting]
        self._waiting.clear()
        if self._running is not None:
            job, process = self._running
            process.kill()
            left.insert(0, job)
            self._running = None
        for job in left:
            unpin(job.pinned)
        return [job.name for job in left]

    def note_failure(self, name: str, reason: str) -> None:
        """Of a push that ended or that could not even begin."""
        self.failure = reason
        logger.warning("%s is not on the Hub: %s", name, reason)

    def _conclude(self, job: Job, process: PushProcess) -> None:
        try:
            push = process.result()
        except (HubError, ArgumentError, CheckpointError, DiskFailure) as error:
            self.note_failure(job.name, str(error).replace(str(job.pinned), str(job.shown)))
        else:
            self.failure = None
            self.pushed_step = self.pushed_step if job.step is None else job.step
            logger.info("%s is on the Hub: %s", job.name, push.url)
        finally:
            unpin(job.pinned)
