"""The page of `--help`: the flags that people use first, or with `all` every one, with the defaults in effect."""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

ALL = "all"
_DEFAULT_IN_TEXT = re.compile(r"\s*Defaults? (to|is) [^.]*\.?$")  # transformers' own, which a recipe may have changed


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and keeps the line breaks of descriptions."""


class ShowHelp(argparse.Action):
    """`--help`: prints the first page, or with the word `all` the whole, and ends the program."""

    def __init__(self, option_strings: Any, dest: str, **kwargs: Any):
        super().__init__(option_strings, dest, nargs="?", choices=(ALL,), metavar=ALL, **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(parser.format_all_help() if values == ALL else parser.format_help(), end="")
        parser.exit()


def format_flags(
    parser: argparse.ArgumentParser,
    description: str | None,
    epilog: str | None,
    of_fields: Collection[str],
    defaults: Mapping[str, Any],
    left_out: Collection[str],
) -> str:
    """Formats as argparse does, with defaults in effect, and each flag in one spelling: --no_x is --x false.

    Args:
        of_fields: names of arguments that are fields of dataclasses; `left_out`: of those that are not shown.
    """
    page = parser._get_formatter()
    done = set(left_out)
    page.add_usage(parser.usage, parser._actions, [])
    page.add_text(description)
    for group in parser._action_groups:
        page.start_section(group.title)
        for action in group._group_actions:
            if action.dest in done:
                continue
            done.add(action.dest)
            shown = copy.copy(action)
            shown.default = _as_typed(defaults.get(action.dest, action.default))
            if action.dest in of_fields:
                shown.option_strings = action.option_strings[:1]
                shown.help = _DEFAULT_IN_TEXT.sub("", action.help or "")
            page.add_argument(shown)
        page.end_section()
    page.add_text(epilog)
    return page.format_help()


def _as_typed(value: object) -> Any:
    """Writes a default as a user would type it: `all` for ["all"], `linear` for SchedulerType.LINEAR."""
    if isinstance(value, list | tuple):
        return " ".join(str(_as_typed(one)) for one in value) or "none given"
    return value.value if isinstance(value, Enum) else value
