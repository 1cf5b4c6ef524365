"""An inspection as text for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ...reporting.tables import format_table
from ..agreement.argument_roles import ANOTHER_RUN
from .inspection import Checkpoint, Inspection

MB = 1e6
HEADERS = ("checkpoint", "kind", "step", "epoch", "MB", "run", "roles", "--resume auto")


def format_inspection(inspection: Inspection, with_arguments: bool = False) -> str:
    """The outcome, a table of the checkpoints, what each holds, and what else is there.

    Args:
        inspection: from `inspect_folder`.
        with_arguments: also what is recorded of the runs: arguments that make a run another one, data, versions.
    """
    lines = [inspection.folder, inspection.outcome]
    if inspection.checkpoints:
        lines += ["", format_table([_row(found) for found in inspection.checkpoints], HEADERS)]
    for found in inspection.checkpoints:
        lines += ["", *_describe(found)]
        if with_arguments:
            lines += [f"  {line}" for line in _recorded(found.facts)]
    if inspection.remains:
        rows = [(entry.name, entry.num_bytes / MB, entry.fate) for entry in inspection.remains]
        lines += ["", format_table(rows, ("beside them", "MB", "what it is"))]
    return "\n".join(lines)


def inspection_json(inspection: Inspection) -> dict[str, Any]:
    """The same as plain values; sizes in bytes."""
    return asdict(inspection)


def _row(found: Checkpoint) -> tuple[Any, ...]:
    run = found.run_id[:8] if found.run_id else None
    step = None if found.step is None else str(found.step)
    roles = ", ".join(found.roles)
    return found.name, found.kind, step, found.epoch, found.num_bytes / MB, run, roles, found.fate or None


def _describe(found: Checkpoint) -> Iterator[str]:
    yield f"{found.name} ({found.kind})"
    for problem in found.problems:
        yield f"  problem: {problem}"
    if found.refusal:
        yield f"  refused: {found.refusal}"
    for part, form in found.contents.restores.items():
        yield f"  {part}: {form or 'none'}"
    for part in found.contents.lacks:
        yield f"  lacks: {part}"


def _recorded(facts: Mapping[str, Any]) -> Iterator[str]:
    """One line per recorded value: of the arguments, those that make a run another one."""
    if not facts:
        yield "nothing recorded of the run"
    for section, value in facts.items():
        if section == "arguments" and isinstance(value, Mapping):
            value = {name: value[name] for name in sorted(value) if name in ANOTHER_RUN}
        if not isinstance(value, Mapping):
            yield f"{section}: {value}"
            continue
        for name, entry in value.items():
            yield f"{section}.{name}: {entry}"
