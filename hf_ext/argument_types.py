"""Arguments of a wrong type, which Python would take for something else: `use_peft="false"` is true, `"all"` a list.

The command line and YAML convert words by the types of the fields; code that builds the dataclass itself does not.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import cache
from numbers import Integral, Real
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from .errors import ArgumentError

NO = ("false", "no", "off", "0", "n", "f", "none")  # that a condition takes for True


def wrap_single_words(arguments: Any, own: type, inherited: type) -> None:
    """Makes `speedups="all"` a list of one, as Trainer does with `report_to`; in fields that only `own` has."""
    theirs = {field.name for field in dataclasses.fields(inherited)}
    for name, hint in _hints(own).items():
        value = getattr(arguments, name)
        if name not in theirs and isinstance(value, str) and any(get_origin(part) is list for part in _members(hint)):
            setattr(arguments, name, [value])


def check_types(arguments: Any, own: type, inherited: type) -> None:
    """Refuses values that are not of the types that the fields of `own` say.

    Of fields that `own` has from `inherited`, whose code takes more than it says, only what must be a mistake: a part
    of a step or seed, and words for no.

    Raises:
        ArgumentError: names field, value and what is allowed.
    """
    theirs = {field.name for field in dataclasses.fields(inherited)}
    for name, hint in _hints(own).items():
        value, kinds = getattr(arguments, name), _members(hint)
        if value is None and type(None) in kinds:
            continue
        problem = _find_mistake(value, kinds) if name in theirs else _find_mismatch(value, kinds)
        if problem:
            raise ArgumentError(f"{name.removesuffix('_ext')}={value!r}: {problem}.")


def check_resume(word: Any) -> None:
    """Refuses what is meant as a word and would be taken for the name of a folder.

    Raises:
        ArgumentError: names the value and what is allowed.
    """
    if str(word) not in ("auto", "no") and str(word).lower() in ("", "auto", "true", "yes", *NO):
        raise ArgumentError(
            f"resume={word!r}: allowed are 'auto' (the newest checkpoint in output_dir), 'no', and the folder of a "
            "checkpoint (./NAME, where it has such a name)."
        )


def _find_mismatch(value: Any, kinds: tuple[Any, ...]) -> str | None:
    """What a value that belongs to none of the types `kinds` must be."""
    rules = [_RULES[get_origin(kind) or kind] for kind in kinds if (get_origin(kind) or kind) in _RULES]
    if not rules or any(holds(value) for _, holds in rules):
        return None
    return "must be " + " or ".join(words for words, _ in rules)


def _find_mistake(value: Any, kinds: tuple[Any, ...]) -> str | None:
    """As `_find_mismatch`, for fields of transformers: 4.0 steps are 4."""
    plain = {kind for kind in kinds if kind is not type(None)}
    if plain == {int} and not (isinstance(value, Real) and float(value).is_integer()):
        return "must be a whole number"
    if plain == {bool} and isinstance(value, str) and value.lower() in NO:
        return "must be True or False: Python takes any text for True"
    return None


def _is_list_of_words(value: Any) -> bool:
    return isinstance(value, list | tuple | set | frozenset) and all(isinstance(item, str) for item in value)


_RULES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda value: isinstance(value, bool | np.bool_)),
    int: ("a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, Real)),
    str: ("text", lambda value: isinstance(value, str | os.PathLike)),
    list: ("a list of words", _is_list_of_words),
}


@cache
def _hints(own: Any) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(own)}
    return {name: hint for name, hint in get_type_hints(own).items() if name in names}


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    is_one = isinstance(hint, type) or get_origin(hint) is list
    return (hint,) if is_one else get_args(hint)
