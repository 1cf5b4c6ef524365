"""A recipe's YAML file: plain `field: value` lines, with the place of each, and every mistake with file and line.

What YAML offers beyond that is refused: aliases, tags, and a second value for a key, the first of which PyYAML drops
without a word.
"""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..errors import ArgumentError
from ..files import CONFIGS, find_shipped, list_shipped


class Given(NamedTuple):
    """A value that a file, a preset or a recipe gives, and where."""

    value: Any
    where: str


def read_config(path: str) -> dict[str, Given]:
    """Reads fields, each with its value and line; `output-dir` is read as `output_dir`.

    Numbers and words are text as it is written (`no`, `1e-3`), for the command line's rule to convert; inside mappings,
    whose values have no types, they are what JSON makes of them.

    Args:
        path: a file, or the name of one that comes with hf_ext; see `find_shipped`.

    Raises:
        ArgumentError: the file cannot be read, is not YAML or beyond plain YAML, or gives a key twice.
    """
    try:
        text = find_shipped(path, CONFIGS).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(list_shipped(CONFIGS))
        raise ArgumentError(
            f"--config {path!r}: cannot be read from {Path.cwd()}: {error}. With hf_ext come: {known}."
        ) from error
    try:  # of a stream: of a str PyYAML's messages would quote lines, tokens and all
        for event in yaml.parse(StringIO(text), yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
                raise ArgumentError(f"{_place(path, event)}: tags and aliases are not read: write the value out.")
        root = yaml.compose(StringIO(text), yaml.SafeLoader) or yaml.MappingNode("tag:yaml.org,2002:map", [])
    except (yaml.YAMLError, RecursionError) as error:
        raise ArgumentError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(root, yaml.MappingNode):
        raise ArgumentError(f"{path}: the top level must be lines of 'field: value'.")
    _refuse_duplicates(root, path)
    return {_key(key): Given(_value(value), _place(path, key)) for key, value in root.value}


def _refuse_duplicates(node: yaml.Node, path: str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item, path)
    lines: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = _key(key)
        if name in lines:
            raise ArgumentError(f"{_place(path, key)}: {name!r} is already given on line {lines[name]}; keep one.")
        lines[name] = key.start_mark.line + 1
        _refuse_duplicates(value, path)


def _key(node: yaml.Node) -> str:
    return str(node.value).replace("-", "_")


def _place(path: str, node: Any) -> str:
    return f"{path} line {node.start_mark.line + 1}"


def _value(node: Any, in_mapping: bool = False) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _value(value, True) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, in_mapping) for item in node.value]
    if node.tag == "tag:yaml.org,2002:null":
        return None
    try:
        return json.loads(node.value.lower()) if in_mapping and not node.style else node.value  # no style: no quotes
    except ValueError:
        return node.value
