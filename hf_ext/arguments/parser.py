"""Parses dataclasses from a recipe's defaults, presets, one YAML file and the command line, later ones winning.

    dataclass default < recipe default < preset < YAML (--config) < command line

Values of every layer become words of the command line, so that one rule converts them all, and every key that no field
has is fatal. The idea of a config file under the command line is TRL's `TrlParser`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any

from ..errors import ArgumentError, HfExtError
from .checks import describe_type, field_types, members
from .config_file import Given, read_config
from .help import GroupedArgumentParser
from .names import is_secret
from .presets import NO_PRESET, PRESETS, preset_names

OF_YAML = {"on": "true", "off": "false", ".inf": "inf", "-.inf": "-inf", ".nan": "nan"}  # -> as the command line has it


class FastArgumentParser(GroupedArgumentParser):
    """`HfArgumentParser` with `--config file.yaml`, `--preset NAME[+NAME]`, and errors instead of guesses.

    `--help` prints groups, and the defaults of the recipe and its preset instead of the dataclasses': of the flags that
    people use first, or with `--help all` of all.

    Flags are never abbreviated, both spellings (`--output_dir`, `--output-dir`) work, in YAML too. Arguments added with
    `add_argument` are read from the command line only and come back in a last namespace, as in the parent class.

    Args:
        dataclass_types: one dataclass type or several.
        presets: preset name -> {field name: value}; may hold fields of dataclasses in any order.
        defaults: the recipe's own defaults, {field name: value}; "preset" names the preset used when nobody gives one.
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
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("usage", "%(prog)s [--config FILE.yaml] [--FLAG VALUE ...]")  # argparse would list all flags
        super().__init__(dataclass_types, **{**kwargs, "allow_abbrev": False})
        self.presets, self.recipe_defaults = dict(presets or {}), dict(defaults or {})
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
            action.default, action.required = argparse.SUPPRESS, False
        if "config" not in self._types:
            self.add_argument("--config", metavar="FILE.yaml", help="YAML file, or the name of one of hf_ext's own")
        if "preset" not in self._types and self.presets:
            self.add_argument("--preset", metavar="NAME[+NAME]", help=f"presets under YAML; {NO_PRESET!r} for none")
        if self.presets:
            lines = [f"  {name}: {', '.join(f'{k}={v}' for k, v in one.items())}" for name, one in self.presets.items()]
            self.epilog = "\n".join([self.epilog or "", "presets (--preset NAME[+NAME], later ones win):", *lines])

    def parse_args_into_dataclasses(self, args: list[str] | None = None, **unsupported: Any) -> tuple[Any, ...]:  # type: ignore[override]
        """Parses and returns one instance per dataclass type, and a namespace if arguments were added by hand.

        Args:
            args: command-line strings; None takes `sys.argv[1:]`.
            **unsupported: the parent's other ways to pass or to ignore values, since nothing may be ignored.

        Raises:
            ArgumentError: an unknown key or flag, preset or file; a value of the wrong type; a duplicate YAML key; a
                required field that nobody gave. Names key, value, place and the nearest known name.
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

    def shown_defaults(self) -> Mapping[str, Any]:
        """Those of the recipe, and of the preset that it has where nobody gives one; else the dataclasses'."""
        return self._field_defaults | self._merge(self._layers(self._choose_preset(None, {})))[0]

    def _choose_preset(self, typed: str | None, config: Mapping[str, Given]) -> str | None:
        """The preset in effect: typed, else from YAML, else the recipe's, else the default of a field `preset`."""
        if typed is not None:
            return typed
        if "preset" in config:
            return None if config["preset"].value is None else str(config["preset"].value)
        found: Any = self.recipe_defaults.get("preset", self._field_defaults.get("preset"))
        return found if isinstance(found, str) else None

    def _layers(self, preset: str | None) -> list[tuple[str, dict[str, Given]]]:
        """Origins and their values: of the recipe, and of the presets."""
        layers: list[tuple[str, Mapping[str, Any]]] = [("recipe", self.recipe_defaults)]
        layers += [(f"preset {name}", self.presets[name]) for name in preset_names(preset, self.presets)]
        return [(origin, {key: Given(value, origin) for key, value in values.items()}) for origin, values in layers]

    def _merge(self, layers: list[tuple[str, dict[str, Given]]]) -> tuple[dict[str, Any], dict[str, str]]:
        """The converted value of each field and who set it; later layers win."""
        values: dict[str, Any] = {}
        origins = dict.fromkeys(self._types, "default")
        for origin, layer in layers:
            for key, given in layer.items():
                if key != "preset" or key in self._types:  # a flag of the parser, used before
                    values[key] = self._convert(key, given)
                    origins[key] = origin
        return values, origins

    def _convert(self, key: str, given: Given) -> Any:
        """A value as the command line makes it of its words."""
        if key not in self._types:
            wrong = self.describe_unknown(key, self._types).replace("argument", "key", 1)
            raise ArgumentError(f"{given.where}: {wrong}{'' if wrong.endswith('?') else '.'}")
        value, kinds, action = given.value, members(self._types[key]), self._flags[key]
        if isinstance(value, Enum) or (value == [] and action.nargs == "+") or (value is None and NoneType in kinds):
            return copy.copy(value)
        if isinstance(value, dict | list) and action.nargs not in ("+", "*"):
            if any(getattr(kind, "__origin__", kind) is type(value) for kind in kinds):
                return copy.deepcopy(value)
        elif value is not None and not isinstance(value, dict):
            words = [_word(one, kinds) for one in (value if isinstance(value, list) else [value])]
            try:
                given_words = [f"--{key}={words[0]}"] if len(words) == 1 else [f"--{key}", *words]
                return getattr(self.parse_known_args(given_words)[0], key)
            except ArgumentError:
                if str in kinds and not action.choices and isinstance(value, str):
                    return value  # `str | bool`, of which HfArgumentParser tries the bool alone
        shown = "the value, not shown here," if is_secret(key) else repr(value)
        allowed = f"one of {', '.join(map(str, action.choices))}" if action.choices else describe_type(self._types[key])
        raise ArgumentError(f"{given.where}: {key}: {shown} is not {allowed}.")

    def _build(self, dtype: Any, values: Mapping[str, Any]) -> Any:
        names = [field.name for field in dataclasses.fields(dtype) if field.init]
        for name in names:
            if name in self._required and name not in values:
                raise ArgumentError(f"{name} is required: give --{name} or put {name!r} into the YAML file.")
        chosen = {name: values[name] if name in values else copy.copy(self._field_defaults[name]) for name in names}
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


def parse_command(
    arguments: Sequence[type], defaults: Mapping[str, Any], description: str | None, words: Sequence[str] | None
) -> tuple[FastArgumentParser, tuple[Any, ...]]:
    """The parser of a command after parsing, and an instance of each of `arguments`.

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


def _word(value: Any, kinds: tuple[Any, ...]) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return OF_YAML.get(text, text) if {bool, float} & {*kinds} else text
