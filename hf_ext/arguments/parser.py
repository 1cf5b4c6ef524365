"""Parses dataclasses from a recipe's defaults, presets, one YAML file and the command line, later ones winning.

    dataclass default < recipe default < preset < YAML (--config) < command line

Values of every layer become words of the command line, so that one rule converts them all, and every key that no field
has is fatal. The idea of a config file under the command line is TRL's `TrlParser`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

from transformers import HfArgumentParser

from ..errors import ArgumentError, HfExtError
from ..files import Facts, Json
from .checks import describe_type, field_types, members
from .config_file import Given, read_config
from .help import ALL, HelpFormatter, ShowHelp, format_flags
from .presets import NO_PRESET, PRESETS, is_secret, name_nearest, preset_names
from .training_fields import training_names

OF_YAML = {"on": "true", "off": "false", ".inf": "inf", "-.inf": "-inf", ".nan": "nan"}  # -> as the command line has it
STOCK = "training arguments of transformers"
# In the order in which help prints them, after groups of other names.
GROUPS = ("data", "model", "speed-ups", "training", "checkpoints", "evaluation", STOCK)


class FastArgumentParser(HfArgumentParser):
    """`HfArgumentParser` with `--config file.yaml`, `--preset NAME[+NAME]`, groups in its help, and errors, no guesses.

    A field stands in the group that `_argument_groups` of its dataclass names, {group: (field, ...)}, else in that of
    the class that declares it (`_argument_group_name`, HfArgumentParser's own); without either, among the options.
    `--help` shows the fields that `_first_flags` of a dataclass names, its own and others of the parser, with the
    defaults of the recipe and its preset; `--help all` shows the rest. Where no dataclass has such a table, it shows
    all. A mistake raises ArgumentError where argparse would print and exit, or leave a word unread. A command that
    trains nothing says so of a flag of training: `_only_reads` of one of its dataclasses is its name.

    Flags are never abbreviated, both spellings (`--output_dir`, `--output-dir`) work, in YAML too. Arguments added with
    `add_argument` are read from the command line only and come back in a last namespace, as in the parent class.

    Args:
        dataclass_types: one dataclass type or several.
        presets: preset name -> {field name: value}; may hold fields of dataclasses in any order.
        defaults: the recipe's own defaults, {field name: value}; "preset" names the preset used when none is given.
        **kwargs: as `argparse.ArgumentParser`.

    Attributes:
        explicit: after parsing, the fields that the user set by YAML or command line (not by preset).
        origins: after parsing, field -> "default", "recipe", "preset <name>", the YAML file's name, or "command line".
        arguments: after parsing, the words of the command line.
    """

    def __init__(
        self,
        dataclass_types: Any = None,
        *,
        presets: Mapping[str, Mapping[str, object]] | None = None,
        defaults: Mapping[str, object] | None = None,
        **kwargs: object,
    ):
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
        usual = {"formatter_class": HelpFormatter, "usage": "%(prog)s [--config FILE.yaml] [--FLAG VALUE ...]"}
        super().__init__(types, **{**usual, **kwargs, "add_help": False, "allow_abbrev": False})
        text = "The flags that people use first; all: every one."
        self.add_argument("-h", "--help", action=ShowHelp, default=argparse.SUPPRESS, help=text)
        self.presets = dict(presets or {})
        self.recipe_defaults = dict(defaults or {})
        self.explicit: frozenset[str] = frozenset()
        self.origins: dict[str, str] = {}
        self.arguments: list[str] = []
        self._flags = {action.dest: action for action in reversed(self._actions)}  # --x, not --no_x
        self._types = {
            name: hint
            for dtype in self.dataclass_types
            for name, hint in field_types(dtype).items()
            if name in self._flags
        }
        self._field_defaults = {name: action.default for name, action in self._flags.items()}
        self._required = {name for name, action in self._flags.items() if action.required}
        for action in self._actions:  # what is not typed is then not in the namespace, and may come from other layers
            action.default = argparse.SUPPRESS
            action.required = False
        if "config" not in self._types:
            self.add_argument("--config", metavar="FILE.yaml", help="YAML file, or the name of one of hf_ext's own")
        if "preset" not in self._types and self.presets:
            self.add_argument("--preset", metavar="NAME[+NAME]", help=f"presets under YAML; {NO_PRESET!r} for none")
        if self.presets:
            lines = [f"  {name}: {', '.join(f'{k}={v}' for k, v in one.items())}" for name, one in self.presets.items()]
            self.epilog = "\n".join([self.epilog or "", "presets (--preset NAME[+NAME], later ones win):", *lines])

    def parse_args_into_dataclasses(self, args: list[str] | None = None, **unsupported: object) -> tuple[Any, ...]:  # type: ignore[override]
        """Parses and returns one instance per dataclass type, and a namespace if arguments were added by hand.

        Args:
            args: command-line strings; None takes `sys.argv[1:]`.
            **unsupported: the parent's other ways to pass or to ignore values, since nothing may be ignored.

        Raises:
            ArgumentError: an unknown key or flag, preset or file; a value of the wrong type; a duplicate YAML key; a
                required field that was not given. Names key, value, place and the nearest known name.
            SystemExit: after `--help`.
        """
        if any(unsupported.values()):
            raise ArgumentError(".args files and remaining strings are not supported; use --config FILE.yaml.")
        self.arguments = list(sys.argv[1:] if args is None else args)
        typed = vars(self.parse_known_args(self.arguments)[0])
        own = {name: typed.pop(name) for name in self._types if name in typed}
        config = typed.pop("config", None) if "config" not in self._types else own.get("config")
        given = read_config(config) if config is not None else {}
        if "config" in given:
            raise ArgumentError(f"{given['config'].where}: config files do not nest; remove 'config'.")
        preset = self._choose_preset(typed.pop("preset", own.get("preset")), given)
        layers = self._layers(preset) + ([(Path(config).name, given)] if config is not None else [])
        values, self.origins = self._merge(layers)
        values |= own
        self.origins |= dict.fromkeys(own, "command line")
        self.explicit = frozenset((own.keys() | given.keys()) & self._types.keys())
        outputs = [self._build(dtype, values) for dtype in self.dataclass_types]
        return (*outputs, argparse.Namespace(**typed)) if typed else tuple(outputs)

    def _choose_preset(self, typed: str | None, config: Mapping[str, Given]) -> str | None:
        """Chooses the preset: typed, else from YAML, else the recipe's, else the default of a field `preset`."""
        if typed is not None:
            return typed
        if "preset" in config:
            return None if config["preset"].value is None else str(config["preset"].value)
        found: Any = self.recipe_defaults.get("preset", self._field_defaults.get("preset"))
        return found if isinstance(found, str) else None

    def _layers(self, preset: str | None) -> list[tuple[str, dict[str, Given]]]:
        """Returns origins and their values: of the recipe, and of the presets."""
        layers: list[tuple[str, Facts]] = [("recipe", self.recipe_defaults)]
        layers += [(f"preset {name}", self.presets[name]) for name in preset_names(preset, self.presets)]
        return [(origin, {key: Given(value, origin) for key, value in values.items()}) for origin, values in layers]

    def _merge(self, layers: list[tuple[str, dict[str, Given]]]) -> tuple[Json, dict[str, str]]:
        """Merges layers: the converted value of each field and who set it; later layers win."""
        values: Json = {}
        origins = dict.fromkeys(self._types, "default")
        for origin, layer in layers:
            for key, given in layer.items():
                if key != "preset" or key in self._types:  # a flag of the parser, used before
                    values[key] = self._convert(key, given)
                    origins[key] = origin
        return values, origins

    def _convert(self, key: str, given: Given) -> Any:
        """Converts a value as the command line does its words."""
        if key not in self._types:
            wrong = self.describe_unknown(key, self._types).replace("argument", "key", 1)
            raise ArgumentError(f"{given.where}: {wrong}{'' if wrong.endswith('?') else '.'}")
        value = given.value
        kind = self._types[key]
        kinds = members(kind)
        action = self._flags[key]
        if isinstance(value, Enum) or (value == [] and action.nargs == "+") or (value is None and NoneType in kinds):
            return copy.copy(value)
        if isinstance(value, dict | list) and action.nargs not in ("+", "*"):
            if any(getattr(one, "__origin__", one) is type(value) for one in kinds):
                return copy.deepcopy(value)
        elif value is not None and not isinstance(value, dict):
            words = [_word(one, kinds) for one in (value if isinstance(value, list) else [value])]
            words = [f"--{key}={words[0]}"] if len(words) == 1 else [f"--{key}", *words]
            try:
                return getattr(self.parse_known_args(words)[0], key)
            except ArgumentError:
                if str in kinds and not action.choices and isinstance(value, str):
                    return value  # `str | bool`, of which HfArgumentParser tries the bool alone
        shown = "the value, not shown here," if is_secret(key) else repr(value)
        allowed = f"one of {', '.join(map(str, action.choices))}" if action.choices else describe_type(kind)
        raise ArgumentError(f"{given.where}: {key}: {shown} is not {allowed}.")

    def _build(self, dtype: Any, values: Facts) -> Any:
        names = [field.name for field in dataclasses.fields(dtype) if field.init]
        for name in names:
            if name in self._required and name not in values:
                raise ArgumentError(f"{name} is required: give --{name} or put {name!r} into the YAML file.")
        chosen = {name: values.get(name, copy.copy(self._field_defaults[name])) for name in names}
        preset = chosen.pop("preset", None)  # its values are among the others
        try:
            built = dtype(**chosen)
        except HfExtError:
            raise
        except (ValueError, FileNotFoundError, IsADirectoryError) as error:  # what Trainer's own arguments refuse
            raise ArgumentError(str(error)) from error
        if preset is not None:
            built.preset = preset
        return built

    # --- mistakes and help -----------------------------------------------------------------------------------------

    def error(self, message: str) -> NoReturn:
        """Raises ArgumentError, so that all mistakes read and test alike."""
        end = "" if message.endswith("?") else "."
        raise ArgumentError(f"Command line: {message}{end} Run with --help all for all flags.")

    def parse_known_args(self, args: Any = None, namespace: object = None) -> tuple[Any, list[str]]:
        """Parses as argparse does, but words that are no flags are an error, with the nearest flag of each."""
        namespace, unknown = super().parse_known_args(args, namespace)
        flags = [option for action in self._actions for option in action.option_strings]
        wrong = [part.partition("=")[0] for part in unknown if part.startswith("-")] or unknown
        if wrong:
            self.error("; ".join(self.describe_unknown(part, flags) for part in wrong))
        return namespace, []

    def describe_unknown(self, flag: str, flags: Collection[str]) -> str:
        """Says what is wrong with a flag, or key of a YAML file, that is none of `flags`."""
        if self._only_reads and flag.lstrip("-").replace("-", "_") in training_names():
            return f"{flag} is a flag of training; {self._only_reads} only reads the model"
        return f"unknown argument {flag!r}{name_nearest(flag, flags)}"

    def format_help(self) -> str:
        """Formats the first page, of the flags that people use first."""
        if not self._first_flags:
            return self.format_all_help()
        first, *rest = (self.description or "").split("\n\n")
        examples = takewhile(lambda paragraph: paragraph.startswith(" "), rest)
        num_flags = len({action.dest for action in self._actions if action.option_strings})
        more = f"All {num_flags} flags, and more on them: {self.prog} --help {ALL}"
        return self._format("\n\n".join([first, *examples]), more, self._group_of.keys() - self._first_flags)

    def format_all_help(self) -> str:
        """Formats the page of all flags."""
        return self._format(self.description, self.epilog)

    def _format(self, description: str | None, epilog: str | None, left_out: Collection[str] = ()) -> str:
        of_recipe, _ = self._merge(self._layers(self._choose_preset(None, {})))
        return format_flags(self, description, epilog, self._group_of, self._field_defaults | of_recipe, left_out)

    def _parse_dataclass_field(self, parser: object, field: dataclasses.Field) -> None:  # type: ignore[override]
        if not self._groups:
            self._groups = {name: self.add_argument_group(name) for name in self._order} | {None: self}
        HfArgumentParser._parse_dataclass_field(self._groups[self._group_of[field.name]], field)


def parse_command(
    arguments: Sequence[type], defaults: Facts, description: str | None, words: Sequence[str] | None
) -> tuple[FastArgumentParser, tuple[Any, ...]]:
    """Parses the words of a command; returns its parser, and an instance of each of `arguments`.

    Args:
        arguments: dataclasses; the `FastTrainingArguments` among them learns which of its fields the user set.
        defaults: the command's own, {field name: value}.
        description: for `--help`.
        words: the command line; None takes the process's own.

    Raises:
        ArgumentError: as `FastArgumentParser.parse_args_into_dataclasses`.
    """
    presets = PRESETS if any(hasattr(kind, "preset") for kind in arguments) else None
    parser = FastArgumentParser(arguments, presets=presets, defaults=defaults, description=description)
    parsed = parser.parse_args_into_dataclasses(None if words is None else [*words])
    for values in parsed:
        if hasattr(values, "mark_explicit"):
            values.mark_explicit(parser.explicit)
    return parser, parsed


def _word(value: object, kinds: tuple[Any, ...]) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return OF_YAML.get(text, text) if {bool, float} & {*kinds} else text


def _group(dtype: Any, name: str) -> str | None:
    """Returns the group of a field of a dataclass; None: among the options."""
    for group, names in getattr(dtype, "_argument_groups", {}).items():
        if name in names:
            return str(group)
    owner = next(base for base in dtype.__mro__ if name in inspect.get_annotations(base))
    return STOCK if owner.__module__.startswith("transformers.") else vars(owner).get("_argument_group_name")
