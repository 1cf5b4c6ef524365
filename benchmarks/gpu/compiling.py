"""Full fine-tuning of ESM-2 with the blocks compiled and without, in turn; what compilation takes."""

from __future__ import annotations

from typing import Any

from .rounds import interleave
from .shapes import SHAPES
from .sides import EAGER, OURS, Bench
from .speed import RESERVE, ROWS
from .work import Work


def measure(work: Work) -> None:
    """Reports both sides; the plan's word on `compile` says whether the first was compiled at all."""
    bench = Bench(SHAPES[work.size][0], "full", work.device, ROWS[work.size], work.is_toy)
    said: dict[str, str] = {}

    def save(found: dict[str, Any]) -> None:
        said.update({name: text for name, text in found["plan"].items() if not text.startswith("off")})
        work.report(**found, compile=said.get("compile", "not asked"))

    interleave(bench, [OURS, EAGER], RESERVE * work.left_s, save)
