"""What the stages of a generator would take, as a table and as JSON-able values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..reporting import units
from ..reporting.tables import format_table
from .estimates import money
from .stage_estimates import LSTM_STEP_SECONDS, Span, StageEstimate, StageTime

SHOWN_CARDS = ("T4", "A100-80GB", "H100-SXM")  # of those of the hardware table; --json has all


def format_stages(stages: Sequence[StageEstimate], dollars_per_hour: float | None) -> str:
    """A row per stage: its model, rows, steps, FLOPs; its time on the machine that was asked about, and on other cards.

    Args:
        dollars_per_hour: of that machine; None leaves the column out.
    """
    cards = [name for name in SHOWN_CARDS if any(stage.cards[name].seconds != stage.here.seconds for stage in stages)]
    priced = dollars_per_hour is not None and any(stage.here.seconds for stage in stages)
    rows = []
    for stage in stages:
        work = stage.work
        cells = [f"{work.number} {work.size}", f"{work.num_parameters / 1e6:.1f} M", work.num_rows, work.steps]
        price = [_price(stage.here, dollars_per_hour)] if priced else []
        times = [_time(stage.cards[name]) for name in cards]
        rows.append([*cells, f"{work.flops / 1e15:.3g}", _time(stage.here), *price, *times])
    headers = ["stage", "trained", "rows", "steps", "PFLOP", "here", *(["dollars"] if priced else []), *cards]
    return format_table(rows, headers)


def describe_times(stages: Sequence[StageEstimate]) -> list[str]:
    """What the table's times rest on, and what is not in them; a sentence each."""
    said = [
        "At most: stages 2 and 3 end early where validation stops falling. Steps and FLOPs are of training and its "
        "evaluations; what is written and judged after each epoch and at the end is left out."
    ]
    bases = [stage.here.basis for stage in stages]
    bases += [stage.cards[name].basis for stage in stages[:1] for name in SHOWN_CARDS]
    said.append("Times rest on " + "; ".join(dict.fromkeys(bases)) + ".")
    if any(stage.work.time_steps[1] for stage in stages):
        low, high = (round(1e6 * value) for value in LSTM_STEP_SECONDS)
        said.append(f"On cards each time step of an LSTM's layer takes another {low} to {high} us (assumed).")
    return said


def stage_values(stage: StageEstimate, dollars_per_hour: float | None) -> dict[str, Any]:
    """One stage, with its times on every card of the hardware table."""
    work = stage.work
    dollars = money(stage.here.seconds, dollars_per_hour)
    return {
        "stage": work.number,
        "goal": work.goal,
        "architecture": work.config.architecture,
        "size": work.size,
        "num_trained_parameters": work.num_parameters,
        "num_train_rows": work.num_rows,
        "steps": work.steps,
        "flops": work.flops,
        "num_antigens_encoded_once": work.encoder.num_distinct if work.encoder else 0,
        "here": {**_values(stage.here), "dollars": list(dollars) if dollars else None},
        "cards": {name: _values(time) for name, time in stage.cards.items()},
    }


def _values(time: StageTime) -> dict[str, Any]:
    return {
        "machine": time.machine,
        "dtype": time.dtype,
        "seconds": list(time.seconds) if time.seconds else None,
        "basis": time.basis,
    }


def _time(time: StageTime) -> str:
    return units.MISSING if time.seconds is None else _short(time.seconds)


def _short(span: Span) -> str:
    """2-10 min; 62 min-5.8 h."""
    least, _, most = units.seconds_span(span).partition(" to ")
    value, _, unit = least.partition(" ")
    return f"{value if most.endswith(f' {unit}') else least}-{most}" if most else least


def _price(time: StageTime, dollars_per_hour: float | None) -> str:
    dollars = money(time.seconds, dollars_per_hour)
    return units.MISSING if dollars is None else f"{dollars[0]:.2f}-{dollars[1]:.2f}"
