"""A progression: a baseline and phases that are switched on one after another, as a YAML file.

    name: what the table is called
    source: where the claims stand                       # optional
    claimed: 5.0                                         # optional: the whole speed-up; or a range, [6, 8]
    common: {effective_batch_size: 96}                   # optional: of all runs, below the command line
    baseline:
      arguments: {preset: baseline, fp16: true}
      claimed_memory: 15                                 # optional, GB; so in every phase
      launch: accelerate_configs/2cpu_ddp.yaml           # optional, kept until a phase names another
    phases:
      - name: bf16
        arguments: {fp16: false, bf16: true}             # added to those of the phases before
        claimed: 1.10                                    # optional: the speed-up of this phase
        needs: [ampere]                                  # optional: see `needs.py`
        judged_by: step                                  # or loop: with evaluation, saves and compilation
        note: one sentence for the table                 # optional

A value that is a list is added to the list so far (`speedups: [packing]`); any other value replaces the one before.
`max-steps` is read as `max_steps`. Each run has an output folder of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from ..arguments.config_file import read_nodes
from ..arguments.names import name_nearest
from ..errors import ArgumentError
from .needs import NEEDS

JudgedBy = Literal["step", "loop"]
Claim = tuple[float, float]  # least and most that is claimed; equal where one number is
Settings = dict[str, Any]  # argument -> its value as it would be typed: text, or a list of texts
MAX_NAME_BYTES = 200  # of the 255 that file systems give the name of a folder
OF_FILE = ("name", "source", "claimed", "common", "baseline", "phases")
OF_BASELINE = ("arguments", "claimed_memory", "launch")
OF_PHASE = ("name", *OF_BASELINE, "claimed", "needs", "judged_by", "note")


@dataclass(frozen=True)
class Phase:
    """What one phase adds, what is claimed of it (a speed-up, GB), and what it takes to measure it."""

    name: str
    arguments: Settings
    claimed: Claim | None = None
    claimed_memory: float | None = None
    launch: str | None = None
    needs: tuple[str, ...] = ()
    judged_by: JudgedBy = "step"
    note: str = ""


@dataclass(frozen=True)
class Progression:
    """A baseline and its phases, in order."""

    name: str
    baseline: Phase
    phases: tuple[Phase, ...]
    source: str = ""
    claimed: Claim | None = None
    common: Settings = field(default_factory=dict)


def read_progression(path: str) -> Progression:
    """Reads and checks a progression.

    Raises:
        ArgumentError: the file cannot be read or is no plain YAML; a key is unknown, missing, given twice, or has a
            value of another kind. Names the file, the line and the key.
    """
    top = _Fields(path, read_nodes(path), OF_FILE)
    baseline = _read_phase(top.fields("baseline", OF_BASELINE), "baseline")
    phases = tuple(_read_phase(entry) for entry in top.entries("phases", OF_PHASE))
    names = [baseline.name, *(phase.name for phase in phases)]
    folders = [name.replace(" ", "_").casefold() for name in names]
    for number, folder in enumerate(folders):
        if folder in folders[:number]:
            raise top.error("phases", f"the name {names[number]!r} is there twice; each needs its own")
        if folder.removeprefix("only_") in folders and folder.startswith("only_"):
            raise top.error("phases", f"{names[number]!r} is what --singles calls another phase; name it otherwise")
    return Progression(
        top.text("name"), baseline, phases, top.text("source", ""), top.claim("claimed"), top.settings("common")
    )


def _read_phase(entry: _Fields, name: str | None = None) -> Phase:
    own = name or entry.text("name")
    if any(character in own for character in "/\\") or own.startswith("."):
        raise entry.error("name", f"{own!r} names a folder as well: leave out / and \\, and a dot at the beginning")
    if (size := len(own.encode())) > MAX_NAME_BYTES:
        raise entry.error("name", f"names a folder as well, and has {size} bytes: at most {MAX_NAME_BYTES}")
    judged_by: Any = entry.choice("judged_by", ("step", "loop"))
    return Phase(
        own,
        entry.settings("arguments"),
        entry.claim("claimed"),
        entry.number("claimed_memory"),
        entry.text("launch", "") or None,
        entry.names("needs"),
        judged_by,
        entry.text("note", ""),
    )


def add_settings(below: Mapping[str, Any], above: Mapping[str, Any]) -> Settings:
    """`above` on top of `below`: lists grow by what they do not hold yet, other values are replaced."""
    both = dict(below)
    for name, value in above.items():
        grown = isinstance(value, list) and isinstance(both.get(name), list)
        both[name] = [*both[name], *(one for one in value if one not in both[name])] if grown else value
    return both


def as_flags(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The words of a command line."""
    words: list[str] = []
    for name, value in settings.items():
        words += [f"--{name}", *(value if isinstance(value, list) else [value])]
    return tuple(words)


