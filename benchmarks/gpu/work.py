"""What a part is given: a size, a device, a time, and a place for what it finds."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_ext.files import write_text


@dataclass
class Work:
    """A part's own view of the session.

    Attributes:
        path: of its result, which is there, and whole, from the first `report` on.
        ends: `time.monotonic()` at which it will be ended.
    """

    size: str
    device: torch.device
    path: Path
    ends: float
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def is_toy(self) -> bool:
        """Whether nothing is measured but that it runs."""
        return self.size == "toy"

    @property
    def left_s(self) -> float:
        """Seconds until it is ended."""
        return self.ends - time.monotonic()

    def report(self, **found: Any) -> None:
        """Adds to the result and writes it."""
        self.result |= found
        write_text(self.path, json.dumps(self.result))

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Adds a row to a table of the result and writes it."""
        self.report(**{name: [*self.result.get(name, []), row]})
        print(name, json.dumps(row), flush=True)
