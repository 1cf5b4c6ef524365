"""What a suite of many cases says at its end, and leaves as JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def tally(request: Any, suite: str, **counts: int) -> Iterator[dict[str, int]]:
    """Counts of a suite: printed in one closing line, and recorded."""
    yield counts
    line = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in counts.items())
    say(request, f"{suite}: {line}")
    record(suite.replace(" ", "_"), {"suite": suite, **counts})


@contextmanager
def cases(request: Any, suite: str, right: str = "right", but_not: str = "stock_trainer") -> Iterator[None]:
    """Of a module's tests but those with `but_not` (a pattern) in their name: how many there were, and were right."""
    mine = [item for item in request.session.items if item.path == request.path and not re.search(but_not, item.name)]
    failed = request.session.testsfailed
    with tally(request, suite, **{"cases": len(mine), right: 0}) as counts:
        yield
        counts[right] = len(mine) - (request.session.testsfailed - failed)


def say(request: Any, line: str) -> None:
    """Prints a line that pytest does not capture."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{line}")


def record(name: str, content: dict[str, Any]) -> None:
    """Writes `NAME.json` into the folder that HF_EXT_RESULTS names, if any."""
    if folder := os.environ.get("HF_EXT_RESULTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
