"""Full fine-tuning, LoRA and frozen encoding: stock at its best beside ours, and the roofline beside both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_ext.hardware import detect_hardware
from hf_ext.models.packing import find_encoders
from hf_ext.speedups.parity import one_line

from . import encoding
from .roofline import describe_roofline
from .rounds import interleave
from .shapes import SHAPES, Shape, draw_lengths
from .sides import OURS, Bench, half_precision, stock_sides
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
    if ways == "frozen":
        encoding.interleave(shape, work, budget_s, save)
        return
    bench = Bench(shape, ways, work.device, ROWS[work.size], work.is_toy)
    extra = {"packing_known": knows_packing(shape), "roofline": _roofline(bench)}
    interleave(bench, [*stock_sides(bench), OURS], budget_s, lambda found: save({**found, **extra}))


def _saver(work: Work, name: str) -> Save:
    def save(found: dict[str, Any]) -> None:
        work.report(cases={**work.result.get("cases", {}), name: found})
        print(name, found.get("times_as_fast"), flush=True)

    return save


def knows_packing(shape: Shape) -> bool | str:
    """True, or that there is none for this family."""
    with_packing = find_encoders(shape.build(torch.device("meta")))
    return True if with_packing else f"no packed path is known for {shape.family}: its batches keep their padding"


def _roofline(bench: Bench) -> dict[str, Any]:
    if bench.ways != "full" or bench.shape.family != "esm":
        return {"not_known": "element-wise traffic was counted for full training of ESM-2 only"}
    lengths = [length + 2 for length in draw_lengths(10_000, bench.is_toy)]
    attended = sum(length**2 for length in lengths) / sum(lengths)
    dtype = half_precision(bench.device) or "bf16"
    shape = (bench.shape.layers, bench.shape.width)
    return describe_roofline(detect_hardware(bench.device), dtype, bench.flops(), attended, shape)
