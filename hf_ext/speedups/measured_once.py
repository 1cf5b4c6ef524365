"""What is measured of a machine at the start of a run and decides how it rounds: measured once, and kept.

A run that continues must compute as it began, though a machine's rates vary. `plan.json` of the run's folder keeps what
was found, as does that of the checkpoint that `--resume` names. Two fresh runs of one command must compute alike too:
the user's cache keeps it, per machine and what it was measured on, in small files that may be deleted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..disk import find_at_home
from ..hardware import identify_cpu
from ..main_process import do_on_main

_SETTINGS = ("ONEDNN", "DNNL", "MKL", "OMP", "KMP")  # beginnings of variables that decide how libraries compute
_UNKEPT: dict[Path, float] = {}  # what no file could keep


def measure_once(
    args: Any, name: str, key: str, measure: Callable[[], float], begun: float | None = None, **measured_on: Any
) -> float:
    """What the evidence of decision `name` records under `key` where this run began; else what is kept of this machine.

    Where neither says, `measure` does, and its number is kept. All processes call it; the main one reads or measures,
    and the others are told.

    Args:
        begun: for a run that was begun without this number; None: it is taken as a fresh one.
        measured_on: what besides the machine, torch and its threads decides the number.
    """

    def find() -> float:
        plans, kept = _plans(args), _file(args, [name, key], {"threads": torch.get_num_threads(), **measured_on})
        found = next(filter(None, (_read(path, name, key) for path in plans)), None)
        if found is None and begun is not None and any(path.is_file() for path in plans):
            return begun
        return found or _read(kept, name, key) or _UNKEPT.get(kept) or _keep(kept, name, key, measure())

    return do_on_main(args, find)


def _plans(args: Any) -> list[Path]:
    """Of the run of a checkpoint that was named, and of this run's folder; they need not be there."""
    named = [args.resume_from_checkpoint, None if args.resume in ("auto", "no") else args.resume]
    folders = [*(Path(str(checkpoint)).parent for checkpoint in named if checkpoint), Path(str(args.output_dir))]
    return [folder / "plan.json" for folder in folders]


def _file(args: Any, name: list[str], measured_on: dict[str, Any]) -> Path:
    """Where a number of this machine is kept, in the form of a plan."""
    settings = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    facts = [name, measured_on, settings, identify_cpu(), torch.__version__]
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
    folder = find_at_home("~/.cache/hf_ext/measured") or f"{os.path.expanduser(args.embedding_cache_dir)}/measured"
    return Path(folder, f"{name[0]}-{digest}.json")


def _read(path: Path, name: str, key: str) -> float | None:
    """A number that a plan records; None where it records none that could have been measured."""
    try:
        decisions = json.loads(path.read_text(encoding="utf-8"))["decisions"]
        found = float(next(one["evidence"][key] for one in decisions if one["name"] == name))
        return found if 0 < found < math.inf else None
    except (OSError, ValueError, LookupError, TypeError, OverflowError, StopIteration, RecursionError):  # none of ours
        return None


def _keep(path: Path, name: str, key: str, value: float) -> float:
    """Has a file keep it, whole or not at all; returns what another run kept meanwhile, which counts for both."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with suppress(OSError, ValueError):  # then this process alone keeps it
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({"decisions": [{"name": name, "evidence": {key: value}}]}), encoding="utf-8")
        with suppress(OSError):  # one is there, or the file system has no links
            os.link(draft, path)
        if _read(path, name, key) is None:
            os.replace(draft, path)
        draft.unlink(missing_ok=True)
    return _read(path, name, key) or _UNKEPT.setdefault(path, value)
