"""Does this run continue that one? Every difference is listed; what would make it another run is a contradiction."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...data.fingerprint import compare_fingerprints
from ...errors import ArgumentError, CheckpointError
from .argument_roles import ANOTHER_RUN, HARMLESS, OTHER_STATES, STEP_SIZE, is_idle

SECTIONS = ("versions", "arguments", "data", "model", "collator", "speedups")
GROUPS = ("all", "collator", "data", "model", "speedups", "world_size")

# Speed-ups that change the order of the data or the numbers beyond rounding -> the settings that matter. Others of
# class L are compared whole, unless they act through arguments, which are compared anyway.
_MATTER: dict[str, tuple[str, ...]] = {"packing": (), "encoder_precision": ("dtype", "mode")}
_ACT_THROUGH_ARGUMENTS = frozenset({"batch_size", "lora"})

_ABSENT = object()


@dataclass
class Changes:
    """What differs between a checkpoint's run and this one, a line each.

    `contradictions` make the continuation another run; `notes` do not, or were allowed; `allowed` are the names of what
    differs, matters and was allowed.
    """

    notes: list[str] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    allowed: frozenset[str] = frozenset()


def compare_runs(old: Mapping[str, Any], new: Mapping[str, Any], allowed: Sequence[str] = ()) -> Changes:
    """Compares the facts of a checkpoint's run with those of this one.

    Args:
        old, new: from `describe_run`; what `old` lacks (another version, a checkpoint of stock Trainer) is noted.
        allowed: what may differ: names of arguments, of a collator's settings or of speed-ups, or one of `GROUPS`.

    Raises:
        ArgumentError: an unknown name in `allowed`.
    """
    _check_allowed(allowed, old, new)
    comparison = _Comparison(frozenset(allowed))
    for section in SECTIONS:
        if section not in old:
            comparison.changes.notes.append(f"{section}: not recorded in the checkpoint")
    known = [section for section in SECTIONS if section in old and section in new]
    for section in known:
        _COMPARE[section](comparison, old, new)
    if "arguments" in known:
        _compare_processes(comparison, old, new)
    before, now = (facts.get("written_by", "Trainer") for facts in (old, new))
    if before != now:
        comparison.changes.contradictions.append(
            f"weights and states are in the files of {before}, this run reads those of {now}: launch it as before, or "
            "start a new run from its weights (of FSDP2's shards, `accelerate merge-weights` makes a file)"
        )
    return comparison.changes


def refuse(checkpoint: str | os.PathLike[str], contradictions: Sequence[str]) -> None:
    """Raises CheckpointError if there are any."""
    if contradictions:
        listed = "\n  ".join(contradictions)
        raise CheckpointError(
            f"{checkpoint} was written by a run that differs:\n  {listed}\nUse --resume no or another --output_dir to "
            'begin anew, the old values to continue as it was, or allow_changed=["NAME", ...] (--allow_changed NAME '
            "[NAME ...]) to continue with the new ones."
        )


def _check_allowed(allowed: Sequence[str], old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    found = {name for facts in (old, new) for part in ("collator", "speedups") for name in facts.get(part, ())}
    unknown = [name for name in allowed if name not in {*GROUPS, *ANOTHER_RUN, *HARMLESS, *found}]
    if unknown:
        raise ArgumentError(
            f"allow_changed: unknown {unknown}. Known: {', '.join(GROUPS)}, or by name "
            f"{', '.join(sorted({*ANOTHER_RUN, *found}))}."
        )


class _Comparison:
    """Collects differences; each has the names under which it can be allowed, its own first."""

    def __init__(self, allowed: frozenset[str]):
        self.permitted = allowed
        self.changes = Changes()

    def add(self, text: str, names: Sequence[str] = (), is_contradiction: bool = False) -> None:
        if not is_contradiction:
            self.changes.notes.append(text)
        elif self.permitted.isdisjoint({"all", *names}):
            self.changes.contradictions.append(text)
        else:
            self.changes.notes.append(f"{text} (allowed)")
            self.changes.allowed |= {names[0]}

    def compare(
        self, title: str, old: Any, new: Any, names: Sequence[str] = (), matters: bool = True, is_strict: bool = False
    ) -> None:
        """Adds every leaf that differs. What only one side has (another version of a package) is a note.

        With `is_strict`, only if the whole is missing: an entry more or less is a difference like any other.
        """
        before, now = {title: old}, {title: new}
        if isinstance(old, Mapping | list) and type(old) is type(new):
            before, now = dict(_leaves(old, title)), dict(_leaves(new, title))
        is_open = not is_strict or old is _ABSENT or new is _ABSENT
        for place in dict.fromkeys([*before, *now]):
            one, other = before.get(place, _ABSENT), now.get(place, _ABSENT)
            if one != other:
                is_new = is_open and (one is _ABSENT or other is _ABSENT)
                self.add(f"{place}: {_then(one)}, {_now(other)}", names, matters and not is_new)


def _compare_arguments(comparison: _Comparison, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    before, now = old["arguments"], new["arguments"]
    for name in dict.fromkeys([*before, *now]):
        one, other = before.get(name, _ABSENT), now.get(name, _ABSENT)
        if name in STEP_SIZE:
            continue
        if name in OTHER_STATES and one != other:
            comparison.changes.contradictions.append(
                f"{name}: {_then(one)}, {_now(other)}: its states do not fit; start a new run from the weights"
            )
            continue
        matters = name in ANOTHER_RUN and not is_idle(name, before, now)
        comparison.compare(name, one, other, [name], matters, is_strict=True)


def _compare_processes(comparison: _Comparison, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Batch size, accumulation and processes: notes as long as every optimizer step takes the same rows."""
    values = []
    for facts in (old, new):
        shared = {name: facts[name] for name in ("world_size", "devices_per_process") if name in facts}
        values.append({**{name: facts["arguments"].get(name, _ABSENT) for name in sorted(STEP_SIZE)}, **shared})
    before, now = values
    is_same = _step_shape(old) == _step_shape(new)
    for name in before:
        one, other = before[name], now.get(name, _ABSENT)
        if one != other:
            hint = " (the same rows in every step)" if is_same else _hint(old) if name == "world_size" else ""
            text = f"{name}: {_then(one)}, {_now(other)}{hint}"
            names = [name] if name in STEP_SIZE else [name, "world_size"]
            comparison.add(text, names, not is_same)


