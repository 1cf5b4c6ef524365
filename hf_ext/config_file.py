"""A recipe's YAML file: plain `field: value` lines, read in bounded time, every mistake with file and line.

What YAML offers beyond that is refused: aliases, nine levels of which unfold into more values than any memory holds;
tags, which make Python objects; a second value for a key, the first of which PyYAML drops without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hf_ext.data.contents import irregular_kind
from hf_ext.errors import ArgumentError
from hf_ext.shipped import CONFIGS, find_shipped, list_shipped

_INT, _FLOAT = _NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
MAX_BYTES = 64 * 1024  # twenty times the largest in recipes/configs; PyYAML reads about 100 KB a second


class Given(NamedTuple):
    """One value of a layer: `text` as a user would type it on the command line, `plain` as YAML or Python has it."""

    text: Any
    plain: Any
    where: str


def read_config(path: str) -> dict[str, Given]:
    """Returns field name -> value with its line; `output-dir` is read as `output_dir`.

    Args:
        path: a file, or the name of one that comes with hf_ext; see `find_shipped`.

    Raises:
        ArgumentError: no regular file, too large, not UTF-8, not YAML, beyond plain YAML, or a key given twice.
    """
    path = str(find_shipped(path, CONFIGS))
    loader, root = _compose(path, _Loader)
    if root is None:
        return {}
    refuse_duplicates(root, path, _key)
    return {_key(key): _read_value(path, loader, key, value) for key, value in root.value}


def read_mapping(path: str) -> yaml.MappingNode:
    """Returns the file's nodes with their values as they are written; errors as in `read_config`."""
    path = str(find_shipped(path, CONFIGS))
    root = _compose(path, _PlainLoader)[1]
    if root is None:
        raise ArgumentError(f"{path}: the file is empty; it needs lines of 'field: value'.")
    return root


def _refusal(problem: str, event: yaml.Event) -> yaml.MarkedYAMLError:
    mark: Any = event.start_mark  # of one of two classes, says types-PyYAML
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


class _PlainLoader(yaml.SafeLoader):
    """SafeLoader without aliases and tags, whose numbers are those of the command line.

    To YAML 1.1, which PyYAML reads, 010 is eight, 1:30 is ninety, and 1_0 is ten.
    """

    yaml_implicit_resolvers = {
        first: [one for one in known if one[0] not in _NUMBERS]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refusal("aliases (*name) are not read: write the value out", event)
        if event.tag is not None:
            raise _refusal(f"tags ({event.tag}) are not read: leave it out", event)
        return super().compose_node(parent, index)


# Only what PyYAML, too, takes for numbers: what it writes in another way than it was read, it would tag.
_PlainLoader.add_implicit_resolver(_INT, re.compile(r"^[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))
_PlainLoader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"^([-+]?[0-9]+\.[0-9]*([eE][-+][0-9]+)?|\.[0-9]+([eE][-+][0-9]+)?|[-+]?\.inf|\.nan)$"),
    list("-+.0123456789"),
)


class _Loader(_PlainLoader):
    """Also reads 1e-3 as a number inside nested mappings; PyYAML's YAML 1.1 takes it for text."""


_Loader.add_implicit_resolver(_FLOAT, re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))


def _compose(path: str, kind: type[_PlainLoader]) -> tuple[_PlainLoader, yaml.MappingNode | None]:
    text = _read_text(path)
    try:
        loader = kind(StringIO(text))  # of a str PyYAML's messages would quote lines, tokens and all
        loader.name = Path(path).name  # in PyYAML's messages
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise ArgumentError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ArgumentError(f"{path}: nested too deeply; the top level must be lines of 'field: value'.") from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ArgumentError(f"{path}: the top level must be lines of 'field: value'.")
    for key, _ in root.value if root is not None else ():
        if not isinstance(key, yaml.ScalarNode):
            raise ArgumentError(f"{_line(path, key)}: a list or mapping is no field; write 'field: value'.")
    return loader, root


def _read_text(path: str) -> str:
    try:
        if kind := irregular_kind(Path(path)):
            raise ArgumentError(f"{path}: is {kind}, not a regular file.")
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ArgumentError(f"{path}: larger than {MAX_BYTES // 1024} KB; is this a recipe's YAML file?")
        return content.decode("utf-8")
    except FileNotFoundError as error:
        known = ", ".join(list_shipped(CONFIGS))
        raise ArgumentError(
            f"--config {path}: cannot be read from {Path.cwd()}: {error}. With hf_ext come: {known}."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--config {path}: cannot be read from {Path.cwd()}: {error}") from error


def _read_value(path: str, loader: _PlainLoader, key: yaml.Node, value: yaml.Node) -> Given:
    where = _line(path, key)
    try:
        return Given(_text(value), loader.construct_object(value, deep=True), where)
    except yaml.YAMLError as error:
        raise ArgumentError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:  # a date that is none, a number of thousands of digits
        raise ArgumentError(f"{where}: {_key(key)}: the value cannot be read ({error}).") from error


def _key(node: yaml.Node) -> str:
    return str(node.value).replace("-", "_")


def _line(path: str, node: yaml.Node) -> str:
    return f"{path} line {node.start_mark.line + 1}"


def _text(node: yaml.Node) -> Any:
    """Scalars as they are written (`no` stays "no"), sequences as lists of them; a mapping has no such form."""
    if isinstance(node, yaml.SequenceNode):
        return [_text(item) for item in node.value]
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


def _as_written(node: yaml.Node) -> str:
    return str(node.value)


def refuse_duplicates(node: yaml.Node, path: str, spell: Callable[[yaml.Node], str] = _as_written) -> None:
    """PyYAML keeps the last of two equal keys without a word; `spell` says when two of the outermost are equal.

    Raises:
        ArgumentError: a key is there twice, wherever it is nested. Names the file, both lines and the key.
    """
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = spell(key)
            if name in lines:
                raise ArgumentError(f"{_line(path, key)}: {name!r} is already given on line {lines[name]}; keep one.")
            lines[name] = key.start_mark.line + 1
            refuse_duplicates(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            refuse_duplicates(item, path)
