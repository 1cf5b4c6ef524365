"""Processes that this one started, with all that they started: found, and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import psutil

GRACE_S = 5.0  # between asking to end and ending


def find_descendants(pid: int) -> set[psutil.Process]:
    """Of a process; launchers give their ranks sessions of their own, so that its group does not have them all."""
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def end_processes(process: subprocess.Popen[Any], started: Iterable[psutil.Process]) -> None:
    """Asks a process, its group where it leads one, and what it started to end, and ends what does not."""
    left = list(started)
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        left = psutil.wait_procs(left, GRACE_S)[1]
    process.wait()