def _step_shape(facts: Mapping[str, Any]) -> tuple:
    """Equal shapes mean that the optimizer steps of two runs take the same rows in the same order."""
    arguments = facts["arguments"]
    passes, processes = arguments.get("gradient_accumulation_steps", 1), facts.get("world_size", 1)
    rows = arguments.get("per_device_train_batch_size", 1) * facts.get("devices_per_process", 1)
    budget = facts.get("speedups", {}).get("token_budget")
    if budget is not None:  # planned in steps of so many batches, whatever the batch size says
        return ("tokens", budget.get("max_batch_size"), passes * processes)
    if (arguments.get("accelerator_config") or {}).get("split_batches"):
        processes = 1
    return ("rows", rows * passes * processes)


def _hint(old: Mapping[str, Any]) -> str:
    """How this number of processes takes the rows that the checkpoint's steps took."""
    kind, *_, size = _step_shape(old)
    if (old["arguments"].get("accelerator_config") or {}).get("split_batches"):
        return ""
    if kind == "rows":
        return f"; --effective_batch_size {size} takes the same rows in every step on any number of processes"
    return f"; the same rows are in every step as long as --gradient_accumulation_steps times processes is {size}"


def _compare_data(comparison: _Comparison, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    differences, untold = compare_fingerprints(old["data"], new["data"])
    for text in differences:
        comparison.add(f"data: {text}", ["data"], is_contradiction=True)
    for text in untold:
        comparison.add(f"data: {text}")


def _compare_model(comparison: _Comparison, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    before, now = old["model"], new["model"]
    for name in dict.fromkeys([*before, *now]):
        matters = name != "base"  # where it came from: weights that stay frozen are compared by their hash
        values = before.get(name, _ABSENT), now.get(name, _ABSENT)
        comparison.compare(f"model.{name}", *values, names=["model"], matters=matters)


def _compare_collator(comparison: _Comparison, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    before, now = old["collator"], new["collator"]
    for name in dict.fromkeys([*before, *now]):
        values = before.get(name, _ABSENT), now.get(name, _ABSENT)
        comparison.compare(f"collator.{name}", *values, names=[name, "collator"])


def _compare_speedups(comparison: _Comparison, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    before, now = old["speedups"], new["speedups"]
    for name in dict.fromkeys([*before, *now]):
        one, other = before.get(name), now.get(name)
        if one == other:
            continue
        if name in _MATTER:
            matters = _choose(one, _MATTER[name]) != _choose(other, _MATTER[name])
        else:
            matters = (one or other)["kind"] == "L" and name not in _ACT_THROUGH_ARGUMENTS
        if name == "packing":  # by itself it leaves the batches as they are
            matters = matters and ("token_budget" in before or "token_budget" in now)
        names = [name, "speedups", *(["max_tokens_per_batch"] if name == "token_budget" else [])]
        comparison.add(f"speed-up {name}: {_settings(one)} in the checkpoint, {_settings(other)} now", names, matters)


def _compare_versions(comparison: _Comparison, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    comparison.compare("version", old["versions"], new["versions"], matters=False)


_COMPARE = {
    "versions": _compare_versions,
    "arguments": _compare_arguments,
    "data": _compare_data,
    "model": _compare_model,
    "collator": _compare_collator,
    "speedups": _compare_speedups,
}


def _choose(settings: Mapping[str, Any] | None, names: Sequence[str]) -> tuple | None:
    return None if settings is None else tuple(settings.get(name) for name in names)


def _settings(settings: Mapping[str, Any] | None) -> str:
    if settings is None:
        return "off"
    return _short({key: value for key, value in settings.items() if key != "kind"}) if len(settings) > 1 else "on"


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """(dotted place, value) of everything in nested mappings and in lists of mappings."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _leaves(part, f"{place}.{key}")
    elif isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        for i, part in enumerate(value):
            yield from _leaves(part, f"{place}.{i}")
    else:
        yield place, value


def _then(value: Any) -> str:
    return "not recorded in the checkpoint" if value is _ABSENT else f"{_short(value)} in the checkpoint"


def _now(value: Any) -> str:
    return "not there now" if value is _ABSENT else f"{_short(value)} now"


def _short(value: Any, limit: int = 120) -> str:
    text = str(value) or "''"
    return text if len(text) <= limit else f"{text[:limit]}..."
