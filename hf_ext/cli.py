"""The command `hf-ext`, whose subcommands each import their own module alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from . import __version__
from .arguments import name_nearest
from .errors import ArgumentError, exit_on_errors
from .files import CONFIGS, LAUNCHERS, TEMPLATES, list_shipped, shipped_folder
from .startup import PROGRAM, quick_imports

# Name -> the module whose `main(words)` runs it, and its line in `hf-ext --help`; in that order.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("hf_ext.property.task", "train an affinity or property model on labelled sequences"),
    "mlm": ("hf_ext.masked_lm.task", "train a masked protein language model, a new one or further"),
    "generate": ("hf_ext.generation.task", "train a generator of antibodies for antigens, in stages"),
    "sample": ("hf_ext.generation.sample", "draw antibodies from a trained generator, and rank them"),
    "predict": ("hf_ext.finished.predict", "predict with a trained model: a table or FASTA in, a CSV out"),
    "embed": ("hf_ext.finished.embed", "embed proteins: HDF5, .npz or Parquet, by protein or residue"),
    "score-variants": ("hf_ext.finished.score_variants", "score substitutions by a masked model, no labels"),
    "evaluate": ("hf_ext.finished.evaluate", "score trained models on labelled rows, and compare them"),
    "doctor": ("hf_ext.doctor.command", "say what a run would do, here or on another card, before it starts"),
    "compare": ("hf_ext.comparing.comparison", "measure ways to train against each other, with intervals"),
    "report": ("hf_ext.reporting.report", "write report and model card of a finished run again"),
    "export": ("hf_ext.finished.export", "write a trained model as one ONNX file"),
    "resume": ("hf_ext.finished.resume", "list the intact checkpoints of a folder; convert old ones"),
}

HELP = """usage: hf-ext COMMAND [--config FILE.yaml] [--FLAG VALUE ...]

The Hugging Face Trainer for protein language models on the hardware you have.

{commands}

  hf-ext train                    a demo of a minute (also: mlm, generate)
  hf-ext train --help             the flags that people use first
  hf-ext train --help all         every flag
  hf-ext train --config my.yaml   a file of yours (gb1.yaml is one to copy)
  hf-ext --version                the version of hf_ext
  hf-ext --path [NAME]            files that come with it, to copy, to launch:

  accelerate launch --config_file $(hf-ext --path ddp.yaml) --num_processes 2 \\
      -m hf_ext train

Exit status: 0 done, 1 a mistake in what you gave, 75 stopped: run it again.
Others: 3 a score missed, 65 not finite, 69 memory, 71 a worker died, 74 disk."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `hf-ext`; returns its exit status. Errors end as `exit_on_errors` says.

    Args:
        argv: the words after `hf-ext`; None takes the process's own.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    if argv is None and words[0:1] in (["train"], ["mlm"]) and {"-h", "--help"} & {*words}:
        # transformers.trainer_utils (5.24) imports PEFT, more than half of what these two pages take; others need it.
        sys.modules.setdefault("peft", None)  # type: ignore[arg-type]  # this process prints and ends
    with exit_on_errors():
        return _run(words)


def _run(words: Sequence[str]) -> int:
    first, *rest = words or ["--help"]
    if first in ("-h", "--help") and rest and rest[0] in COMMANDS:
        first = rest[0]
        rest = ["--help", *rest[1:]]
    if first in COMMANDS:
        sys.argv[0] = f"{PROGRAM} {first}"  # so help pages, records and locks of this process call the program
        with quick_imports():
            command = import_module(COMMANDS[first][0])
        result = command.main(rest)
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
    """Returns what `hf-ext --help` prints; fits a screen of 80 columns and 30 lines."""
    return HELP.format(commands="\n".join(f"  {name:<8}  {line}" for name, (_, line) in COMMANDS.items()))


def _find_path(words: Sequence[str]) -> str:
    """Finds the path of a YAML file or template that comes with hf_ext; without a name those of all, one a line.

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
