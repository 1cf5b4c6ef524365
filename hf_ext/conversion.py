"""A value of YAML or of a preset as the command line would have made it of its word, or an error with its place."""

from __future__ import annotations

import argparse
import enum
import types
from typing import Any, Union, get_args, get_origin

from .argument_names import is_secret
from .config_file import Given
from .errors import ArgumentError


def convert_value(key: str, given: Given, action: argparse.Action, members: tuple[Any, ...]) -> Any:
    """One value as the command line would have made it.

    Args:
        key: the field's name.
        action: the field's flag.
        members: `type_members` of the field's type.

    Raises:
        ArgumentError: it is of another type, or none of the flag's choices.
    """
    plain = given.plain
    value_shown = "the value, not shown here," if is_secret(key) else repr(plain)
    wrong = ArgumentError(f"{given.where}: {key}: {value_shown} is not {_expected(action, members)}.")
    if plain is None or isinstance(plain, (list, tuple, dict)):
        raise wrong
    text = str(given.text.value if isinstance(given.text, enum.Enum) else given.text)
    if bool in members and isinstance(plain, bool):
        return plain  # YAML's on/off, which the command line does not know
    try:
        value = action.type(text) if callable(action.type) else text
    except (ValueError, TypeError, argparse.ArgumentTypeError):
        if str in members and action.choices is None:
            return text  # `str | bool`: HfArgumentParser only tries the bool
        raise wrong from None
    if action.choices is not None and value not in action.choices:
        raise wrong
    return value


def _ascii(text: str) -> str:
    """Python's numbers may also have underscores and the digits of every script."""
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    return text


def _read_int(text: str) -> int:
    return int(_ascii(text))


def _read_float(text: str) -> float:
    return float(_ascii(text))


_read_int.__name__, _read_float.__name__ = "int", "float"  # as argparse names the type in its errors
NUMBER_READERS: dict[Any, Any] = {int: _read_int, float: _read_float}


def type_members(hint: Any) -> tuple[Any, ...]:
    """The types that a hint allows, without None."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(member for member in get_args(hint) if member is not type(None))
    return (hint,)


def _expected(action: argparse.Action, members: tuple[Any, ...]) -> str:
    if action.choices is not None:
        return f"one of {', '.join(str(choice) for choice in action.choices)}"
    names = [member.__name__ if isinstance(member, type) else str(member) for member in members]
    return " or ".join(name.replace("typing.", "") for name in names)
