"""`--help` in groups: the flags that people use first; with `--help all` every one, those of transformers last."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import re
from collections.abc import Collection, Mapping
from enum import Enum
from itertools import takewhile
from typing import Any, NoReturn

from transformers import HfArgumentParser

from ..errors import ArgumentError
from .names import name_nearest
from .training_fields import training_names

ALL = "all"
STOCK = "training arguments of transformers"
# In the order in which help prints them, after groups of other names.
GROUPS = ("data", "model", "speed-ups", "training", "checkpoints", "evaluation", "logs and reports", STOCK)
_DEFAULT_IN_TEXT = re.compile(r"\s*Defaults? (to|is) [^.]*\.?$")  # transformers' own, which a recipe may have changed


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and keeps the line breaks of descriptions."""


class ShowHelp(argparse.Action):
    """`--help`: prints the first page, or with the word `all` the whole, and ends the program."""

    def __init__(self, option_strings: Any, dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs="?", choices=(ALL,), metavar=ALL, **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(parser.format_all_help() if values == ALL else parser.format_help(), end="")
        parser.exit()


class GroupedArgumentParser(HfArgumentParser):
    """`HfArgumentParser` whose help has the fields of its dataclasses in groups, and a place for other defaults.

    A field stands in the group that `_argument_groups` of its dataclass names, {group: (field, ...)}, else in that of
    the class that declares it (`_argument_group_name`, HfArgumentParser's own); without either, among the options.
    `--help` shows the fields that `_first_flags` of a dataclass names, its own and others of the parser, and says that
    `--help all` shows the rest; where no dataclass has such a table, it shows all. Parsing is that of the parent class,
    but a mistake raises ArgumentError where argparse would print and exit, or leave a word unread. A command that
    trains nothing says so of a flag of training: `_only_reads` of one of its dataclasses is its name.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        is_one = dataclasses.is_dataclass(dataclass_types)
        types: list[Any] = [dataclass_types] if is_one else [*(dataclass_types or ())]
        self._group_of = {
            field.name: _group(dtype, field.name) for dtype in types for field in dataclasses.fields(dtype)
        }
        listed = [group for dtype in types for group in getattr(dtype, "_argument_groups", ())]
        names = dict.fromkeys([*listed, *filter(None, self._group_of.values())])
        self._order = sorted(names, key=lambda name: GROUPS.index(name) if name in GROUPS else -1)
        self._first_flags = {name for dtype in types for name in getattr(dtype, "_first_flags", ())}
        self._only_reads = next((dtype._only_reads for dtype in types if hasattr(dtype, "_only_reads")), None)
        self._groups: dict[str | None, Any] = {}
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(types, **{**kwargs, "add_help": False})
        text = "The flags that people use first; all: every one."
        self.add_argument("-h", "--help", action=ShowHelp, default=argparse.SUPPRESS, help=text)

    def error(self, message: str) -> NoReturn:
        """Raises ArgumentError, so that all mistakes read and test alike."""
        end = "" if message.endswith("?") else "."
        raise ArgumentError(f"Command line: {message}{end} Run with --help all for all flags.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse, but words that are no flags are an error, with the nearest flag of each."""
        namespace, unknown = super().parse_known_args(args, namespace)
        flags = [option for action in self._actions for option in action.option_strings]
        wrong = [part.partition("=")[0] for part in unknown if part.startswith("-")] or unknown
        if wrong:
            self.error("; ".join(self.describe_unknown(part, flags) for part in wrong))
        return namespace, []

    def describe_unknown(self, flag: str, flags: Collection[str]) -> str:
        """What is wrong with a flag, or key of a YAML file, that is none of `flags`."""
        if self._only_reads and flag.lstrip("-").replace("-", "_") in training_names():
            return f"{flag} is a flag of training; {self._only_reads} only reads the model"
        return f"unknown argument {flag!r}{name_nearest(flag, flags)}"

    def shown_defaults(self) -> Mapping[str, Any]:
        """Field -> what it has where nobody gives it."""
        return {}

    def format_help(self) -> str:
        """The first page, of the flags that people use first."""
        if not self._first_flags:
            return self.format_all_help()
        first, *rest = (self.description or "").split("\n\n")
        examples = takewhile(lambda paragraph: paragraph.startswith(" "), rest)
        num_flags = len({action.dest for action in self._actions if action.option_strings})
        more = f"All {num_flags} flags, and more on them: {self.prog} --help {ALL}"
        return self._format("\n\n".join([first, *examples]), more, self._group_of.keys() - self._first_flags)

    def format_all_help(self) -> str:
        """The page of all flags."""
        return self._format(self.description, self.epilog)

    def _format(self, description: str | None, epilog: str | None, left_out: Collection[str] = ()) -> str:
        """As argparse, with the defaults that are in effect, and each flag in one spelling: --no_x is --x false."""
        page, defaults, done = self._get_formatter(), self.shown_defaults(), set(left_out)
        page.add_usage(self.usage, self._actions, [])
        page.add_text(description)
        for group in self._action_groups:
            page.start_section(group.title)
            for action in group._group_actions:
                if action.dest in done:
                    continue
                done.add(action.dest)
                shown = copy.copy(action)
                shown.default = _as_typed(defaults.get(action.dest, action.default))
                if action.dest in self._group_of:
                    shown.option_strings = action.option_strings[:1]
                    shown.help = _DEFAULT_IN_TEXT.sub("", action.help or "")
                page.add_argument(shown)
            page.end_section()
        page.add_text(epilog)
        return page.format_help()

    def _parse_dataclass_field(self, parser: Any, field: dataclasses.Field) -> None:  # type: ignore[override]
        if not self._groups:
            self._groups = {name: self.add_argument_group(name) for name in self._order} | {None: self}
        HfArgumentParser._parse_dataclass_field(self._groups[self._group_of[field.name]], field)


def _group(dtype: Any, name: str) -> str | None:
    """The group of a field of a dataclass; None: among the options."""
    for group, names in getattr(dtype, "_argument_groups", {}).items():
        if name in names:
            return str(group)
    owner = next(base for base in dtype.__mro__ if name in inspect.get_annotations(base))
    return STOCK if owner.__module__.startswith("transformers.") else vars(owner).get("_argument_group_name")


def _as_typed(value: Any) -> Any:
    """A default as somebody would type it: `all` for ["all"], `linear` for SchedulerType.LINEAR."""
    if isinstance(value, list | tuple):
        return " ".join(str(_as_typed(one)) for one in value) or "none given"
    return value.value if isinstance(value, Enum) else value
