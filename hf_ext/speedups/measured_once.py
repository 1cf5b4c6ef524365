"""What is measured at the start of a run and decides how it rounds: measured once, and kept for the run that goes on.

A run that continues must compute as it began, though a machine's rates vary. `plan.json` of the run's folder keeps what
was found, as does that of the checkpoint that `--resume` names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..main_process import do_on_main


def measure_once(args: Any, name: str, key: str, measure: Callable[[], float]) -> float:
    """What the evidence of decision `name` records under `key` where this run began; else what `measure` returns.

    All processes call it; the main one reads or measures, and the others are told.
    """
    return do_on_main(args, partial(_find, args, name, key, measure))


def was_begun(args: Any) -> bool:
    """Whether a run that may be continued has written a plan, whatever is in it."""
    return any(path.is_file() for path in _plans(args))


def _find(args: Any, name: str, key: str, measure: Callable[[], float]) -> float:
    for path in _plans(args):
        found = _read(path, name, key)
        if found is not None:
            return found
    return measure()


def _plans(args: Any) -> list[Path]:
    """Of the run of a checkpoint that was named, and of this run's folder; they need not be there."""
    named = [args.resume_from_checkpoint, None if args.resume in ("auto", "no") else args.resume]
    folders = [*(Path(str(checkpoint)).parent for checkpoint in named if checkpoint), Path(str(args.output_dir))]
    return [folder / "plan.json" for folder in folders]


def _read(path: Path, name: str, key: str) -> float | None:
    """A number that a plan records; None where it records none."""
    try:
        decisions = json.loads(path.read_text(encoding="utf-8"))["decisions"] if path.is_file() else []
        evidence: Any = next((one["evidence"] for one in decisions if one["name"] == name), {})
        found = float(evidence[key]) if key in evidence else 0.0
        return found if 0 < found < math.inf else None
    except (OSError, ValueError, KeyError, TypeError):  # no plan of ours
        return None
