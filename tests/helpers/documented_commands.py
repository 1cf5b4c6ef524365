"""Commands that pages show, and the parsers of the recipes that they start."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from hf_ext.affinity import resume
from hf_ext.affinity.arguments import AffinityArguments, EvaluateArguments, PredictArguments
from hf_ext.arguments.parser import FastArgumentParser
from hf_ext.arguments.predicting_fields import PredictingArguments
from hf_ext.arguments.presets import PRESETS
from hf_ext.comparing.arguments import CompareArguments
from hf_ext.data.arguments import DataArguments, LabelledArguments, ReadingArguments
from hf_ext.doctor.arguments import DoctorArguments
from hf_ext.doctor.command import guess_task
from hf_ext.errors import ArgumentError
from hf_ext.generation.arguments import GeneratorArguments
from hf_ext.generation.sample import SampleArguments
from hf_ext.masked_lm.arguments import MaskedLMArguments
from hf_ext.pde.arguments import OperatorArguments
from hf_ext.training_args import FastTrainingArguments

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
TRAINING = (AffinityArguments, DataArguments, FastTrainingArguments)
TASKS: dict[str, tuple[type, ...]] = {
    "max_speed": TRAINING,
    "mlm": (MaskedLMArguments, DataArguments, FastTrainingArguments),
    "generate_antibody": (GeneratorArguments, DataArguments, FastTrainingArguments),
    "pde_operator": (OperatorArguments, FastTrainingArguments),
}
SUBCOMMANDS = {  # of the console command -> the recipe whose `main` it calls
    "train": "max_speed",
    "mlm": "mlm",
    "generate": "generate_antibody",
    "sample": "sample",
    "predict": "predict",
    "evaluate": "evaluate",
    "doctor": "doctor",
    "compare": "compare",
    "report": "report",
    "resume": "resume_check",
}
SCRIPT = re.compile(r"recipes/(?:examples/)?(\w+)\.py\b|(?:^|&& )hf-ext (\w+)")


def read_commands(page: Path) -> list[str]:
    """Lines of a page's bash blocks, continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def read_snippets(page: Path) -> list[str]:
    """A page's Python blocks."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def all_commands() -> list[str]:
    """Those of the README and of all pages, in this order."""
    return [command for page in (README, *DOCS) for command in read_commands(page)]


def find_recipe(command: str) -> str | None:
    """The recipe that a command starts, or None."""
    found = SCRIPT.search(command)
    return None if found is None else found[1] or SUBCOMMANDS[found[2]]


def read_flags(page: Path) -> set[str]:
    """Every `--flag` that a page names, without its dashes."""
    return set(re.findall(r"(?<![\w-])--([a-z][a-z_0-9]+)", page.read_text(encoding="utf-8")))


@cache
def known_flags() -> frozenset[str]:
    """Of the recipes, whichever it is."""
    types = [(*types, DoctorArguments) for types in TASKS.values()]
    types += [(EvaluateArguments,), (SampleArguments,), (PredictArguments,)]
    parsers: list[Any] = [FastArgumentParser(each, presets=PRESETS) for each in types]
    parsers.append(HfArgumentParser(CompareArguments))
    return frozenset(action.dest for parser in parsers for action in parser._actions)


def parse(command: str) -> Any:
    """What the recipe of a command makes of its words, as far as parsing goes; run in the root of the project.

    Raises:
        KeyError: a subcommand or a recipe that this file has no parser of.
        SystemExit, ArgumentError: the recipe would refuse it.
    """
    command = command
    found = SCRIPT.search(command)
    assert found is not None, command
    words = shlex.split(command[found.end() :], comments=True)
    return PARSERS[found[1] or SUBCOMMANDS[found[2]]](words)


def _dataclasses(*types: type) -> Callable[[list[str]], Any]:
    presets = PRESETS if FastTrainingArguments in types else None
    return lambda words: FastArgumentParser(types, presets=presets).parse_args_into_dataclasses(words)


def _compare(words: list[str]) -> Any:
    cut = words.index("--") if "--" in words else len(words)
    own = HfArgumentParser(CompareArguments).parse_args_into_dataclasses(words[:cut], look_for_args_file=False)[0]
    recipe = SUBCOMMANDS.get(own.recipe, Path(own.recipe).stem)
    return own, _dataclasses(*TASKS[recipe])(words[cut + 1 :])


def _doctor(words: list[str]) -> Any:
    tasks = {"affinity": "max_speed", "masked_lm": "mlm", "generation": "generate_antibody"}
    task = guess_task(words)
    return _dataclasses(DoctorArguments, *TASKS[tasks.get(task, task)])(words)


def _report(words: list[str]) -> list[str]:
    if len(words) < 2 or words[0] != "--run" or any(word.startswith("-") for word in words[1:]):
        raise ArgumentError(f"report.py takes --run FOLDER ..., not {words}")
    return words[1:]


PARSERS: dict[str, Callable[[list[str]], Any]] = {
    **{name: _dataclasses(*types) for name, types in TASKS.items()},
    "doctor": _doctor,
    "compare": _compare,
    "resume_check": resume.parse_arguments,
    "evaluate": _dataclasses(EvaluateArguments, LabelledArguments, PredictingArguments),
    "predict": _dataclasses(PredictArguments, ReadingArguments, PredictingArguments),
    "report": _report,
    "sample": _dataclasses(SampleArguments, ReadingArguments),
}
