"""Five layers, one conversion rule, and no key or value that is silently ignored."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from hf_ext.errors import ArgumentError, exit_on_errors
from hf_ext.parser import FastArgumentParser


@dataclasses.dataclass
class Model:
    model_name: str
    dropout: float = 0.1
    layers: list[int] = dataclasses.field(default_factory=lambda: [1])
    kernel: Literal["sdpa", "flash"] = "sdpa"
    frozen: bool = True


@dataclasses.dataclass
class Run:
    output_dir: str = "out"
    learning_rate: float = dataclasses.field(default=5e-5, metadata={"help": "Step size."})
    steps: int = 10
    bf16: bool = False
    limit: int | None = 3
    options: dict[str, Any] | str | None = None
    report_to: None | str | list[str] = None  # noqa: RUF036 - HfArgumentParser fails on `str | list[str] | None`
    when: IntervalStrategy | str = "no"
    tokens_seen: str | bool = False


PRESETS = {
    "max_speed": {"bf16": True, "steps": 20, "learning_rate": 1e-3},
    "low_disk": {"limit": 1, "steps": 30},
    "named": {"model_name": "from-preset"},
}


def make(**kwargs: Any) -> FastArgumentParser:
    return FastArgumentParser((Model, Run), presets=PRESETS, **kwargs)


def parse(*args: str, parser: FastArgumentParser | None = None) -> tuple[Model, Run]:
    return (parser or make()).parse_args_into_dataclasses(["--model_name", "m", *args])


@pytest.fixture
def config(tmp_path):
    def write(text: str, name: str = "run.yaml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


# Precedence


def test_each_layer_beats_the_one_below_it(config):
    path = config("steps: 40\n")
    defaults = {"steps": 15}
    assert parse()[1].steps == 10
    assert parse(parser=make(defaults=defaults))[1].steps == 15
    assert parse("--preset", "max_speed", parser=make(defaults=defaults))[1].steps == 20
    assert parse("--preset", "max_speed", "--config", path, parser=make(defaults=defaults))[1].steps == 40
    assert (
        parse("--steps", "50", f"--config={path}", "--preset=max_speed", parser=make(defaults=defaults))[1].steps == 50
    )


def test_a_command_line_value_equal_to_the_default_still_beats_the_yaml(config):
    assert parse("--config", config("steps: 40\n"), "--steps", "10")[1].steps == 10


def test_of_composed_presets_the_later_one_wins():
    assert parse("--preset", "max_speed+low_disk")[1].steps == 30
    assert parse("--preset", "low_disk+max_speed")[1].steps == 20
    run = parse("--preset", "max_speed+low_disk")[1]
    assert (run.bf16, run.limit) == (True, 1)


def test_origins_and_explicit_say_who_set_what(config):
    parser = make(defaults={"dropout": 0.2})
    path = config("learning_rate: 1e-4\npreset: max_speed+low_disk\n")
    parse("--config", path, "--kernel", "flash", parser=parser)
    assert parser.origins == {
        "model_name": "command line",
        "dropout": "recipe",
        "layers": "default",
        "kernel": "command line",
        "frozen": "default",
        "output_dir": "default",
        "learning_rate": "run.yaml",
        "steps": "preset low_disk",
        "bf16": "preset max_speed",
        "limit": "preset low_disk",
        "options": "default",
        "report_to": "default",
        "when": "default",
        "tokens_seen": "default",
    }
    assert parser.explicit == {"model_name", "kernel", "learning_rate"}
    assert (parser.preset, parser.config_path) == ("max_speed+low_disk", path)


def test_the_preset_of_the_command_line_beats_the_yamls_which_beats_the_recipes(config):
    path = config("preset: low_disk\n")
    assert parse("--config", path)[1].steps == 30
    assert parse("--config", path, "--preset", "max_speed")[1].steps == 20
    assert parse("--config", path, "--preset", "none")[1].steps == 10
    parser = make(defaults={"preset": "max_speed"})
    assert parse(parser=parser)[1].steps == 20
    assert parse("--config", path, parser=parser)[1].steps == 30
    assert parse("--config", config("preset:\n", "no.yaml"), parser=parser)[1].steps == 10
    assert parser.preset is None


def test_a_dataclass_field_named_preset_receives_the_string(config):
    @dataclasses.dataclass
    class WithPreset:
        preset: str | None = None
        steps: int = 1

    parser = FastArgumentParser(WithPreset, presets={"a": {"steps": 2}, "b": {"steps": 3}})
    assert parser.parse_args_into_dataclasses([]) == (WithPreset(None, 1),)
    assert parser.parse_args_into_dataclasses(["--preset", "a+b"]) == (WithPreset("a+b", 3),)
    assert parser.origins == {"preset": "command line", "steps": "preset b"}
    assert parser.parse_args_into_dataclasses(["--config", config("preset: a\n")]) == (WithPreset("a", 2),)
    assert (parser.preset, parser.explicit) == ("a", {"preset"})


def test_parsing_twice_leaves_nothing_behind(config):
    parser = make()
    parse("--config", config("steps: 40\n"), "--preset", "max_speed", parser=parser)
    assert parse(parser=parser)[1] == Run()
    assert parser.origins["steps"] == "default"
    assert (parser.preset, parser.config_path, parser.explicit) == (None, None, {"model_name"})


# Required fields


@pytest.mark.parametrize("text", ["model_name: x\n", "model-name: x\n"])
def test_a_required_field_may_come_from_the_yaml(config, text):
    assert make().parse_args_into_dataclasses(["--config", config(text)])[0].model_name == "x"


def test_a_required_field_may_come_from_a_preset():
    assert make().parse_args_into_dataclasses(["--preset", "named"])[0].model_name == "from-preset"


def test_a_required_field_that_nobody_gives_is_an_error_every_time():
    parser = make()
    for _ in range(2):
        with pytest.raises(ArgumentError, match="model_name is required: give --model_name or put 'model_name'"):
            parser.parse_args_into_dataclasses([])


# YAML values become what the command line would make of them


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("learning_rate: 1e-3", "learning_rate", 0.001),  # PyYAML alone reads the text "1e-3"
        ("learning_rate: 1", "learning_rate", 1.0),
        ("learning_rate: .inf", "learning_rate", float("inf")),
        ("bf16: true", "bf16", True),
        ("bf16: 'yes'", "bf16", True),
        ("bf16: on", "bf16", True),
        ("limit: null", "limit", None),
        ("limit:", "limit", None),
        ("limit: 7", "limit", 7),
        ("output_dir: 123", "output_dir", "123"),
        ("output_dir: no", "output_dir", "no"),
        ("output-dir: runs/x", "output_dir", "runs/x"),
        ("output_dir: 2024-01-01", "output_dir", "2024-01-01"),
        ("when: no", "when", "no"),  # YAML 1.1 alone reads False
        ("when: epoch", "when", "epoch"),
        ("options: {min_lr: 1e-5, name: a}", "options", {"min_lr": 1e-5, "name": "a"}),
        ("options: '{\"a\": 1}'", "options", '{"a": 1}'),
        ("report_to: [wandb, no]", "report_to", ["wandb", "no"]),
        ("report_to: none", "report_to", "none"),
        ("tokens_seen: all", "tokens_seen", "all"),
        ("tokens_seen: true", "tokens_seen", True),
    ],
)
def test_a_yaml_value_is_converted_to_its_fields_type(config, line, field, value):
    seen = getattr(parse("--config", config(line + "\n"))[1], field)
    assert seen == value
    assert type(seen) is type(value)


@pytest.mark.parametrize(("line", "value"), [("layers: [2, 3]", [2, 3]), ("layers: 4", [4]), ("layers: []", [])])
def test_a_yaml_list_fills_a_list_field(config, line, value):
    assert parse("--config", config(line + "\n"))[0].layers == value


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learning_rate: fast", "learning_rate: 'fast' is not float"),
        ("steps: 1.5", "steps: '1.5' is not int"),
        ("steps: null", "steps: None is not int"),
        ("steps: [1, 2]", r"steps: \['1', '2'\] is not int"),
        ("bf16: perhaps", "bf16: 'perhaps' is not bool"),
        ("kernel: flsh", "kernel: 'flsh' is not one of sdpa, flash"),
        ("layers: [1, two]", r"layers: \['1', 'two'\] is not list\[int\]"),
        ("layers: [1, [2]]", r"layers: \['1', \['2'\]\] is not list\[int\]"),
        ("output_dir: {a: 1}", "output_dir: {'a': 1} is not str"),
    ],
)
def test_a_yaml_value_of_the_wrong_type_is_refused_with_file_line_key_and_type(config, line, message):
    with pytest.raises(ArgumentError, match=rf"run\.yaml line 2: {message}\."):
        parse("--config", config(f"# comment\n{line}\n"))


def test_no_mistake_beside_a_token_shows_it(config, capsys):
    @dataclasses.dataclass
    class Hub:
        hub_token: str | None = None
        push_to_hub: bool = False

    parser = FastArgumentParser(Hub)
    any_form, hub_form = "s3cret-of-" + "x" * 30, "hf_S3cret" + "x" * 28
    mistakes = ["[TOKEN]", "{a: TOKEN}", "{TOKEN: a}", "[[TOKEN]]", "'TOKEN", "[TOKEN", "!x TOKEN", "@TOKEN", "*TOKEN"]
    mistakes += ["| TOKEN", "%TOKEN", "TOKEN: x", '"\\TOKEN"', "TOKEN\n  push_to_hub: true"]
    files = [f"hub_token: {text}".replace("TOKEN", any_form) for text in mistakes]
    swapped = ["TOKEN: hub_token", "push_to_hub: TOKEN", "hub_token: !TOKEN x", "hub_token: {TOKEN: 1, TOKEN: 2}"]
    files += [text.replace("TOKEN", hub_form) for text in swapped]
    typed = ["--hub_token TOKEN TOKEN", "-hub_token=TOKEN", "--hub_token:TOKEN", "hub_token=TOKEN", "TOKEN", "--TOKEN"]
    typed += ["--push_to_hub TOKEN", "--hub_tokn TOKEN", "--hub_tokn=TOKEN", "--push_to_hub_token=TOKEN"]
    commands = [["--config", config(text, f"{i}.yaml")] for i, text in enumerate(files)]
    for words in [*commands, *(line.replace("TOKEN", hub_form).split() for line in typed)]:
        with pytest.raises(SystemExit), exit_on_errors():
            parser.parse_args_into_dataclasses(words)
        said = capsys.readouterr()
        assert "3cret" not in said.out + said.err, words
        assert said.err.startswith("ArgumentError: ")


def test_preset_and_recipe_values_are_converted_and_checked_by_the_same_rule():
    parser = FastArgumentParser(Run, presets={"good": {"learning_rate": 1, "when": IntervalStrategy.STEPS}})
    (run,) = parser.parse_args_into_dataclasses(["--preset", "good"])
    assert (run.learning_rate, type(run.learning_rate), run.when) == (1.0, float, IntervalStrategy.STEPS)
    bad = FastArgumentParser(Run, presets={"bad": {"steps": "many"}})
    with pytest.raises(ArgumentError, match="preset bad: steps: 'many' is not int"):
        bad.parse_args_into_dataclasses(["--preset", "bad"])
    with pytest.raises(ArgumentError, match="recipe default: steps: True is not int"):
        FastArgumentParser(Run, defaults={"steps": True}).parse_args_into_dataclasses([])


def test_a_presets_mutable_value_is_not_shared_between_runs():
    presets = {"a": {"options": {"x": 1}}}
    parser = FastArgumentParser(Run, presets=presets)
    parser.parse_args_into_dataclasses(["--preset", "a"])[0].options["x"] = 2
    assert presets == {"a": {"options": {"x": 1}}}


# Unknown names


def test_an_unknown_yaml_key_is_fatal_and_names_file_line_and_the_nearest_key(config):
    with pytest.raises(
        ArgumentError, match=r"run\.yaml line 2: unknown key 'learning_rat', did you mean 'learning_rate'\?"
    ):
        parse("--config", config("steps: 1\nlearning_rat: 1\n"))


def test_an_unknown_flag_is_fatal_and_names_the_nearest_flag():
    with pytest.raises(ArgumentError, match=r"unknown argument '--learning_rat', did you mean '--learning_rate'\?"):
        parse("--learning_rat", "1")
    with pytest.raises(ArgumentError, match=r"unknown argument '--stepz', did you mean '--steps'\?"):
        parse("--stepz=1")


def test_flags_are_not_abbreviated():
    with pytest.raises(ArgumentError, match="unknown argument '--learning'"):
        parse("--learning", "1")


def test_a_stray_word_is_fatal():
    with pytest.raises(ArgumentError, match="unknown argument 'extra'"):
        parse("--steps", "1", "extra")


def test_an_unknown_preset_is_fatal_and_names_the_nearest_and_the_known_ones():
    message = (
        r"Unknown preset 'max_sped' in 'low_disk\+max_sped', did you mean 'max_speed'\?\. Known: low_disk, max_speed"
    )
    with pytest.raises(ArgumentError, match=message):
        parse("--preset", "low_disk+max_sped")


def test_an_unknown_key_in_a_preset_or_in_the_recipe_is_fatal():
    parser = FastArgumentParser(Run, presets={"bad": {"stepz": 1}}, defaults={"stepz": 1})
    with pytest.raises(ArgumentError, match="recipe default: unknown key 'stepz', did you mean 'steps'"):
        parser.parse_args_into_dataclasses([])
    parser = FastArgumentParser(Run, presets={"bad": {"stepz": 1}})
    with pytest.raises(ArgumentError, match="preset bad: unknown key 'stepz', did you mean 'steps'"):
        parser.parse_args_into_dataclasses(["--preset", "bad"])


def test_presets_and_config_files_do_not_nest(config):
    with pytest.raises(ArgumentError, match="preset outer: presets do not nest"):
        FastArgumentParser(Run, presets={"outer": {"preset": "x"}}).parse_args_into_dataclasses(["--preset", "outer"])
    with pytest.raises(ArgumentError, match=r"run\.yaml line 1: config files do not nest"):
        parse("--config", config("config: other.yaml\n"))


# Malformed files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 1\nbf16: true\nsteps: 2\n", r"run\.yaml line 3: 'steps' is already given on line 1"),
        ("output_dir: a\noutput-dir: b\n", r"line 2: 'output_dir' is already given on line 1"),
        ("options:\n  a: 1\n  a: 2\n", r"line 3: 'a' is already given on line 2"),
        ("- steps\n", "the top level must be lines of 'field: value'"),
        ("steps: [1\n", "not valid YAML: .*line 2"),
        ("options: {a: !!python/name:os.system x}\n", "tags and aliases are not read"),
    ],
)
def test_a_malformed_yaml_file_is_refused(config, text, message):
    with pytest.raises(ArgumentError, match=message):
        parse("--config", config(text))


def test_a_missing_file_is_refused_and_an_empty_one_changes_nothing(config):
    with pytest.raises(ArgumentError, match=r"--config 'no_such\.yaml': cannot be read from /"):
        parse("--config", "no_such.yaml")
    assert parse("--config", config("# nothing yet\n"))[1] == Run()


# The command line itself


@pytest.mark.parametrize(
    ("args", "frozen"),
    [
        ([], True),
        (["--no_frozen"], False),
        (["--no-frozen"], False),
        (["--frozen", "false"], False),
        (["--frozen=False"], False),
        (["--frozen"], True),
    ],
)
def test_boolean_flags_and_their_no_forms_work(args, frozen):
    parser = make()
    assert parse(*args, parser=parser)[0].frozen is frozen
    assert parser.origins["frozen"] == ("command line" if args else "default")


def test_both_spellings_of_a_flag_work():
    assert parse("--output-dir", "a")[1].output_dir == "a"
    assert parse("--output_dir", "b")[1].output_dir == "b"


def test_a_wrong_value_on_the_command_line_raises_and_does_not_exit():
    with pytest.raises(ArgumentError, match="--steps: invalid int value: 'x'"):
        parse("--steps", "x")


def test_an_argument_added_by_hand_comes_back_in_a_namespace_with_its_default():
    parser = FastArgumentParser(Run)
    parser.add_argument("--dry_run", action="store_true")
    run, extra = parser.parse_args_into_dataclasses(["--dry_run"])
    assert (run, vars(extra)) == (Run(), {"dry_run": True})


@pytest.mark.parametrize("option", [{"return_remaining_strings": True}, {"args_filename": "x.args"}])
def test_the_parents_ways_to_ignore_arguments_are_refused(option):
    with pytest.raises(ArgumentError, match="use --config"):
        make().parse_args_into_dataclasses([], **option)


def test_help_lists_flags_defaults_and_presets(capsys):
    with pytest.raises(SystemExit) as stop:
        make().parse_args_into_dataclasses(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "--learning_rate" in printed
    assert "Step size. (default: 5e-05)" in printed
    assert "  max_speed: bf16=True, steps=20, learning_rate=0.001\n" in printed
    assert "--config FILE.yaml" in printed


# With the real thing


def test_training_arguments_parse_from_yaml_preset_and_command_line(config, tmp_path):
    path = config(
        "eval_strategy: no\nlearning_rate: 3e-4\nreport_to: [none]\nlr_scheduler_kwargs: {min_lr: 1e-6}\n"
        "lr_scheduler_type: cosine_with_min_lr\nlabel_names: [labels]\nsave_total_limit: null\n"
        "include_num_input_tokens_seen: non_padding\n"
    )
    parser = FastArgumentParser(
        TrainingArguments, presets={"max_speed": {"torch_compile": False, "max_grad_norm": 0.5}}
    )
    (args,) = parser.parse_args_into_dataclasses(
        ["--config", path, "--preset", "max_speed", "--output-dir", str(tmp_path), "--use_cpu"]
    )
    assert (args.learning_rate, args.max_grad_norm, args.use_cpu) == (3e-4, 0.5, True)
    assert (args.eval_strategy, args.label_names, args.report_to) == (IntervalStrategy.NO, ["labels"], [])
    assert args.lr_scheduler_kwargs == {"min_lr": 1e-6}
    assert args.include_num_input_tokens_seen == "non_padding"
    assert parser.origins["max_grad_norm"] == "preset max_speed"


def test_help_of_training_arguments_works(capsys):
    with pytest.raises(SystemExit):
        FastArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--help"])
    assert "--per_device_train_batch_size" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_script_reads_its_own_command_line(config):
    code = (
        "import dataclasses; from hf_ext.parser import FastArgumentParser\n"
        "@dataclasses.dataclass\nclass A:\n    steps: int = 1\n"
        "print(FastArgumentParser(A).parse_args_into_dataclasses()[0].steps)\n"
    )
    command = [sys.executable, "-c", code, "--config", config("steps: 9\n")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[1])
    assert run.stdout.strip() == "9", run.stderr
