"""Imports that Python does not look through for garbage, then or later, and that say nothing."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Inside, nothing is collected; what was imported is never looked through again, but by `_thaw`.

    For programs, at their top: a million objects that modules define stay anyway, and looking for garbage among them
    takes a second of the processor until the first step (`benchmarks/start_time.py`).
    """
    collects, kernels = gc.isenabled(), logging.getLogger("bitsandbytes.backends")
    level = kernels.level
    kernels.setLevel(logging.ERROR)  # peft imports it, and on some CPUs it warns of a kernel that nothing here calls
    gc.disable()
    try:
        yield
    finally:
        kernels.setLevel(level)
        gc.freeze()
        atexit.register(_thaw)
        if collects:
            gc.enable()


def _thaw() -> None:
    """Has the end of Python collect all, where triton would name what is left as leaked, in 90 lines.

    Its bindings do since they are nanobind's (torch 2.15); it takes the second that it takes without `quick_imports`.
    """
    triton = sys.modules.get("triton._C.libtriton")
    if triton is not None and type(triton.ir.builder).__module__ == "nanobind":
        gc.unfreeze()
