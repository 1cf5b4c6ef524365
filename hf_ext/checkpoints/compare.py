"""Does a run continue the one that wrote a checkpoint? Facts of both, compared; what makes another run is refused.

Of arguments, all are compared that are not in `free_to_differ.py`, one with several entries entry by entry.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..data import compare_fingerprints
from ..errors import ArgumentError, CheckpointError
from ..files import Facts, StrPath
from .manifest import CHECKPOINT_NAME, read_stored
from .run_facts import compared_arguments

# Decide which rows make up an optimizer step; harmless together as long as every step takes the same rows.
STEP_SIZE = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps"})

# No state of the old one fits the new one, so that not even `allow_changed` continues: weights alone could be a start.
OTHER_STATES = frozenset({"optim", "optim_args", "optim_target_modules", "lr_scheduler_type"})

# Of arguments, these may come to be others than the user gave.
NOT_AS_ASKED = STEP_SIZE | {"metric_for_best_model", "remove_unused_columns", "parallelism_config", "fsdp"}
NOT_AS_ASKED |= {"fsdp_config", "deepspeed"}
NOTHING: tuple[Any, ...] = (None, "", [], {})  # ways to give an argument nothing

GROUPS = ("all", "collator", "data", "eval_data", "model", "speedups", "test_data", "world_size")

MAX_SHOWN = 120  # characters of a value
NEVER = ""  # names what no word in `allow_changed` lets pass
# What differs, as a line, and the word in `allow_changed` that lets it pass.
Difference = tuple[str, str]

logger = logging.getLogger(__name__)


class Changes(NamedTuple):
    """What differs between a checkpoint's run and this one and makes the continuation another run.

    `contradictions` are lines; `allowed` the names of what differs and was allowed, `allowable` of what could be.
    """

    contradictions: list[str]
    allowed: set[str]
    allowable: set[str]


def compare_runs(old: Facts, new: Facts, allowed: Sequence[str] = ()) -> Changes:
    """Compares the facts of a checkpoint's run with those of this one, in what both have.

    Args:
        old, new: from `describe_run`.
        allowed: what may differ: names of arguments, or one of `GROUPS`.

    Raises:
        ArgumentError: an unknown name in `allowed`.
    """
    arguments = {*new.get("arguments", ())}
    unknown = {*allowed} - {*GROUPS, *arguments}
    if unknown:
        known = ", ".join((*GROUPS, *sorted(arguments - OTHER_STATES)))
        raise ArgumentError(f"allow_changed: unknown {sorted(unknown)}. Known: {known}.")
    found = list(_find_differences(old, new))
    passed = {name for _, name in found if name != NEVER and {"all", name} & {*allowed}}
    others = [(text, name) for text, name in found if name not in passed]
    return Changes([text for text, _ in others], passed, {name for _, name in others} - {NEVER})


def refuse(checkpoint: StrPath, changes: Changes) -> None:
    """Raises CheckpointError if there are contradictions; names `allow_changed` where it lets one of them pass."""
    if changes.contradictions:
        listed = "\n  ".join(changes.contradictions)
        ways = "--resume no or another --output_dir to begin anew, the old values to continue as it was"
        if changes.allowable:
            ways += ', or allow_changed=["NAME", ...] (--allow_changed NAME [NAME ...]) to continue with the new ones'
        raise CheckpointError(f"{checkpoint} was written by a run that differs:\n  {listed}\nUse {ways}.")


def refuse_asked(args: Any) -> None:
    """Refuses what the user asks for and the checkpoint that is to be continued has otherwise; before rows are read.

    Of arguments that neither plan nor search changes: all others, data and model are compared when training begins.
    Reads one manifest.
    """
    asked = args.resume_from_checkpoint or args.resume
    if asked in (None, False, "no"):
        return
    is_newest = asked is True or asked == "auto"
    folders = Path(args.output_dir).glob("checkpoint-*") if is_newest else [Path(str(asked))]
    found = [
        read_stored(folder, int(step[1])) for folder in folders if (step := CHECKPOINT_NAME.fullmatch(folder.name))
    ]
    stored = max(filter(None, found), key=lambda one: one.step, default=None)
    if stored is not None:
        before = stored.manifest.facts["arguments"]
        now = compared_arguments(args)
        asked_for = (args.explicit_fields & now.keys()) - NOT_AS_ASKED
        now |= {name: value for name, value in before.items() if name not in asked_for}
        refuse(stored.path, compare_runs({"arguments": before}, {"arguments": now}, args.allow_changed))


def _find_differences(old: Facts, new: Facts) -> Iterator[Difference]:
    both = old.keys() & new.keys()
    if "arguments" in both:
        yield from _compare_arguments(old["arguments"], new["arguments"])
    if "world_size" in both:
        yield from _compare_steps(old, new)
    if "data" in both:
        yield from _compare_rows("data", "data", old["data"], new["data"])
    before = old.get("held_out", {})
    now = new.get("held_out", {})
    for split in [split for split in before if split in now]:  # one that came or went contradicts no score of before
        group = "test_data" if split == "test" else "eval_data"
        place = group if split in ("test", "eval") else f"eval_data, set '{split.removeprefix('eval_')}'"
        yield from _compare_rows(place, group, before[split], now[split])
    for section in {"model", "collator"} & both:
        before, now = (dict(_leaves(one[section], section)) for one in (old, new))
        for place in before:  # what only one of them has, another version of a library may have added
            if place in now and before[place] != now[place]:
                yield _line(place, before[place], now[place]), section
    if "speedups" in both:
        for name in {**old["speedups"], **new["speedups"]}:
            one = old["speedups"].get(name, "off")
            other = new["speedups"].get(name, "off")
            if one != other:
                yield _line(f"speed-up {name}", one or "on", other or "on"), "speedups"
    if old.get("written_by") != new.get("written_by"):
        text = (
            f"weights and states are in the files of {old.get('written_by')}, this run reads those of "
            f"{new.get('written_by')}: launch it as before, or start a new run from its weights (of FSDP2's shards, "
            "`accelerate merge-weights` makes a file)"
        )
        yield text, NEVER


def _compare_rows(place: str, group: str, old: Facts, new: Facts) -> Iterator[Difference]:
    differences, untold = compare_fingerprints(old, new)
    yield from ((f"{place}: {text}", group) for text in differences)
    for text in untold:
        logger.info("%s: %s", place, text)


def _compare_arguments(before: Facts, now: Facts) -> Iterator[Difference]:
    idle = set(STEP_SIZE)  # compared as what they make together
    if min(before.get("max_steps", -1), now.get("max_steps", -1)) > 0:
        idle.add("num_train_epochs")
    if None in (before.get("metric_for_best_model"), now.get("metric_for_best_model")):
        idle |= {"metric_for_best_model", "greater_is_better"}  # nothing says which is best
    if missing := sorted(before.keys() ^ now.keys()):
        logger.debug("Not compared, since one of the runs has no such argument: %s", ", ".join(missing))
    for name in [name for name in before if name in now and name not in idle]:
        adds_group = name == "encoder_learning_rate" and None in (before[name], now[name])
        for line in _compare_values(name, before[name], now[name]):
            if name in OTHER_STATES or adds_group:
                yield f"{line}: its states do not fit; start from the weights alone", NEVER
            else:
                yield line, name


def _compare_values(name: str, one: Any, other: Any) -> Iterator[str]:
    """Yields a line where two values differ; for settings in a mapping, one for each that does."""
    before, now = (dict(_leaves(None if value in NOTHING else value, name)) for value in (one, other))
    for place in {**before, **now}:
        if not _is_same(before.get(place), now.get(place)):
            yield _line(place, before.get(place), now.get(place))


def _is_same(one: object, other: object) -> bool:
    return one == other or json.dumps(one) == json.dumps(other)  # NaN is no other NaN to Python


def _compare_steps(old: Facts, new: Facts) -> Iterator[Difference]:
    """Yields differences unless every optimizer step takes the same rows.

    Batch size, accumulation and processes may differ.
    """
    kind, size = _step_size(old)
    if (kind, size) == _step_size(new):
        return
    same = "--effective_batch_size" if kind == "rows" else "--gradient_accumulation_steps times processes ="
    for name in (*sorted(STEP_SIZE), "world_size", "devices_per_process"):
        one, other = (facts.get(name, facts["arguments"].get(name)) for facts in (old, new))
        if one != other:
            hint = f"; {same} {size} keeps the rows of every step" if name == "world_size" else ""
            yield _line(name, one, other) + hint, name if name in STEP_SIZE else "world_size"


def _step_size(facts: Facts) -> tuple[str, int]:
    """Describes the rows of a step: where it is equal, two runs take the same rows in the same order."""
    arguments = facts["arguments"]
    num_batches = arguments["gradient_accumulation_steps"] * facts["world_size"]
    if "token_budget" in facts["speedups"]:  # planned in steps of so many batches, whatever the batch size says
        return "tokens", num_batches
    return "rows", num_batches * arguments["per_device_train_batch_size"] * facts["devices_per_process"]


def _leaves(value: object, place: str) -> Iterator[tuple[str, Any]]:
    """Yields (dotted place, value) of everything in nested mappings and in lists of mappings."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{place}.{key}")
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{place}.{i}")
    else:
        yield place, value


def _line(name: str, one: object, other: object) -> str:
    return f"{name}: {_short(one)} in the checkpoint, {_short(other)} now"


def _short(value: object) -> str:
    text = str(value) or "''"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
