"""Full fine-tuning, LoRA and frozen encoding: stock at its best beside ours, of ESM-2 in full without compiling too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_ext.models.packing import find_encoders
from hf_ext.speedups.parity import one_line

from .encoding import Encoding
from .rounds import interleave
from .shapes import SHAPES, Shape
from .sides import EAGER, OURS, STOCK, Bench, stock_sides
from .work import Work

ROWS = {"full": 64, "toy": 4}  # of an optimizer step: about 20,000 tokens
Save = Callable[[dict[str, Any]], None]

RESERVE = 0.95  # of the time, so that the last case is written before the part is ended


def measure(work: Work) -> None:
    """Reports a case per model and way of training, in order of worth; time is shared out among those to come."""
    cases = [(shape, ways) for shape in SHAPES[work.size] for ways in ("full", "lora", "frozen")]
    for number, (shape, ways) in enumerate(cases):
        budget_s = RESERVE * work.left_s / (len(cases) - number)
        save = _saver(work, f"{shape.name}, {ways}")
        try:
            _measure_case(shape, ways, work, budget_s, save)
        except Exception as error:  # of one case, which must not cost the others
            save(
                {**work.result.get("cases", {}).get(f"{shape.name}, {ways}", {"sides": {}}), "failed": one_line(error)}
            )


def _measure_case(shape: Shape, ways: str, work: Work, budget_s: float, save: Save) -> None:
    packing = knows_packing(shape)
    if ways == "frozen":
        encoder = Encoding(shape, work)
        about = {"packing_known": packing}
        interleave(encoder, [STOCK, OURS], budget_s, lambda found: save({**found, **about, **encoder.describe()}))
        return
    bench = Bench(shape, ways, work.device, ROWS[work.size], work.is_toy)
    sides = [*stock_sides(bench), OURS, *([EAGER] if (shape.family, ways) == ("esm", "full") else [])]
    interleave(bench, sides, budget_s, lambda found: save({**found, "packing_known": packing}))


def _saver(work: Work, name: str) -> Save:
    def save(found: dict[str, Any]) -> None:
        work.report(cases={**work.result.get("cases", {}), name: found})
        print(name, found.get("times_as_fast"), flush=True)

    return save


def knows_packing(shape: Shape) -> bool | str:
    """True, or that there is none for this family."""
    with_packing = find_encoders(shape.build(torch.device("meta")))
    return True if with_packing else f"no packed path is known for {shape.family}: its batches keep their padding"
