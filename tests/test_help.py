"""`--help` of the recipes: in groups, with the defaults that a run without arguments has; first flags, or every one."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.data.arguments import DataArguments
from hf_ext.errors import ArgumentError
from hf_ext.help_groups import LAST, TRAINING_GROUPS
from hf_ext.masked_lm.arguments import MaskedLMArguments
from hf_ext.parser import FastArgumentParser
from hf_ext.pde.arguments import OperatorArguments
from hf_ext.presets import PRESETS
from hf_ext.training_args import FastTrainingArguments

ROOT = Path(__file__).resolve().parent.parent
SHARED = ["data", "training presets", "training", "logs and reports", "checkpoints", "evaluation", "hub", LAST]
WITH_MODEL = ["options", "data", "model", *SHARED[1:]]


@pytest.fixture
def print_help(monkeypatch, capsys) -> Callable[..., str]:
    """What `recipes/NAME.py --help` prints, with more words after that."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "examples"))
    monkeypatch.setenv("COLUMNS", "120")

    def call(name: str, *words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(name).main(["--help", *words])
        assert ended.value.code == 0
        return capsys.readouterr().out

    return call


@pytest.fixture
def read_help(print_help) -> Callable[[str], dict[str, str]]:
    """Group -> its lines, of the help that `recipes/NAME.py --help all` prints."""
    return lambda name: groups_of(print_help(name, "all"))


def groups_of(printed: str) -> dict[str, str]:
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
        ("max_speed", WITH_MODEL),
        ("mlm", WITH_MODEL),
        ("generate_antibody", WITH_MODEL),
        ("predict", ["options", "prediction", "data", "model", *SHARED[1:]]),
        ("evaluate_recipe", ["options", "scoring", "data", "model", *SHARED[1:]]),
        ("doctor", ["options", "doctor", "data", "model", *SHARED[1:]]),
        ("compare", ["options", "sides", "measurement", "launching", "criteria"]),
        ("resume_check", ["positional arguments", "options", "converting"]),
    ],
)
def test_help_has_groups_in_the_order_in_which_people_look(read_help, recipe, groups):
    found = read_help(recipe)
    assert [*found] == groups
    flags = re.findall(r"^  (--\w+)", "".join(found.values()), re.MULTILINE)
    assert len(flags) == len(set(flags)) > 5


def test_defaults_are_those_of_the_recipe_and_its_preset(read_help):
    found = read_help("max_speed")
    training, checkpoints, evaluation = found["training"], found["checkpoints"], found["evaluation"]
    assert default_of(training, "--learning_rate") == "0.001"  # the recipe's; of TrainingArguments 5e-05
    assert default_of(training, "--cached_batch_size") == "1024"  # the preset's
    assert default_of(found["training presets"], "--speedups") == "all"
    assert default_of(found["training presets"], "--preset") == "max_speed"
    assert default_of(training, "--num_train_epochs") == "30.0"
    assert default_of(checkpoints, "--resume") == "auto"
    assert default_of(evaluation, "--metric_for_best_model") == "rmse"
    assert default_of(training, "--max_grad_norm") == "1.0"  # nobody's but TrainingArguments'
    assert default_of(found["model"], "--head_sizes") == "1024 512 256 128"
    assert default_of(found["model"], "--lora_r") == "8"
    assert default_of(found["training"], "--lr_scheduler_type") == "linear"
    other = read_help("mlm")
    assert default_of(other["training"], "--learning_rate") == "0.0004"
    assert default_of(other["data"], "--too_long") == "truncate"


def values_of_a_run(recipe: str) -> dict[str, Any]:
    """Flag -> the value that parsing nothing but what is required gives."""
    module = importlib.import_module(recipe)
    task = {"max_speed": AffinityArguments, "mlm": MaskedLMArguments, "pde_operator": OperatorArguments}.get(recipe)
    shared = (FastTrainingArguments,) if recipe == "pde_operator" else (DataArguments, FastTrainingArguments)
    types = (task, *shared) if task else getattr(module, "TYPES", (getattr(module, "PredictArguments", None), *shared))
    parser = FastArgumentParser(types, presets=PRESETS, defaults=module.DEFAULTS)
    required = ["--model", "m"] if recipe == "predict" else []
    parsed = parser.parse_args_into_dataclasses(required)
    return {field.name: getattr(one, field.name) for one in parsed for field in dataclasses.fields(one)}


@pytest.mark.parametrize("recipe", ["max_speed", "mlm", "generate_antibody", "pde_operator", "predict"])
@pytest.mark.parametrize("words", [["all"], []], ids=["all", "first"])
def test_what_help_shows_is_what_a_run_gets(print_help, recipe, words):
    """Every default that is a number, against the arguments that parsing nothing gives."""
    groups = groups_of(print_help(recipe, *words))
    shown, values, compared = "\n".join(groups.values()), values_of_a_run(recipe), 0
    for flag in flags_of(groups):
        value = values.get(flag)
        if isinstance(value, int | float) and not isinstance(value, bool) and default_of(shown, f"--{flag}") != "None":
            assert float(default_of(shown, f"--{flag}")) == value, flag
            compared += 1
    assert compared > (25 if words else 0)


