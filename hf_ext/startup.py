"""How a program of hf_ext starts: the words that it was called by, and imports without a search for garbage."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PROGRAM = "hf-ext"


def program_words() -> list[str]:
    """Returns how this process was started, without arguments: ["hf-ext", "train"], or the path of a script."""
    program, _, command = sys.argv[0].partition(" ")
    return [program, command] if program == PROGRAM and command else [sys.argv[0]]


@contextmanager
def quick_imports() -> Iterator[None]:
    """Collects no garbage inside, and never looks through what was imported there again.

    For programs, at their top: a million objects that modules define stay anyway, and looking for garbage among them
    takes a second of the processor until the first step (`benchmarks/command_times.py`).
    """
    collects = gc.isenabled()
    kernels = logging.getLogger("bitsandbytes.backends")
    level = kernels.level
    kernels.setLevel(logging.ERROR)  # peft imports it, and on some CPUs it warns of a kernel that nothing here calls
    gc.disable()
    try:
        yield
    finally:
        kernels.setLevel(level)
        gc.freeze()
        if collects:
            gc.enable()
