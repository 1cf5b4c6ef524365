"""Commands that pages show, run as far as the recipe that they start has read its words."""

import argparse
import re
import runpy
import shlex
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

from hf_ext.arguments import FastArgumentParser
from hf_ext.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, ROOT / "benchmarks" / "README.md", *DOCS, *sorted((ROOT / "recipes").rglob("README.md"))]
SCRIPT = re.compile(r"recipes/([\w/]+)\.py\b|(?:^|&& )hf-ext (\w[\w-]*)")
PARSERS = (
    (FastArgumentParser, "parse_args_into_dataclasses"),
    (HfArgumentParser, "parse_args_into_dataclasses"),
    (argparse.ArgumentParser, "parse_args"),
)


class Parsed(BaseException):
    """Raised in place of the run: `parser` has read its words, and made `values` of them."""

    def __init__(self, parser: argparse.ArgumentParser, values: Any) -> None:
        super().__init__()
        self.parser, self.values = parser, values


def read_commands(page: Path) -> list[str]:
    """Lines of a page's bash blocks, continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def read_snippets(page: Path) -> list[str]:
    """A page's Python blocks."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def all_commands() -> list[tuple[Path, str]]:
    """Those of all pages, each with its page."""
    return [(page, command) for page in PAGES for command in read_commands(page)]


def find_recipe(command: str) -> str | None:
    """The script of the recipes, or the subcommand of `hf-ext`, that a command starts, or None."""
    found = SCRIPT.search(command)
    return None if found is None else found[1] or found[2]


@cache
def find_main(script: str | None, subcommand: str | None) -> Callable[[list[str]], Any]:
    """The function that both run."""
    if script is None:
        return import_module(COMMANDS[str(subcommand)][0]).main
    return runpy.run_path(str(ROOT / "recipes" / f"{script}.py"), run_name="documented")["main"]


def parse(command: str) -> Any:
    """What the recipe of a command makes of its words; run in the root of the project.

    Raises:
        SystemExit, ArgumentError, OSError: the recipe would refuse it.
    """
    return start(command).values


def start(command: str) -> Parsed:
    """The recipe of a command, stopped where its words are parsed; of a comparison, those of all its sides too."""
    found = SCRIPT.search(command)
    assert found is not None, command
    words = shlex.split(command[found.end() :], comments=True)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in PARSERS:
            patch.setattr(owner, name, _stopping(getattr(owner, name)))
        try:
            find_main(found[1], found[2])(words)
        except Parsed as parsed:
            if "--" in words:
                recipe = parsed.values[0].recipe
                program = f"hf-ext {recipe}" if recipe in COMMANDS else recipe
                start(f"{program} {shlex.join(words[words.index('--') + 1 :])}")
            return parsed
    raise AssertionError(f"nothing parsed the words of {command!r}")


def _stopping(method: Callable[..., Any]) -> Callable[..., Any]:
    def parse_and_stop(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        raise Parsed(parser, method(parser, *args, **kwargs))

    return parse_and_stop


@cache
def known_flags() -> frozenset[str]:
    """Those of every recipe that some page starts, without their dashes."""
    parsed = [start(command) for _, command in all_commands() if find_recipe(command)]
    return frozenset(
        option.lstrip("-") for one in parsed for action in one.parser._actions for option in action.option_strings
    )