class _Fields:
    """A mapping of the file, whose errors name file, line and key."""

    def __init__(self, path: str, node: yaml.Node, known: tuple[str, ...], inside: str = "") -> None:
        self.path, self.inside, self.line = path, inside, node.start_mark.line + 1
        self.nodes: dict[str, yaml.Node] = {}
        for key, value in _pairs(path, node, inside):
            if known and key not in known:
                self.nodes[key] = value
                raise self.error(key, f"no such key{name_nearest(key, known)}; there are {', '.join(known)}")
            self.nodes[key] = value

    def error(self, key: str, problem: str) -> ArgumentError:
        node = self.nodes.get(key)
        line = node.start_mark.line + 1 if node is not None else self.line
        return ArgumentError(f"{self.path} line {line}: {self.inside}{key}: {problem}.")

    def text(self, key: str, default: str | None = None) -> str:
        node = self.nodes.get(key)
        if node is None and default is not None:
            return default
        if not isinstance(node, yaml.ScalarNode) or not str(node.value).strip():
            raise self.error(key, "must be a text" if node is not None else "is missing")
        return " ".join(str(node.value).split())

    def number(self, key: str) -> float | None:
        node = self.nodes.get(key)
        return None if node is None else self._positive(key, node)

    def claim(self, key: str) -> Claim | None:
        node = self.nodes.get(key)
        if node is None:
            return None
        if isinstance(node, yaml.SequenceNode):
            ends = [self._positive(key, one) for one in node.value]
            if len(ends) != 2 or ends[0] > ends[1]:
                raise self.error(key, "a range is two numbers, the smaller one first, such as [1.5, 2]")
            return ends[0], ends[1]
        value = self._positive(key, node)
        return value, value

    def _positive(self, key: str, node: yaml.Node) -> float:
        try:
            value = float(node.value)
        except (TypeError, ValueError):
            value = math.nan
        if not 0 < value < math.inf:
            raise self.error(key, "must be a number above 0")
        return value

    def choice(self, key: str, known: tuple[str, ...]) -> str:
        value = self.text(key, known[0])
        if value not in known:
            raise self.error(key, f"{value!r}: must be {' or '.join(known)}")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        node = self.nodes.get(key)
        nodes = [] if node is None else node.value if _is_list(node) else [node]
        found = [one.value if isinstance(one, yaml.ScalarNode) else "a list or mapping" for one in nodes]
        for name in found:
            if name not in NEEDS:
                raise self.error(key, f"{name!r} is not known{name_nearest(str(name), NEEDS)}; there are {_listed()}")
        return tuple(found)

    def settings(self, key: str) -> Settings:
        node = self.nodes.get(key)
        if node is None:
            return {}
        inner = _Fields(self.path, node, (), f"{self.inside}{key}: ")
        if "output_dir" in inner.nodes:
            raise inner.error("output_dir", "each run has a folder of its own; leave it out")
        return {name: _as_typed(inner, name, value) for name, value in inner.nodes.items()}

    def fields(self, key: str, known: tuple[str, ...]) -> _Fields:
        if key not in self.nodes:
            raise self.error(key, "is missing")
        return _Fields(self.path, self.nodes[key], known, f"{key}: ")

    def entries(self, key: str, known: tuple[str, ...]) -> list[_Fields]:
        node = self.nodes.get(key)
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            raise self.error(key, "must be a list of at least one phase")
        return [_Fields(self.path, one, known, f"{key}, number {i}: ") for i, one in enumerate(node.value, 1)]


def _pairs(path: str, node: yaml.Node, inside: str) -> list[tuple[str, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        raise ArgumentError(f"{path} line {node.start_mark.line + 1}: {inside}must be lines of 'key: value'.")
    return [(str(key.value).replace("-", "_"), value) for key, value in node.value]


def _as_typed(fields: _Fields, name: str, node: yaml.Node) -> Any:
    """A value as it would be typed; `no` stays no, and a mapping becomes JSON, which Trainer's arguments take."""
    if isinstance(node, yaml.MappingNode):
        try:
            return json.dumps(yaml.SafeLoader("").construct_document(node))
        except (yaml.YAMLError, TypeError, ValueError) as error:
            why = " ".join(str(error).split())
            raise fields.error(name, f"must map names to texts, numbers and lists ({why})") from error
    if isinstance(node, yaml.SequenceNode):
        if any(isinstance(one, yaml.SequenceNode) for one in node.value):
            raise fields.error(name, "a list inside of a list is no argument")
        return [_as_typed(fields, name, one) for one in node.value]
    if node.tag == "tag:yaml.org,2002:null":
        raise fields.error(name, "has no value; leave the line out, or write the value that switches it off")
    return node.value


def _is_list(node: yaml.Node) -> bool:
    return isinstance(node, yaml.SequenceNode)


def _listed() -> str:
    return ", ".join(NEEDS)
