"""Sides in turn, round by round, until their time is spent: medians with their spread, and ratios per round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from common import spread

from hf_ext.memory.out_of_memory import DidNotFit
from hf_ext.speedups.parity import one_line

from .sides import OURS, Bench

ROUNDS = 5
LEAST_STEPS, MOST_STEPS = 6, 30


def interleave(bench: Bench, sides: Sequence[str], budget_s: float, save: Callable[[dict[str, Any]], None]) -> None:
    """Runs all sides once to warm up, then in turn; hands what is known to `save` after each round.

    Args:
        budget_s: for all rounds together, warm-up included. A round that would not end in it is not begun, but the
            first always is.
    """
    began = time.monotonic()
    usable: list[str] = []
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for side in sides:
        if try_run(bench, side, LEAST_STEPS if not bench.is_toy else 2):
            usable.append(side)
        save(describe(bench, runs, sides))
    steps = _count_steps(bench, usable, budget_s - (time.monotonic() - began))
    longest = 0.0
    for number in range(1 if bench.is_toy else ROUNDS):
        round_began = time.monotonic()
        if number and round_began - began + longest > budget_s:
            break
        for side in [each for each in usable if each not in bench.failed][:: 1 if number % 2 else -1]:
            if found := try_run(bench, side, steps[side], number):
                runs[side].append(found)
        longest = max(longest, time.monotonic() - round_began)
        save(describe(bench, runs, sides))


def try_run(bench: Bench, side: str, steps: int, seed: int = 0) -> dict[str, Any] | None:
    """A run, or None; why a side failed stands in `bench.failed`, so that the others are measured all the same."""
    try:
        return bench.run_fitting(side, steps, seed)
    except DidNotFit:
        bench.failed[side] = "not one row fits"
    except Exception as error:  # of a trainer, a kernel, a compiler
        bench.failed[side] = f"failed: {one_line(error)}"
    return None


def _count_steps(bench: Bench, sides: Sequence[str], left_s: float) -> dict[str, int]:
    """Of each run of each side: as many as the time allows."""
    if bench.is_toy:
        return dict.fromkeys(sides, 2)
    share = max(left_s, 0.0) / (ROUNDS * max(len(sides), 1))
    found = dict.fromkeys(sides, LEAST_STEPS)
    for side in sides:
        known = try_run(bench, side, LEAST_STEPS)  # compiled now: what a run takes from here on
        if known is None:
            continue
        fixed = known["wall_s"] - LEAST_STEPS * known["step_s"]
        found[side] = min(MOST_STEPS, max(LEAST_STEPS, int((share - fixed) / known["step_s"])))
    return found


def describe(bench: Bench, runs: dict[str, list[dict[str, Any]]], sides: Sequence[str]) -> dict[str, Any]:
    """What all rounds say so far."""
    found: dict[str, Any] = {
        "model": bench.shape.name,
        "ways": bench.ways,
        "rows_per_step": bench.rows,
        "rounds": max(map(len, runs.values()), default=0),
        "plan": bench.decisions,
        "did_not_fit": bench.did_not_fit,
        "sides": {side: _summarize(bench, side, runs[side]) for side in sides},
    }
    ours = next((side for side in sides if side.startswith(OURS)), None)
    if ours:
        others = [side for side in sides if side != ours]
        found["times_as_fast"] = {other: ratio(runs[ours], runs[other]) for other in others}
    return found


def _summarize(bench: Bench, side: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    if not runs:
        return {"not_measured": bench.failed.get(side, "no round has ended")}
    numbers = {name: [run[name] for run in runs] for name in runs[0]}
    kept = ("tokens_per_s", "tflops", "mfu", "step_s", "peak_memory_gib", "warmup_s", "loss", "padding_share")
    told = {name: spread(numbers[name]) for name in kept if name in numbers and None not in numbers[name]}
    said = {name: numbers[name][-1] for name in ("dtype", "no_mfu_because", "measured_steps") if name in numbers}
    ended = {"ended_early": bench.failed[side]} if side in bench.failed else {}
    return {"passes_per_step": bench.passes[side], **said, **told, **ended}


def ratio(fast: list[dict[str, Any]], slow: list[dict[str, Any]]) -> dict[str, float] | None:
    """Of tokens per second, round by round; None where a side has none."""
    each = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(fast, slow)]
    return spread(each) if each else None
