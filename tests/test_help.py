"""`--help` of the recipes: in groups, with the defaults that a run without arguments has; first flags, or every one."""

import dataclasses
import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from hf_ext import PRESETS, FastArgumentParser, FastTrainingArguments
from hf_ext.cli import COMMANDS
from hf_ext.data import DataArguments
from hf_ext.errors import ArgumentError
from hf_ext.property import AffinityArguments

STOCK = "training arguments of transformers"
SHARED = ["data", "model", "speed-ups", "training", "checkpoints", "evaluation", STOCK]
MODULES = {name: module for name, (module, _) in COMMANDS.items()}
FIRST = ("train", "mlm", "generate", "sample", "doctor", "compare")  # commands with a first page
MOST_FLAGS = 26  # of a first page


@pytest.fixture
def print_help(monkeypatch, capsys) -> Callable[..., str]:
    """What a command prints for `--help`, with more words after that."""
    monkeypatch.setenv("COLUMNS", "120")

    def call(name: str, *words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(MODULES[name]).main(["--help", *words])
        assert ended.value.code == 0
        return capsys.readouterr().out

    return call


def groups_of(printed: str) -> dict[str, str]:
    """Group -> its lines."""
    parts = re.split(r"^(\w[^\n]*):\n(?=  )", printed, flags=re.MULTILINE)
    return {name: lines for name, lines in zip(parts[1::2], parts[2::2]) if not name.startswith("presets (")}


def flags_of(groups: dict[str, str]) -> list[str]:
    return re.findall(r"^  --(\w+)", "\n".join(groups.values()), re.MULTILINE)


def default_of(lines: str, flag: str) -> str:
    text = re.split(r"\n  (?=-)|\n\n", "\n" + lines)
    (own,) = [" ".join(entry.split()) for entry in text if re.match(rf"{flag}\b", entry)]
    return own.rpartition("(default: ")[2].removesuffix(")")


@pytest.mark.parametrize(
    ("recipe", "groups"),
    [
        ("train", ["options", *SHARED]),
        ("mlm", ["options", *SHARED]),
        ("generate", ["options", *SHARED]),
        ("predict", ["options", "prediction", "computing", "data"]),
        ("evaluate", ["options", "scoring", "computing", "data"]),
        ("doctor", ["options", "doctor", *SHARED]),
        ("compare", ["options", "sides", "measurement", "criteria"]),
        ("resume", ["positional arguments", "options", "converting"]),
    ],
)
def test_help_has_groups_in_the_order_in_which_people_look(print_help, recipe, groups):
    found = groups_of(print_help(recipe, "all"))
    assert [*found] == groups
    flags = re.findall(r"^  (--\w+)", "".join(found.values()), re.MULTILINE)
    assert len(flags) == len(set(flags)) > 4
    if STOCK in found:
        assert default_of(found[STOCK], "--max_grad_norm") == "1.0"
        assert default_of(found["evaluation"], "--eval_subset") == "None"


def values_of_a_run(recipe: str) -> dict[str, Any]:
    """Flag -> the value that parsing nothing but what is required gives."""
    task = importlib.import_module(MODULES[recipe]).TASK
    parser = FastArgumentParser(task.all_arguments, presets=PRESETS, defaults=task.defaults)
    parsed = parser.parse_args_into_dataclasses([])
    return {field.name: getattr(one, field.name) for one in parsed for field in dataclasses.fields(one)}


@pytest.mark.parametrize("recipe", ["train", "mlm", "generate"])
def test_what_help_shows_is_what_a_run_gets(print_help, recipe):
    """Every default that is a number, against the arguments that parsing nothing gives."""
    groups = groups_of(print_help(recipe, "all"))
    shown, values, compared = "\n".join(groups.values()), values_of_a_run(recipe), 0
    for flag in flags_of(groups):
        value = values.get(flag)
        if isinstance(value, int | float) and not isinstance(value, bool) and default_of(shown, f"--{flag}") != "None":
            assert float(default_of(shown, f"--{flag}")) == value, flag
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("recipe", FIRST)
def test_the_first_page_has_the_flags_of_its_table_as_all_has_them_and_says_how_to_see_the_rest(print_help, recipe):
    page, whole = print_help(recipe), print_help(recipe, "all")
    first, every = groups_of(page), groups_of(whole)
    shown = [flag for flag in flags_of(first) if flag != "config" or recipe == "compare"]
    assert len(shown) == len(set(shown)) <= MOST_FLAGS
    assert [*first] == [name for name in every if name in first]  # the same groups, in the same order
    for group, lines in first.items():
        for flag in re.findall(r"^  --(\w+)", lines, re.MULTILINE):
            assert default_of(lines, f"--{flag}") == default_of(every[group], f"--{flag}"), flag
    named = re.findall(r"^  (?:-h \[all\], )?--(\w+)", whole, re.MULTILINE)
    total = len([flag for flag in named if not (flag.startswith("no_") and flag[3:] in named)])
    last = " ".join(page.split("\n\n")[-1].split())
    assert re.fullmatch(rf"All {total} flags, and more on them: .+ --help all", last)
    assert page.count("\n") < min(110, 0.85 * whole.count("\n"))
    assert page.split("\n\n")[1] == whole.split("\n\n")[1]  # what it is
    # A name in the table that no parser has would be left out without a word.
    module = importlib.import_module(MODULES[recipe])
    tables = [{*one._first_flags} for one in vars(module).values() if hasattr(one, "_first_flags")]
    assert sum(table <= {*flags_of(every)} for table in tables) == 1


def test_help_takes_one_word_and_leaves_no_trace():
    parser = FastArgumentParser((AffinityArguments, DataArguments, FastTrainingArguments), description="One.\n\nTwo.")
    with pytest.raises(ArgumentError, match=r"-h/--help: invalid choice: 'al' \(choose from '?all'?\)"):
        parser.parse_args_into_dataclasses(["--help", "al"])
    before = parser.format_all_help()
    assert "Two." not in parser.format_help()
    assert parser.format_all_help() == before
    (args, *_) = parser.parse_args_into_dataclasses(["--tower-training", "full"])
    assert args.tower_training == ["full"]


def test_a_dataclass_of_ones_own_stays_among_the_options_and_without_a_table_all_is_shown():
    @dataclasses.dataclass
    class Mine:
        depth: int = dataclasses.field(default=2, metadata={"help": "Mine."})

    parser = FastArgumentParser((Mine, FastTrainingArguments), defaults={"depth": 7})
    text = parser.format_help()
    assert text == parser.format_all_help()
    assert text.index("--depth") < text.index("speed-ups:")
    assert "Mine. (default: 7)" in text
    assert parser.parse_args_into_dataclasses([])[0].depth == 7
