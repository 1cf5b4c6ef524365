"""Runs of a progression: phases on top of one another, in turns, and each alone where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ArgumentError
from .launching import read_launch
from .needs import find_problem
from .progression_file import Phase, Progression, add_settings, as_flags
from .running import ChildFailed, SideRun
from .sides import Role, Side


@dataclass
class PhaseRuns:
    """One phase and its runs, one per round. `why` says why there are none.

    `alone` are its runs on top of the baseline only: none where those were not asked for or failed.
    """

    phase: Phase
    why: str = ""
    runs: list[SideRun] = field(default_factory=list)
    alone: list[SideRun] = field(default_factory=list)


def run_phases(
    progression: Progression, rounds: int, run_one: Callable[[Side, int], SideRun], singles: bool = False
) -> tuple[list[SideRun], list[PhaseRuns]]:
    """Runs baseline, phase 1, phases 1 and 2, ...: all once per round, so that drift of the machine meets all of them.

    A phase that this machine cannot run, or whose first run fails, is left out of those that follow.

    Args:
        progression: what `read_progression` read.
        rounds: how often each runs.
        run_one: runs a side in a round.
        singles: also run each phase alone on top of the baseline.

    Returns:
        The baseline's runs, and the phases in the order of the file.

    Raises:
        ArgumentError: a launch file is absent, or no Accelerate config, or this machine can run no phase; before
            anything runs.
        ChildFailed: a run of the baseline failed.
    """
    base = progression.baseline
    problems = [find_problem(phase.needs, phase.launch) or "" for phase in progression.phases]
    if all(problems):
        raise ArgumentError(
            f"{progression.name}: this machine can run no phase ({'; '.join(dict.fromkeys(problems))})."
        )
    baseline = _make_side("baseline", "baseline", base.arguments, base.launch)
    baseline_runs = [run_one(baseline, 0)]
    phases = [PhaseRuns(phase, problem) for phase, problem in zip(progression.phases, problems)]
    settings, launch = base.arguments, base.launch
    for phase in phases:
        if phase.why:
            continue
        added = add_settings(settings, phase.phase.arguments), phase.phase.launch or launch
        _run_again(phase, phase.runs, _make_side(phase.phase.name, "phase", *added), 0, run_one)
        if phase.why:
            continue
        if singles and settings is base.arguments:
            phase.alone = phase.runs  # the first one stands on the baseline alone
        elif singles:
            alone = add_settings(base.arguments, phase.phase.arguments), phase.phase.launch or base.launch
            _run_alone(phase, _make_side(f"only {phase.phase.name}", "single", *alone), 0, run_one)
        settings, launch = added
    for round_ in range(1, rounds):
        baseline_runs.append(run_one(baseline, round_))
        for phase in phases:
            if phase.runs:
                _run_again(phase, phase.runs, phase.runs[0].side, round_, run_one)
            if phase.alone and phase.alone is not phase.runs:
                _run_alone(phase, phase.alone[0].side, round_, run_one)
    return baseline_runs, phases


def _make_side(name: str, role: Role, settings: dict[str, Any], launch: str | None) -> Side:
    started = read_launch(launch, "progression, launch") if launch else None
    return Side(name, role, as_flags(settings), launch=started)


def _run_again(
    phase: PhaseRuns, runs: list[SideRun], side: Side, round_: int, run_one: Callable[[Side, int], SideRun]
) -> None:
    try:
        runs.append(run_one(side, round_))
    except ChildFailed as error:
        phase.why = f"failed: {str(error).splitlines()[-1]}"
        runs.clear()  # of rounds that are not all there, no ratio is taken


def _run_alone(phase: PhaseRuns, side: Side, round_: int, run_one: Callable[[Side, int], SideRun]) -> None:
    try:
        phase.alone.append(run_one(side, round_))
    except ChildFailed:
        phase.alone.clear()


def all_runs(baseline: Sequence[SideRun], phases: Sequence[PhaseRuns]) -> dict[str, list[SideRun]]:
    """Runs by the names of their sides."""
    groups = [[*baseline], *(group for phase in phases for group in (phase.runs, phase.alone))]
    return {group[0].side.name: group for group in groups if group}