FIRST = {
    "max_speed": 23,
    "mlm": 22,
    "generate_antibody": 22,
    "pde_operator": 19,
    "sample": 21,
    "predict": 19,
    "evaluate_recipe": 20,
    "doctor": 28,
    "compare": 20,
    "text_classifier": 19,
}


@pytest.mark.parametrize("recipe", FIRST)
def test_the_first_page_has_the_flags_of_its_table_as_all_has_them_and_says_how_to_see_the_rest(print_help, recipe):
    page, whole = print_help(recipe), print_help(recipe, "all")
    first, every = groups_of(page), groups_of(whole)
    shown = [flag for flag in flags_of(first) if flag != "config" or recipe == "compare"]
    assert len(shown) == len(set(shown)) == FIRST[recipe]
    assert set(shown) <= set(flags_of(every))
    assert [*first] == [name for name in every if name in first]  # the same groups, in the same order
    for flag in shown:
        (group,) = [name for name, lines in first.items() if f"\n  --{flag} " in f"\n{lines}"]
        assert default_of(first[group], f"--{flag}") == default_of(every[group], f"--{flag}"), flag
    last = " ".join(page.split("\n\n")[-1].split())
    named = re.findall(r"^  (?:-h \[all\], )?--(\w+)", whole, re.MULTILINE)
    total = len([flag for flag in named if not (flag.startswith("no_") and flag[3:] in named)])
    assert re.fullmatch(rf"All {total} flags, and more on them: .+ --help all", last)
    assert page.count("\n") < min(110, 0.85 * whole.count("\n"))
    assert page.split("\n\n")[1] == whole.split("\n\n")[1]  # what it is


@pytest.mark.parametrize("recipe", FIRST)
def test_every_name_of_a_table_of_first_flags_is_a_flag(print_help, recipe):
    """A name that no parser has would be left out without a word."""
    module = importlib.import_module(recipe)
    tables = [one._first_flags for one in vars(module).values() if hasattr(one, "_first_flags")]
    whole = flags_of(groups_of(print_help(recipe, "all")))
    assert tables
    known = [table for table in tables if set(table) <= set(whole)]
    assert len(known) == (2 if recipe == "doctor" else 1)  # the doctor knows other tasks too
    assert all(len(table) == len(set(table)) for table in tables)


def test_help_takes_one_word_and_no_other():
    parser = FastArgumentParser((AffinityArguments, DataArguments, FastTrainingArguments))
    with pytest.raises(ArgumentError, match=r"-h/--help: invalid choice: 'al' \(choose from '?all'?\)"):
        parser.parse_args_into_dataclasses(["--help", "al"])


def test_a_parser_without_a_table_shows_all():
    parser = FastArgumentParser((FastTrainingArguments,))
    assert parser.format_help() == parser.format_all_help()
    assert "All " not in parser.format_help().split("\n\n")[-1]


def test_the_first_page_leaves_parser_and_whole_page_as_they_were():
    parser = FastArgumentParser((AffinityArguments, DataArguments, FastTrainingArguments), description="One.\n\nTwo.")
    before = parser.format_all_help()
    assert "Two." not in parser.format_help()
    assert parser.format_all_help() == before
    assert "--dataset_name" in before
    (args, *_) = parser.parse_args_into_dataclasses(["--tower-training", "full"])
    assert args.tower_training == ["full"]


def test_parsing_after_help_sees_no_trace_of_it(read_help):
    @dataclasses.dataclass
    class Given:
        size: int = dataclasses.field(default=3, metadata={"help": "How large."})
        fast: bool = True

    parser = FastArgumentParser(Given, defaults={"size": 7})
    assert "(default: 7)" in parser.format_help()
    (given,) = parser.parse_args_into_dataclasses([])
    assert (given.size, given.fast) == (7, True)
    (plain,) = FastArgumentParser(Given).parse_args_into_dataclasses(["--no_fast"])
    assert (plain.size, plain.fast) == (3, False)


def test_every_argument_of_ours_has_a_group_and_every_name_in_one_is_an_argument():
    from transformers import TrainingArguments

    stock = {field.name for field in dataclasses.fields(TrainingArguments)}
    ours = [f.name for f in dataclasses.fields(FastTrainingArguments) if f.name not in stock]
    placed = [name for names in TRAINING_GROUPS.values() for name in names]
    assert len(placed) == len(set(placed))
    assert set(ours) - set(placed) == set()
    assert set(placed) - set(ours) - stock == set()


def test_a_dataclass_without_a_group_stays_among_the_options():
    @dataclasses.dataclass
    class Mine:
        depth: int = dataclasses.field(default=2, metadata={"help": "Mine."})

    text = FastArgumentParser((Mine, FastTrainingArguments)).format_help()
    assert text.index("--depth") < text.index("training presets:")
