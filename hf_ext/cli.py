"""The command `hf-ext`: one subcommand per recipe. Each imports its own alone, and the help page none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from . import __version__
from .arguments.names import name_nearest
from .commands import COMMANDS, PROGRAM, name_program
from .errors import ArgumentError, exit_on_errors
from .shipped import CONFIGS, LAUNCHERS, TEMPLATES, list_shipped, shipped_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `hf-ext`; returns its exit status. It ends as the recipe's own script does, see `exit_on_errors`.

    Args:
        argv: the words after `hf-ext`; None takes the process's own.
    """
    with exit_on_errors():
        return _run([*(sys.argv[1:] if argv is None else argv)])


def _run(words: Sequence[str]) -> int:
    first, *rest = words or ["--help"]
    if first in ("-h", "--help") and rest and rest[0] in COMMANDS:
        first, rest = rest[0], ["--help", *rest[1:]]
    if first in COMMANDS:
        name_program(first)
        result = import_module(COMMANDS[first][0]).main(rest)
        return result if isinstance(result, int) else 0  # a `main` that returns results has succeeded
    if first in ("-h", "--help"):
        print(help_page())
    elif first == "--version":
        print(f"hf_ext {__version__}")
    elif first == "--path":
        print(_find_path(rest))
    else:
        near = name_nearest(first, [*COMMANDS, "--help", "--version", "--path"])
        kind = "argument" if first.startswith("-") else "command"
        raise ArgumentError(f"{PROGRAM}: unknown {kind} {first!r}{near or '.'} Commands: {', '.join(COMMANDS)}.")
    return 0


def help_page() -> str:
    """What `hf-ext --help` prints; fits a screen of 80 columns and 30 lines."""
    width = max(map(len, COMMANDS))
    commands = [f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [--config FILE.yaml] [--FLAG VALUE ...]",
            "",
            "The Hugging Face Trainer for protein language models on the hardware you have.",
            "",
            *commands,
            "",
            f"  {PROGRAM} train                    on generated data, a minute; so mlm, generate",
            f"  {PROGRAM} train --help             flags that people use first; --help all: all",
            f"  {PROGRAM} train --config gb1.yaml  a file of yours, or one that comes with hf_ext",
            f"  {PROGRAM} --version                that of hf_ext",
            f"  {PROGRAM} --path                   paths of all files that come with it",
            f"  {PROGRAM} --path NAME              the path of one, to copy or launch with:",
            "",
            f"  accelerate launch --config_file $({PROGRAM} --path 2gpu_ddp.yaml) -m hf_ext train",
            "",
            "Exit status: 0 done, 1 a mistake in what was given, 75 stopped: run it again.",
            "Others: 3 a score missed, 65 not finite, 69 memory, 71 a worker died, 74 disk.",
        ]
    )


def _find_path(words: Sequence[str]) -> str:
    """The path of a YAML file or template that comes with hf_ext; without a name those of all, one a line.

    Raises:
        ArgumentError: no such file, with the names of those that there are; more than one word.
    """
    if len(words) > 1:
        raise ArgumentError(f"{PROGRAM} --path takes one name, not {len(words)} words: {' '.join(words)}.")
    folders = (CONFIGS, LAUNCHERS, TEMPLATES)
    paths = {name: shipped_folder(folder) / name for folder in folders for name in list_shipped(folder)}
    if not words:
        return "\n".join(map(str, paths.values()))
    if words[0] not in paths:
        near = name_nearest(words[0], paths) or name_nearest(f"{words[0]}.yaml", paths) or "."
        raise ArgumentError(f"{PROGRAM} --path: no {words[0]!r} comes with hf_ext{near} Files: {', '.join(paths)}.")
    return str(paths[words[0]])
