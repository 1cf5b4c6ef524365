"""Commands that pages show, and the parsers of the recipes that they start."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evaluate_recipe import EvaluateArguments
from transformers import HfArgumentParser

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.comparing.arguments import CompareArguments
from hf_ext.data.arguments import DataArguments
from hf_ext.doctor.arguments import DoctorArguments
from hf_ext.parser import FastArgumentParser
from hf_ext.presets import PRESETS
from hf_ext.training_args import FastTrainingArguments

ROOT = Path(__file__).resolve().parents[2]
TRAINING = (AffinityArguments, DataArguments, FastTrainingArguments)
SCRIPT = re.compile(r"recipes/(\w+)\.py\b")


def read_commands(page: Path) -> list[str]:
    """Lines of a page's bash blocks, continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def read_flags(page: Path) -> set[str]:
    """Every `--flag` that a page names, without its dashes."""
    return set(re.findall(r"(?<![\w-])--([a-z][a-z_0-9]+)", page.read_text(encoding="utf-8")))


def known_flags() -> set[str]:
    """Of training, the doctor, comparisons and the launcher."""
    types = (*TRAINING, DoctorArguments)
    parsers = [FastArgumentParser(types, presets=PRESETS), HfArgumentParser(CompareArguments)]
    return {action.dest for parser in parsers for action in parser._actions}


def parse(command: str) -> Any:
    """What the recipe of a command makes of its words, as far as parsing goes; run in the root of the project.

    Raises:
        KeyError: a recipe that this file has no parser of.
        SystemExit, ArgumentError: the recipe would refuse it.
    """
    found = SCRIPT.search(command)
    assert found is not None, command
    words = shlex.split(command[found.end() :], comments=True)
    return PARSERS[found[1]](words)


def _dataclasses(*types: type) -> Callable[[list[str]], Any]:
    return lambda words: FastArgumentParser(types, presets=PRESETS).parse_args_into_dataclasses(words)


def _compare(words: list[str]) -> Any:
    cut = words.index("--") if "--" in words else len(words)
    own = HfArgumentParser(CompareArguments).parse_args_into_dataclasses(words[:cut], look_for_args_file=False)
    return own, _dataclasses(*TRAINING)(words[cut + 1 :])


def _own(recipe: str, name: str) -> Callable[[list[str]], Any]:
    return lambda words: runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"))[name](words)


PARSERS: dict[str, Callable[[list[str]], Any]] = {
    "max_speed": _dataclasses(*TRAINING),
    "doctor": _dataclasses(DoctorArguments, *TRAINING),
    "compare": _compare,
    "resume_check": _own("resume_check", "parse_arguments"),
    "evaluate": _dataclasses(EvaluateArguments, DataArguments, FastTrainingArguments),
}
