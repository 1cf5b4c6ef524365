"""Which values an argument may have: of its type, of the words that the type lists, and within a range.

The command line and YAML convert words by the types of the fields; code that builds a dataclass itself does not. So the
dataclasses ask here, and a wrong value is the same error from Python, YAML and the command line.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from numbers import Real
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
from huggingface_hub.dataclasses import type_validator

from ..errors import ArgumentError
from .presets import is_secret


class Range(NamedTuple):
    """Numbers that are allowed, and the words that complete "must be"."""

    words: str
    holds: Callable[[float], bool]


FINITE = Range("a finite number", math.isfinite)
COUNT = Range("at least 1", lambda value: 1 <= value < math.inf)
ABOVE_ZERO = Range("above 0 and finite", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = Range("finite and not negative", lambda value: 0 <= value < math.inf)
NUM_WORKERS = Range("from 0 to 1024, a process each", lambda value: 0 <= value <= 1024)
WIDTH = Range("from 1 to 65536", lambda value: 1 <= value <= 2**16)
SHARE_BELOW_ONE = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
SEED = Range(f"from 0 to {2**32 - 1}", lambda value: 0 <= value < 2**32)  # NumPy takes no larger one


def check_ranges(arguments: object, ranges: Mapping[str, Range] | None = None) -> None:
    """Refuses numbers outside of their ranges; of a list, each number. None, "not given", is always allowed.

    Args:
        ranges: None: those in the fields' types.

    Raises:
        ArgumentError: names field, value and what is allowed.
    """
    for name, allowed in (ranges or ranges_in_types(type(arguments))).items():
        value = getattr(arguments, name)
        for number in value if isinstance(value, list | tuple) else [value]:
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, Real) or not allowed.holds(float(number)):
                kind = ", and is text" if isinstance(number, str) else ""
                raise ArgumentError(f"{name}={value!r}: must be {allowed.words}{kind}.")


def check_choices(arguments: Any) -> None:
    """Refuses a word that the `Literal` of a dataclass field does not list, and None where its type has none.

    None is also allowed where it is the field's default, as other libraries' dataclasses have it.

    Raises:
        ArgumentError: names field, value and what is allowed.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(arguments)}
    for name, hint in field_types(arguments.__class__).items():
        choices = _choices(hint)
        value = getattr(arguments, name)
        word = getattr(value, "value", value)  # an enum counts as its word
        if not choices or word in choices or (value is None and defaults[name] is None):
            continue
        raise ArgumentError(f"{name}={value!r}: allowed are {', '.join(map(str, choices))}.")


def check_types(arguments: Any, names: Collection[str]) -> None:
    """Refuses values of the fields `names` that are not of the fields' types, as Python would take them for others.

    `use_peft="false"` would be true. Numbers of NumPy, paths and tuples stand for numbers, text and lists.

    Raises:
        ArgumentError: names field, value (of a token nothing) and type.
    """
    for name, hint in field_types(arguments.__class__).items():
        if name not in names or _choices(hint):
            continue
        try:
            type_validator(name, _plain(getattr(arguments, name)), hint | int if float in members(hint) else hint)
        except TypeError:
            shown = "(not shown)" if is_secret(name) else repr(getattr(arguments, name))
            raise ArgumentError(f"{name}={shown}: must be {describe_type(hint)}.") from None


def check_metric_name(given: str | None, known: Sequence[str]) -> None:
    """Refuses a `metric_for_best_model` that no evaluation will compute; stock Trainer does after the first one.

    Raises:
        ArgumentError: names it and what is allowed.
    """
    if given is not None and given.removeprefix("eval_").removeprefix("full_") not in known:
        raise ArgumentError(f"metric_for_best_model={given!r}: allowed are {', '.join(known)}.")


@cache
def field_types(dataclass: Any, include_extras: bool = False) -> dict[str, Any]:
    """Returns the type of each field of a dataclass; with `include_extras` as `Annotated`, where it is."""
    hints = get_type_hints(dataclass, include_extras=include_extras)
    return {field.name: hints[field.name] for field in dataclasses.fields(dataclass)}


def ranges_in_types(dataclass: object) -> dict[str, Range]:
    """Returns the ranges that fields have in their types: {"size": COUNT} of `size: Annotated[int, COUNT] | None`."""
    parts = [(name, part) for name, hint in field_types(dataclass, True).items() for part in (hint, *get_args(hint))]
    notes = [(name, note) for name, part in parts for note in getattr(part, "__metadata__", ())]
    return {name: note for name, note in notes if isinstance(note, Range)}


def members(hint: object) -> tuple[Any, ...]:
    """Returns the types of a union, or the one type."""
    is_one = isinstance(hint, type) or get_origin(hint) in (list, dict, Literal)
    return (hint,) if is_one else get_args(hint)


def describe_type(hint: object) -> str:
    """Describes a type in the words of messages: "int or None" for `int | None`."""
    names = [part.__name__ if part in (bool, int, float, str) else str(part) for part in members(hint)]
    return " or ".join(names).replace("<class 'NoneType'>", "None").replace("typing.", "")


def _choices(hint: object) -> tuple[Any, ...]:
    """Returns what `Literal[...]` lists, and None, if it is beside it.

    () of any other type, and where that is beside it.
    """
    parts = members(hint)
    if all(part is NoneType or get_origin(part) is Literal for part in parts) and set(parts) != {NoneType}:
        return tuple(word for part in parts for word in (get_args(part) or (None,)))
    return ()


def _plain(value: object) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [*value] if isinstance(value, tuple | set | frozenset) else value
