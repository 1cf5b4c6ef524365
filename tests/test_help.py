"""`--help` of the recipes: in groups, every flag once, and the defaults that a run without arguments has."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_ext.help_groups import LAST, TRAINING_GROUPS
from hf_ext.parser import FastArgumentParser
from hf_ext.training_args import FastTrainingArguments

ROOT = Path(__file__).resolve().parent.parent
SHARED = ["data", "training presets", "training", "logs and reports", "checkpoints", "evaluation", "hub", LAST]
WITH_MODEL = ["options", "data", "model", *SHARED[1:]]


@pytest.fixture
def read_help(monkeypatch, capsys) -> Callable[[str], dict[str, str]]:
    """Group -> its lines, of the help that `recipes/NAME.py --help` prints."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.setenv("COLUMNS", "120")

    def call(name: str) -> dict[str, str]:
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(name).main(["--help"])
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        parts = re.split(r"^(\w[^\n]*):\n(?=  )", printed, flags=re.MULTILINE)
        return {name: lines for name, lines in zip(parts[1::2], parts[2::2]) if not name.startswith("presets (")}

    return call


def default_of(lines: str, flag: str) -> str:
    text = re.split(r"\n  (?=-)", "\n" + lines)
    (own,) = [" ".join(entry.split()) for entry in text if re.match(rf"{flag}\b", entry)]
    return own.rpartition("(default: ")[2].rstrip(")")


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
        ("resume_check", ["options", "looking", "converting and merging"]),
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


def test_what_help_shows_is_what_a_run_gets(read_help):
    """Every default that is a number or a word, against the arguments that parsing nothing gives."""
    import max_speed

    from hf_ext.affinity.arguments import AffinityArguments
    from hf_ext.data.arguments import DataArguments
    from hf_ext.presets import PRESETS

    types = (AffinityArguments, DataArguments, FastTrainingArguments)
    parser = FastArgumentParser(types, presets=PRESETS, defaults=max_speed.DEFAULTS)
    shown = "".join(read_help("max_speed").values())
    values = {
        f.name: getattr(one, f.name) for one in parser.parse_args_into_dataclasses([]) for f in dataclasses.fields(one)
    }
    compared = 0
    for flag in re.findall(r"^  --(\w+)", shown, re.MULTILINE):
        value = values.get(flag)
        if isinstance(value, int | float) and not isinstance(value, bool) and default_of(shown, f"--{flag}") != "None":
            assert float(default_of(shown, f"--{flag}")) == value, flag
            compared += 1
    assert compared > 30


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

    from hf_ext.argument_names import short_name

    stock = {field.name for field in dataclasses.fields(TrainingArguments)}
    ours = [short_name(f.name) for f in dataclasses.fields(FastTrainingArguments) if f.name not in stock]
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
