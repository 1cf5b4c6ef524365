"""Output that cannot be written, behind `| head`, in a closed terminal, on a full disk: dropped, and ends no run."""

from __future__ import annotations

import logging
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
    if nowhere != descriptor:  # which was closed
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Inside, what stdout or stderr cannot write is dropped from then on, of that stream; hf_ext's log says so once.

    The streams stay the objects that they are, which handlers of logging and progress bars hold on to.
    """
    changed: list[tuple[Any, str]] = []
    for title in ("stdout", "stderr"):
        stream = getattr(sys, title)
        with suppress(AttributeError, UnsupportedOperation, ValueError):  # none, not of a file, closed
            descriptor = stream.fileno()
            for name in ("write", "flush"):
                setattr(stream, name, partial(_attempt, getattr(stream, name), title, descriptor))
                changed.append((stream, name))
    try:
        yield
    finally:
        for stream, name in changed:
            with suppress(AttributeError, ValueError):  # somebody took it back, or closed it
                stream.flush()  # else Python ends with 120 where it cannot write what is left
                delattr(stream, name)


def _attempt(method: Callable[..., Any], title: str, descriptor: int, *given: Any) -> Any:
    try:
        return method(*given)
    except OSError as error:
        if not isinstance(error, BlockingIOError):  # a reader that is slow: only this piece is lost
            drop_output(descriptor)
            log = logging.getLogger("hf_ext")
            if log.handlers:
                log.warning("%s cannot be written to any more (%s): what comes is dropped.", title, error.strerror)
        return len(given[0]) if given else None
