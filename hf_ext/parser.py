"""Parses dataclasses from a recipe's defaults, presets, one YAML file and the command line, later ones winning.

    dataclass default < recipe default < preset < YAML (--config) < command line

Every value, wherever it comes from, is converted by the rule that the command line uses for its field, and every key
that no field has is fatal. The idea of a config file under the command line is TRL's `TrlParser`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from hf_ext.argument_names import name_nearest
from hf_ext.config_file import Given, read_config
from hf_ext.conversion import NUMBER_READERS, convert_value, type_members
from hf_ext.errors import ArgumentError, HfExtError
from hf_ext.help_groups import GroupedArgumentParser
from hf_ext.presets import NO_PRESET, Merged, TakesPresets, find_preset

_UNSET: Any = object()


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
        preset: after parsing, the preset in effect as it was written ("max_speed+low_disk"), or None.
        config_path: after parsing, the YAML file as it was written, or None.
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
        kwargs["allow_abbrev"] = False
        super().__init__(dataclass_types, **kwargs)
        self.presets = dict(presets or {})
        self.recipe_defaults = dict(defaults or {})
        self.explicit: frozenset[str] = frozenset()
        self.origins: dict[str, str] = {}
        self.arguments: list[str] = []
        self.preset: str | None = None
        self.config_path: str | None = None
        self._hints: dict[str, Any] = {}
        for dtype in self.dataclass_types:
            hints = get_type_hints(dtype)
            fields = [field for field in dataclasses.fields(dtype) if field.init]
            self._hints.update({self._named(field).name: hints[field.name] for field in fields})
        self._field_actions: dict[str, argparse.Action] = {}
        for action in self._actions:  # the first of a destination; `--no_x` shares its own with `--x`
            if action.dest in self._hints:
                self._field_actions.setdefault(action.dest, action)
        for action in self._actions:
            action.type = NUMBER_READERS.get(action.type, action.type)
        if "config" not in self._hints:
            self.add_argument("--config", metavar="FILE.yaml", help="YAML file, or the name of one of hf_ext's own")
        if "preset" not in self._hints:
            self.add_argument("--preset", metavar="NAME[+NAME]", help=f"presets under YAML; {NO_PRESET!r} for none")
        self.epilog = "\n\n".join(filter(None, [kwargs.get("epilog"), self._preset_list()])) or None

    def parse_args_into_dataclasses(
        self,
        args: list[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = False,
        args_filename: str | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """Parses and returns one instance per dataclass type, and a namespace if arguments were added by hand.

        Args:
            args: command-line strings; None takes `sys.argv[1:]`.
            return_remaining_strings, look_for_args_file, args_filename, args_file_flag: the parent's other ways to
                pass or to ignore values; not supported here, since nothing may be ignored.

        Raises:
            ArgumentError: an unknown key or flag, preset or file; a value of the wrong type; a duplicate YAML key; a
                required field that nobody gave. Names key, value, place and the nearest known name.
            SystemExit: after `--help`.
        """
        if return_remaining_strings or look_for_args_file or args_filename or args_file_flag:
            raise ArgumentError(".args files and remaining strings are not supported; use --config FILE.yaml.")
        self.arguments = list(sys.argv[1:] if args is None else args)
        namespace = self._parse_command_line(self.arguments)
        typed = {name: vars(namespace)[name] for name in self._hints if vars(namespace)[name] is not _UNSET}
        config = typed.get("config") if "config" in self._hints else namespace.config
        if config == "":
            raise ArgumentError("--config '': name a YAML file; without --config, values are the defaults.")
        from_yaml = read_config(config) if config else {}
        if "config" in from_yaml:
            raise ArgumentError(f"{from_yaml['config'].where}: config files do not nest; remove 'config'.")
        recipe = self._recipe_layer()
        preset = self._choose_preset(typed.get("preset", getattr(namespace, "preset", None)), from_yaml, recipe)
        names = self._split_preset(preset)

        layers = [("recipe", recipe)]
        layers += [(f"preset {name}", self._preset_layer(name)) for name in names]
        layers += [(Path(config).name, from_yaml)] if config else []
        values, origins = self._merge(layers)
        values.update(typed)
        origins.update(dict.fromkeys(typed, "command line"))
        outputs = [self._build(dtype, values) for dtype in self.dataclass_types]
        self.explicit = frozenset((typed.keys() | from_yaml.keys()) & self._hints.keys())
        self.origins, self.preset, self.config_path = origins, preset if names else None, config
        extra = {k: v for k, v in vars(namespace).items() if k not in self._hints and k not in ("config", "preset")}
        return (*outputs, argparse.Namespace(**extra)) if extra else tuple(outputs)

    def error(self, message: str) -> NoReturn:
        """Raises ArgumentError where argparse would print and exit, so that all mistakes read and test alike."""
        raise command_line_error(message)

    def shown_defaults(self) -> Mapping[str, Any]:
        """Those of the recipe, and of the preset that it has where nobody gives one."""
        recipe = self._recipe_layer()
        names = self._split_preset(self._choose_preset(None, {}, recipe))
        return self._merge([("recipe", recipe), *((name, self._preset_layer(name)) for name in names)])[0]

    def _parse_command_line(self, args: list[str] | None) -> argparse.Namespace:
        """What was typed; fields that were not typed stay _UNSET, so that a typed default is still seen as typed."""
        required = [action for action in self._field_actions.values() if action.required]
        for action in required:  # a preset or the YAML may still bring them; `_build` asks for the rest
            action.required = False
        try:
            unset = argparse.Namespace(**dict.fromkeys(self._hints, _UNSET))
            namespace, unknown = self.parse_known_args(args, unset)
        finally:
            for action in required:
                action.required = True
        refuse_unknown(self, unknown)
        return namespace

    def _merge(self, layers: list[tuple[str, dict[str, Given]]]) -> tuple[dict[str, Any], dict[str, str]]:
        """The converted value of each field and who set it; later layers win."""
        values: dict[str, Any] = {}
        origins = dict.fromkeys(self._hints, "default")
        for origin, layer in layers:
            for key, given in layer.items():
                if key == "preset" and key not in self._hints:
                    continue  # a flag of the parser, used before
                values[key] = self._convert(key, given)
                origins[key] = origin
        return values, origins

    def _choose_preset(self, typed: Any, from_yaml: dict[str, Given], recipe: dict[str, Given]) -> str | None:
        """The preset in effect: typed, else from YAML, else the recipe's, else the default of a field `preset`."""
        if typed is not None and typed is not _UNSET:
            return str(typed)
        for layer in (from_yaml, recipe):
            if (given := layer.get("preset")) is not None:
                if given.text is not None and not isinstance(given.text, str):
                    raise ArgumentError(f"{given.where}: preset {given.plain!r} is not text such as 'a+b'.")
                return given.text
        if "preset" not in self._hints:
            return None
        default = self._field_actions["preset"].default
        return default if isinstance(default, str) else None

    def _split_preset(self, written: str | None) -> list[str]:
        if written is None or (written.strip() in ("", NO_PRESET) and written not in self.presets):
            return []
        names = [name.strip() for name in written.split("+")]
        for name in names:
            find_preset(name, written, self.presets)
        return names

    def _recipe_layer(self) -> dict[str, Given]:
        return {key: Given(value, value, "recipe default") for key, value in self.recipe_defaults.items()}

    def _preset_layer(self, name: str) -> dict[str, Given]:
        if nested := {"preset", "config"} & self.presets[name].keys():
            raise ArgumentError(f"preset {name}: presets do not nest; remove {sorted(nested)}.")
        return {key: Given(value, value, f"preset {name}") for key, value in self.presets[name].items()}

    def _preset_list(self) -> str:
        if not self.presets:
            return ""
        lines = [
            f"  {name}: {', '.join(f'{key}={value}' for key, value in fields.items())}"
            for name, fields in self.presets.items()
        ]
        return "\n".join(["presets (--preset NAME[+NAME], later ones win):", *lines])

    def _convert(self, key: str, given: Given) -> Any:
        """A layer's value as the command line would have made it, or ArgumentError with key, value and type."""
        if key not in self._hints:
            raise ArgumentError(f"{given.where}: unknown key {key!r}{name_nearest(key, self._hints) or '.'}")
        if given.plain is None and type(None) in get_args(self._hints[key]):
            return None
        action, members = self._field_actions[key], type_members(self._hints[key])
        if action.nargs in ("+", "*"):
            texts, plains = (v if isinstance(v, (list, tuple)) else [v] for v in (given.text, given.plain))
            each = [Given(text, plain, given.where) for text, plain in zip(texts, plains)]
            inner = tuple(
                part for hint in members for part in (get_args(hint) if get_origin(hint) is list else (hint,))
            )
            return [convert_value(key, one, action, inner) for one in each]
        for member in members:
            if isinstance(given.plain, list) and get_origin(member) is list and get_args(member)[0] is str:
                return [str(item) for item in given.text]
            if type(given.plain) is (get_origin(member) or member) and member is not str:
                return copy.deepcopy(given.plain)
        return convert_value(key, given, action, members)

    def _build(self, dtype: Any, values: Mapping[str, Any]) -> Any:
        """One dataclass; what no layer set is left to the dataclass's own defaults."""
        chosen = {}
        for field in map(self._named, dataclasses.fields(dtype)):
            if not field.init:
                continue
            if field.name in values:
                chosen[field.name] = values[field.name]
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                action = self._field_actions[field.name]
                if action.required:
                    raise ArgumentError(
                        f"{field.name} is required: give --{field.name} or put {field.name!r} into the YAML file."
                    )
                chosen[field.name] = action.default  # HfArgumentParser: a bool without default is False
        if isinstance(dtype, TakesPresets) and isinstance(chosen.get("preset"), str):
            chosen["preset"] = Merged(chosen["preset"])  # of this parser's presets, under YAML and command line
        try:
            return dtype(**chosen)
        except HfExtError:
            raise
        except (ValueError, FileNotFoundError, IsADirectoryError) as error:  # what Trainer's own arguments refuse
            raise ArgumentError(str(error)) from error


def command_line_error(message: str) -> ArgumentError:
    """What is raised for a mistake in the words of the command line."""
    end = "" if message.endswith("?") else "."
    return ArgumentError(f"Command line: {message}{end} Run with --help all for all flags.")


def refuse_unknown(parser: argparse.ArgumentParser, unknown: list[str]) -> None:
    """Raises ArgumentError for words that `parser.parse_known_args` left over, with the nearest flag of each."""
    flags = [option for action in parser._actions for option in action.option_strings]
    wrong = [part.partition("=")[0] for part in unknown if part.startswith("-")] or unknown
    if wrong:
        raise command_line_error("; ".join(f"unknown argument {part!r}{name_nearest(part, flags)}" for part in wrong))
