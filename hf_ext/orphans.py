"""Processes whose parent ends: on Linux they can be adopted, or be told of it; elsewhere nothing changes here."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PDEATHSIG, _SUBREAPER = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of linux/prctl.h


def stop_with_parent() -> None:
    """Has this process get SIGTERM when its parent has ended, also where that was killed and could tell nobody."""
    _prctl(_PDEATHSIG, int(signal.SIGTERM))


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """While entered, processes whose parent ends become children of this one.

    Those that have ended by then are cleared away at the end, as whoever adopts has to.
    """
    is_adopting = _prctl(_SUBREAPER, 1)
    try:
        yield
    finally:
        if is_adopting:
            _prctl(_SUBREAPER, 0)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _prctl(option: int, value: int) -> bool:
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    return prctl is not None and prctl(option, value, 0, 0, 0) == 0
