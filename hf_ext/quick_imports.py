"""Imports that Python does not look through for garbage, then or later."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Inside, nothing is collected; what was imported is never looked through again.

    For programs, at their top: a million objects that modules define stay anyway, and looking for garbage among them
    takes a second of the processor until the first step (`benchmarks/start_time.py`).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
