"""The list of speed-ups for docs/speedups.md: the first lines of their docstrings."""

from __future__ import annotations

import inspect
from types import ModuleType

from hf_ext import speedups
from hf_ext.reporting.tables import format_markdown_table

CLASSES = {"I": "identical", "N": "numerics", "L": "learning"}


def index() -> str:
    """One line per speed-up, in the order in which they are applied; its name links to its file."""
    rows = []
    for speedup in speedups.REGISTRY:
        module = speedup.__name__ if isinstance(speedup, ModuleType) else speedup.__module__
        first = (inspect.getdoc(speedup) or "").partition("\n\n")[0]
        rows.append([f"[`{speedup.NAME}`](../{module.replace('.', '/')}.py)", CLASSES[speedup.KIND], first])
    return format_markdown_table(rows, ["speed-up", "class", "what it does"])
