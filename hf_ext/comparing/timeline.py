"""When which epoch is done, on every side: one-off costs, and then epochs of steps at the rate that was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..reporting.tables import format_markdown_table
from ..reporting.units import seconds
from .running import SideRun

EPOCHS = (1, 10, 25, 50)


def make_timeline(groups: Mapping[str, Sequence[SideRun]], baseline: str) -> dict[str, Any] | None:
    """Seconds from the start of a run to the end of each of `EPOCHS`, by side.

    A side takes its `one_off_seconds` (what came before the first step, such as embedding once, and what the first
    steps took above the others) and then its steps per epoch, as long as the measured ones; each is the median over its
    rounds. Evaluations and saves are in neither.

    Args:
        groups: the runs of each side.
        baseline: the side that `saved_seconds` are counted from.

    Returns:
        `epochs`, `baseline`, and per side what it rests on, `seconds` and, but for the baseline, `saved_seconds`; None
        where a run does not know how long an epoch is, as of a stream.
    """
    needed = ("rows_per_epoch", "steps_per_epoch")
    if not all(run.throughput.get(name) for group in groups.values() for run in group for name in needed):
        return None
    sides = {name: _describe(group) for name, group in groups.items()}
    first = sides[baseline]["seconds"]
    for name, side in sides.items():
        if name != baseline:
            side["saved_seconds"] = [slow - own for slow, own in zip(first, side["seconds"])]
    return {"epochs": [*EPOCHS], "baseline": baseline, "sides": sides}


def _describe(runs: Sequence[SideRun]) -> dict[str, Any]:
    throughputs = [run.throughput for run in runs]
    before = statistics.median(_one_off_seconds(t) for t in throughputs)
    epoch = statistics.median(t["steps_per_epoch"] * _step_seconds(t) for t in throughputs)
    return {
        "rows_per_epoch": int(throughputs[0]["rows_per_epoch"]),
        "rows_measured": int(sum(t["totals"]["sequences"] for t in throughputs)),
        "one_off_seconds": before,
        "epoch_seconds": epoch,
        "seconds": [before + epochs * epoch for epochs in EPOCHS],
    }


def _step_seconds(throughput: Mapping[str, Any]) -> float:
    return float(throughput["totals"]["seconds"] / throughput["measured_steps"])


def _one_off_seconds(throughput: Mapping[str, Any]) -> float:
    """Before the first step, and what the warm-up steps took above as many others."""
    steady = throughput["warmup_steps"] * _step_seconds(throughput)
    return throughput["seconds_before_training"] + max(0.0, throughput["warmup_seconds"] - steady)


def format_timeline(timeline: Mapping[str, Any], embedding_seconds: Mapping[str, float | None]) -> str:
    """A table of epochs by sides, and what its numbers rest on.

    Args:
        timeline: from `make_timeline`.
        embedding_seconds: by side, None where nothing was embedded before training.
    """
    sides, baseline = timeline["sides"], timeline["baseline"]
    headers = ["after epoch", baseline]
    for name in sides:
        if name != baseline:
            headers += [name, "saved" if len(sides) == 2 else f"saved by {name}"]
    rows = []
    for i, epoch in enumerate(timeline["epochs"]):
        row = [str(epoch), seconds(sides[baseline]["seconds"][i])]
        for name, side in sides.items():
            if name != baseline:
                row += [seconds(side["seconds"][i]), _signed(side["saved_seconds"][i])]
        rows.append(row)
    notes = [_basis(name, side, embedding_seconds.get(name)) for name, side in sides.items()]
    return "\n".join([format_markdown_table(rows, headers), "", *notes, "", "Evaluations and saves come on top."])


def _signed(value: float) -> str:
    return seconds(value) if value >= 0 else f"-{seconds(-value)}"


def _basis(name: str, side: Mapping[str, Any], embedding: float | None) -> str:
    text = f"- {name}: measured on {side['rows_measured']:,} rows, projected to epochs of {side['rows_per_epoch']:,}; "
    text += f"before the first step {seconds(side['one_off_seconds'])}"
    return text + (f", of these {seconds(embedding)} embedding once." if embedding else ".")
