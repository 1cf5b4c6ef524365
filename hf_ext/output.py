"""Output that nobody reads any more, behind `| head` or in a terminal that was closed: dropped, and ends no run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import UnsupportedOperation
from typing import Any


def drop_output(descriptor: int) -> None:
    """Sends what is written to `descriptor` from now on to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Inside, writing to stdout or stderr whose reader has closed its end of the pipe drops what is written.

    The streams stay the objects that they are, which handlers of logging and progress bars hold on to.
    """
    changed: list[tuple[Any, str]] = []
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, UnsupportedOperation, ValueError):  # none, not of a file, closed
            descriptor = stream.fileno()
            for name in ("write", "flush"):
                setattr(stream, name, partial(_attempt, getattr(stream, name), descriptor))
                changed.append((stream, name))
    try:
        yield
    finally:
        for stream, name in changed:
            with suppress(AttributeError):  # somebody took it back
                delattr(stream, name)


def _attempt(method: Callable[..., Any], descriptor: int, *given: Any) -> Any:
    try:
        return method(*given)
    except BrokenPipeError:
        drop_output(descriptor)
        return len(given[0]) if given else None
