"""A list of claimed speed-ups, switched on one after another, and what each brings on top of those before it.

The YAML file (`recipes/configs/progression_affinity.yaml` is one)::

    base: {preset: baseline, num_train_epochs: 4}       # arguments of all runs, below those after `--`
    phases:
      - name: bf16
        arguments: {bf16: true}          # from this phase on, above all others; a list is added to the one so far
        claimed: 1.4                     # optional: the factor of this phase; or least and most, [1.3, 1.5]
        needs: {native_bf16: true}       # optional: fields of `Hardware`, and gpus, the number of CUDA devices
        launch: ddp.yaml --num_processes 2          # optional: an Accelerate config file, from this phase on
        note: a sentence for the table              # optional
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..arguments import name_nearest, read_config
from ..errors import ArgumentError
from ..files import Json
from ..hardware import detect_hardware
from ..text import is_finite
from .sides import Side, find_program, number_names, read_launch

BASE = "base"
NAME = re.compile(r"\w[\w .-]{0,99}")  # of a folder, too
FLAG = re.compile(r"--([a-z][\w-]*)")
FORM = (
    "It has base, arguments by name, and phases. A phase has a name of its own (letters, digits, blanks, . and -). "
    "It may have arguments by name, claimed (factor or [least, most]), needs (fields of Hardware, gpus), launch, note."
)


class Phase(NamedTuple):
    """What stands in the file of one."""

    name: str
    arguments: Json = {}
    claimed: Any = ()
    needs: Json = {}
    launch: str = ""
    note: str = ""


def read_progression(path: str, recipe: str, shared: Sequence[str]) -> tuple[list[Side], list[str]]:
    """Reads the phases of a file.

    Args:
        path: the file, or the name of one that comes with hf_ext.
        recipe, shared: of the comparison.

    Returns:
        The base and a side for each phase, with the arguments of all before it; `left out` where the machine lacks what
        it needs. And arguments of all sides: of the base, then those that were given.

    Raises:
        ArgumentError: the file cannot be read, has another form, or a key twice; no phase can run here; an argument is
            none of the recipe's.

    Cost: `--help` of the recipe.
    """
    given = read_config(path)
    own: Json = {}
    launch: tuple[str, ...] = ()
    sides = [Side(BASE, "baseline", ())]
    try:
        base, entries = (given.pop(name).value for name in (BASE, "phases"))
        shared = [*as_words(base), *shared]
        there = {**vars(detect_hardware()), "gpus": torch.cuda.device_count()}
        for phase in [Phase(**entry) for entry in entries]:
            claimed = [phase.claimed] if is_finite(phase.claimed) else [*phase.claimed]
            are_factors = all(map(is_finite, claimed)) and len(claimed) < 3
            if claimed and not (are_factors and 0 < claimed[0] <= claimed[-1]):
                raise TypeError(f"phase {phase.name!r}, claimed {phase.claimed!r}: give a factor, or least and most")
            lacking = [f"{need} {least}" for need, least in phase.needs.items() if there[need] < least]
            if not lacking:
                for key, value in phase.arguments.items():
                    before = own.get(key, base.get(key))
                    is_longer = isinstance(value, list) and isinstance(before, list)
                    own[key] = [*before, *value] if is_longer else value
                launch = read_launch(phase.launch, "progression") if phase.launch else launch
            side = Side(phase.name, "optimized", tuple(as_words(own)), None, launch, claimed, phase.note)
            why_not = f"left out: needs {', '.join(lacking)}"
            sides.append(replace(side, role="left out", note=why_not) if lacking else side)
        sides = number_names(sides)
        if given or not all(NAME.fullmatch(side.name) for side in sides):
            raise TypeError(f"keys {[*given]}, phases {[side.name for side in sides]}")
    except (AttributeError, KeyError, TypeError) as error:
        raise ArgumentError(f"--progression {path}: {error}. {FORM}") from error
    if all(side.role != "optimized" for side in sides):
        raise ArgumentError(
            f"--progression {path}: no phase can run on this machine: {[one.note for one in sides[1:]]}."
        )
    _check_flags(recipe, [*shared, *as_words(own)])
    return sides, shared


def _check_flags(recipe: str, words: Sequence[str]) -> None:
    command = [sys.executable, *find_program(recipe), "--help", "all"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    known = {*FLAG.findall(shown.stdout)} - {"output_dir"}
    for name in {name.replace("-", "_") for name in FLAG.findall(" ".join(words))} - known:
        near = name_nearest(name, known)
        raise ArgumentError(
            f"--progression: {recipe} takes no {name!r}{near} (output_dir is each run's own). {shown.stderr}"
        )


def as_words(arguments: Json) -> list[str]:
    """Returns arguments by name as words of a command line; numbers, switches and mappings as JSON writes them."""
    words = []
    for name, value in arguments.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('-', '_')}", *(one if isinstance(one, str) else json.dumps(one) for one in values)]
    return words
