"""Five layers, one conversion rule, no key or value that is silently ignored; presets; names of other programs."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from inside import DoctorArguments, MaskedLMArguments
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from hf_ext import PRESETS, FastArgumentParser, FastTrainingArguments
from hf_ext.data import DataArguments
from hf_ext.errors import ArgumentError, exit_on_errors
from hf_ext.finished.evaluate import EvaluateArguments
from hf_ext.generation.sample import SampleArguments
from hf_ext.hardware import describe_hardware
from hf_ext.property import AffinityArguments
from hf_ext.speedups import REGISTRY, Context

pytestmark = pytest.mark.internals


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


TOY = {
    "max_speed": {"bf16": True, "steps": 20, "learning_rate": 1e-3},
    "low_disk": {"limit": 1, "steps": 30},
    "named": {"model_name": "from-preset"},
}


def make_parser(**kwargs: Any) -> FastArgumentParser:
    return FastArgumentParser((Model, Run), presets=TOY, **kwargs)


def parse_toy(*args: str, parser: FastArgumentParser | None = None) -> tuple[Model, Run]:
    return (parser or make_parser()).parse_args_into_dataclasses(["--model_name", "m", *args])


@pytest.fixture
def config(tmp_path):
    def write(text: str, name: str = "run.yaml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


# Precedence


def test_each_layer_beats_the_one_below_it(config):
    def steps(*words: str) -> int:
        return parse_toy(*words, parser=make_parser(defaults={"steps": 15}))[1].steps

    path = config("steps: 40\n")
    assert parse_toy()[1].steps == 10
    assert steps() == 15
    assert steps("--preset", "max_speed") == 20
    assert steps("--preset", "max_speed", "--config", path) == 40
    assert steps("--steps", "50", f"--config={path}", "--preset=max_speed") == 50
    assert steps("--config", path, "--steps", "10") == 10  # also where the value is the default


def test_origins_and_explicit_say_who_set_what(config):
    parser = make_parser(defaults={"dropout": 0.2})
    path = config("learning_rate: 1e-4\npreset: max_speed+low_disk\n")
    parse_toy("--config", path, "--kernel", "flash", parser=parser)
    set_by = {name: origin for name, origin in parser.origins.items() if origin != "default"}
    assert set_by == {
        "model_name": "command line",
        "dropout": "recipe",
        "kernel": "command line",
        "learning_rate": "run.yaml",
        "steps": "preset low_disk",
        "bf16": "preset max_speed",
        "limit": "preset low_disk",
    }
    assert len(parser.origins) == 14
    assert parser.explicit == {"model_name", "kernel", "learning_rate"}
    assert parse_toy(parser=parser)[1] == Run()  # and nothing of it is left for the next
    assert parser.explicit == {"model_name"}


def test_the_preset_of_the_command_line_beats_the_yamls_which_beats_the_recipes(config):
    path, parser = config("preset: low_disk\n"), make_parser(defaults={"preset": "max_speed"})
    assert parse_toy("--config", path)[1].steps == 30
    assert parse_toy("--config", path, "--preset", "max_speed")[1].steps == 20
    assert parse_toy("--config", path, "--preset", "none")[1].steps == 10
    assert parse_toy(parser=parser)[1].steps == 20
    assert parse_toy("--config", path, parser=parser)[1].steps == 30
    assert parse_toy("--config", config("preset:\n", "no.yaml"), parser=parser)[1].steps == 10

    @dataclasses.dataclass
    class WithPreset:  # receives the string
        preset: str | None = None
        steps: int = 1

    parser = FastArgumentParser(WithPreset, presets={"a": {"steps": 2}, "b": {"steps": 3}})
    assert parser.parse_args_into_dataclasses(["--preset", "a+b"]) == (WithPreset("a+b", 3),)


def test_a_required_field_may_come_from_any_layer_and_from_none_is_an_error_every_time(config):
    for words in (["--config", config("model-name: x\n")], ["--preset", "named"]):
        assert make_parser().parse_args_into_dataclasses(words)[0].model_name in ("x", "from-preset")
    parser = make_parser()
    for _ in range(2):
        with pytest.raises(ArgumentError, match="model_name is required: give --model_name or put 'model_name'"):
            parser.parse_args_into_dataclasses([])


# YAML values become what the command line would make of them


def test_a_yaml_value_is_converted_to_its_fields_type(config):
    for line, value in (
        ("learning_rate: 1e-3", 0.001),  # PyYAML alone reads the text "1e-3"
        ("learning_rate: .inf", float("inf")),
        ("steps: 010", 10),  # YAML 1.1 alone reads 8
        ("bf16: on", True),
        ("limit: null", None),
        ("output-dir: no", "no"),
        ("output_dir: 2024-01-01", "2024-01-01"),
        ("when: no", "no"),  # YAML 1.1 alone reads False
        ("options: {min_lr: 1e-5, name: a}", {"min_lr": 1e-5, "name": "a"}),
        ("options: '{\"a\": 1}'", '{"a": 1}'),
        ("report_to: [wandb, no]", ["wandb", "no"]),
        ("tokens_seen: all", "all"),
        ("layers: [2, 3]", [2, 3]),
        ("layers: []", []),
    ):
        model, run = parse_toy("--config", config(f"\ufeff{line}\n"))
        name = line.partition(":")[0].replace("-", "_")
        seen = getattr(run if hasattr(run, name) else model, name)
        assert (seen, type(seen)) == (value, type(value)), line


def test_a_mistake_in_a_yaml_file_is_refused_with_its_place(config):
    for line, message in (
        ("learning_rate: fast", "learning_rate: 'fast' is not float"),
        ("steps: 1.5", "steps: '1.5' is not int"),
        ("steps: [1, 2]", r"steps: \['1', '2'\] is not int"),
        ("bf16: perhaps", "bf16: 'perhaps' is not bool"),
        ("kernel: flsh", "kernel: 'flsh' is not one of sdpa, flash"),
        ("layers: [1, two]", r"layers: \['1', 'two'\] is not list\[int\]"),
        ("output_dir: {a: 1}", "output_dir: {'a': 1} is not str"),
        ("learning_rat: 1", r"unknown key 'learning_rat', did you mean 'learning_rate'\?"),
        ("config: other.yaml", "config files do not nest"),
        ("output_dir: a\noutput-dir: b", "'output_dir' is already given on line 2"),
        ("options: &a {}\nreport_to: *a", "tags and aliases are not read: write the value out"),
        ("options: !!python/name:os.system x", "tags and aliases are not read"),
    ):
        with pytest.raises(ArgumentError, match=rf"run\.yaml line [23]: {message}"):
            parse_toy("--config", config(f"# comment\n{line}\n"))
    for text, message in (
        ("- steps\n", "the top level must be lines of 'field: value'"),
        ("steps: [1\n", "not valid YAML: .*line 2"),
        ("steps: 1\n---\nsteps: 2\n", "expected a single document"),
    ):
        with pytest.raises(ArgumentError, match=rf"run\.yaml: .*{message}"):
            parse_toy("--config", config(text))


def test_a_file_that_cannot_be_read_is_refused_and_an_empty_one_changes_nothing(config, tmp_path):
    with pytest.raises(ArgumentError, match=r"--config 'no_such\.yaml': cannot be read from /"):
        parse_toy("--config", "no_such.yaml")
    with pytest.raises(ArgumentError, match="Is a directory"):
        parse_toy("--config", str(tmp_path))
    (tmp_path / "run.yaml").write_bytes("steps: 1\n".encode("utf-16"))
    with pytest.raises(ArgumentError, match="can't decode byte 0xff"):
        parse_toy("--config", str(tmp_path / "run.yaml"))
    assert parse_toy("--config", config("# nothing yet\n"))[1] == Run()


def test_no_mistake_beside_a_token_shows_it(config, capsys):
    @dataclasses.dataclass
    class Hub:
        hub_token: str | None = None
        push_to_hub: bool = False

    parser = FastArgumentParser(Hub)
    any_form, hub_form = "s3cret-of-" + "x" * 30, "hf_S3cret" + "x" * 28
    mistakes = ["[TOKEN]", "{TOKEN: a}", "'TOKEN", "!x TOKEN", "@TOKEN", "*TOKEN", '"\\TOKEN"', "TOKEN: x"]
    files = [f"hub_token: {text}".replace("TOKEN", any_form) for text in mistakes]
    swapped = ["TOKEN: hub_token", "push_to_hub: TOKEN", "hub_token: {TOKEN: 1, TOKEN: 2}"]
    files += [text.replace("TOKEN", hub_form) for text in swapped]
    typed = ["--hub_token TOKEN TOKEN", "--hub_token:TOKEN", "TOKEN", "--push_to_hub TOKEN", "--hub_tokn=TOKEN"]
    commands = [["--config", config(text, f"{i}.yaml")] for i, text in enumerate(files)]
    for words in [*commands, *(line.replace("TOKEN", hub_form).split() for line in typed)]:
        with pytest.raises(SystemExit), exit_on_errors():
            parser.parse_args_into_dataclasses(words)
        said = capsys.readouterr()
        assert "3cret" not in said.out + said.err, words
        assert said.err.startswith("ArgumentError: ")


def test_preset_and_recipe_values_are_converted_checked_and_copied_by_the_same_rule():
    presets = {"good": {"learning_rate": 1, "when": IntervalStrategy.STEPS, "options": {"x": 1}}}
    (run,) = FastArgumentParser(Run, presets=presets).parse_args_into_dataclasses(["--preset", "good"])
    assert (run.learning_rate, type(run.learning_rate), run.when) == (1.0, float, IntervalStrategy.STEPS)
    run.options["x"] = 2
    assert presets["good"]["options"] == {"x": 1}
    for values, said in (({"steps": "many"}, "steps: 'many' is not int"), ({"stepz": 1}, "unknown key 'stepz', did")):
        with pytest.raises(ArgumentError, match=f"preset bad: {said}"):
            FastArgumentParser(Run, presets={"bad": values}).parse_args_into_dataclasses(["--preset", "bad"])
        with pytest.raises(ArgumentError, match=f"recipe: {said}"):
            FastArgumentParser(Run, defaults=values).parse_args_into_dataclasses([])


# The command line itself


def test_a_mistake_on_the_command_line_raises_and_names_what_may_be_meant():
    for words, message in (
        ("--learning_rat 1", r"unknown argument '--learning_rat', did you mean '--learning_rate'\?"),
        ("--stepz=1", r"unknown argument '--stepz', did you mean '--steps'\?"),
        ("--learning 1", "unknown argument '--learning'"),  # no abbreviations
        ("--steps 1 extra", "unknown argument 'extra'"),
        ("--steps x", "--steps: invalid int value: 'x'"),
        ("--preset low_disk+max_sped", r"Unknown preset 'max_sped' in .*mean 'max_speed'\?\. Known: low_disk, max"),
    ):
        with pytest.raises(ArgumentError, match=message):
            parse_toy(*words.split())
    for option in ({"return_remaining_strings": True}, {"args_filename": "x.args"}):
        with pytest.raises(ArgumentError, match="use --config"):
            make_parser().parse_args_into_dataclasses([], **option)


def test_boolean_flags_and_both_spellings_work():
    for words, frozen in ((["--no-frozen"], False), (["--frozen=False"], False), (["--frozen"], True), ([], True)):
        parser = make_parser()
        assert parse_toy(*words, parser=parser)[0].frozen is frozen
        assert parser.origins["frozen"] == ("command line" if words else "default")
    assert parse_toy("--output-dir", "a")[1].output_dir == "a"
    assert parse_toy("--output_dir", "b")[1].output_dir == "b"


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


def parse(*argv: str) -> FastTrainingArguments:
    parser = FastArgumentParser(FastTrainingArguments, presets=PRESETS)
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "out", *argv])
    args.mark_explicit(parser.explicit)
    return args


def make_args(**given) -> FastTrainingArguments:
    return FastTrainingArguments("out", use_cpu=True, **given)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_what_it_says_from_both_sides(preset):
    typed, ours = parse("--preset", preset, "--use_cpu"), make_args(preset=preset)
    assert typed.preset == ours.preset == preset
    assert typed.explicit_fields == ours.explicit_fields == {"output_dir", "preset", "use_cpu"}
    known = ours.to_dict()
    assert {n for n, value in typed.to_dict().items() if n != "logging_dir" and known[n] != value} == set()
    for name, value in PRESETS[preset].items():
        assert getattr(ours, name) == ([] if (name, value) == ("report_to", "none") else value), name


def test_max_speed_with_reproducible_leaves_every_rounding_speedup_out_and_no_other():
    args = parse("--preset", "max_speed+reproducible")
    assert args.speedups == ["all"]
    assert args.full_determinism
    context = Context(describe_hardware("A100"), args)
    assert {speedup.NAME for speedup in REGISTRY if speedup.left_out(context)} == {
        speedup.NAME for speedup in REGISTRY if speedup.KIND == "N"
    }
    assert {speedup.decide(context).status for speedup in REGISTRY if speedup.KIND == "N"} == {"off"}


def test_presets_compose_and_the_later_one_wins():
    assert parse("--preset", "max_speed+baseline").speedups == []
    assert parse("--preset", "baseline+max_speed").speedups == ["all"]
    assert parse("--preset", "low_disk+low_memory", "--save_total_limit", "7").save_total_limit == 7
    args = make_args(preset="low_memory+quick_eval", per_device_train_batch_size=4, eval_subset=0.5)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 8)
    assert (args.eval_subset, args.eval_every_epochs) == (0.5, 2)
    assert args.explicit_fields >= {"per_device_train_batch_size", "eval_subset"}
    assert "gradient_accumulation_steps" not in args.explicit_fields
    args.speedups.append("ddp")
    assert PRESETS["low_memory"]["speedups"] == ["all"]
    assert dataclasses.replace(args, seed=1).speedups == ["all", "ddp"]
    for none in ("none", "", None):
        assert make_args(preset=none).speedups == []


def test_an_unknown_preset_is_refused_with_the_nearest_name():
    message = r"'max_sped' in 'low_disk\+max_sped', did you mean 'max_speed'\?\. Known: "
    for refused in (lambda name: parse("--preset", name), lambda name: make_args(preset=name)):
        with pytest.raises(ArgumentError, match=message):
            refused("low_disk+max_sped")
    with pytest.raises(ArgumentError, match=r"preset=\[.max_speed.\]: must be str or None"):
        make_args(preset=["max_speed"])


@dataclass
class ScriptArguments:
    """As in the example scripts of transformers."""

    model_name_or_path: str = field(default="m", metadata={"help": "Path."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Truncate the evaluation set."})


def make(task: type) -> FastArgumentParser:
    return FastArgumentParser((task, DataArguments, FastTrainingArguments))


def test_a_script_of_hugging_face_parses_with_only_the_import_swapped():
    words = "--output_dir out --use_cpu --max_eval_samples 7 --speedups all --preset low_disk+low_memory"
    parser = HfArgumentParser((ScriptArguments, FastTrainingArguments))
    script, args = parser.parse_args_into_dataclasses(
        [*words.split(), "--gradient_accumulation_steps", "2"], look_for_args_file=False
    )
    assert (script.max_eval_samples, args.eval_subset, args.speedups) == (7, None, ["all"])
    assert (args.save_total_limit, args.per_device_train_batch_size, args.gradient_accumulation_steps) == (1, 1, 2)


def test_names_of_other_programs_are_answered_with_the_right_flag(tmp_path):
    parser = make(AffinityArguments)
    for others, flag in (
        ("--lr --learning_rat", "learning_rate"),
        ("--batch_size --batch-size --bs", "per_device_train_batch_size"),
        ("--grad_accum", "gradient_accumulation_steps"),
        ("--epochs --num_epochs", "num_train_epochs"),
        ("--optim_ext", "speedups"),
        ("--patience", "early_stopping_patience"),
        ("--test_size", "split_sizes"),
        ("--model --model_name_or_path", "encoders"),
        ("--data --dataset", "dataset_name"),
        ("--label --target", "label_column"),
        ("--max_eval_samples", "eval_subset"),
    ):
        for other in others.split():
            with pytest.raises(ArgumentError, match=rf"unknown argument '{other}', did you mean '--{flag}'\?"):
                parser.parse_args_into_dataclasses([other, "3"])
    (tmp_path / "a.yaml").write_text("lr: 1e-3\n")
    with pytest.raises(ArgumentError, match=r"unknown key 'lr', did you mean 'learning_rate'\?"):
        parser.parse_args_into_dataclasses(["--config", str(tmp_path / "a.yaml")])
    with pytest.raises(ArgumentError, match=r"'--model', did you mean '--model_name_or_path'\?"):
        make(MaskedLMArguments).parse_args_into_dataclasses(["--model", "x"])


def test_a_flag_of_another_command_names_that_command():
    parser = make(AffinityArguments)
    owners = {
        "doctor": (DoctorArguments, ["device"]),
        "evaluate": (EvaluateArguments, ["test_of"]),
        "sample": (SampleArguments, ["antigen", "num_samples"]),
        "mlm": (MaskedLMArguments, ["model_size"]),
    }
    for command, (owner, names) in owners.items():
        assert set(names) <= {field.name for field in dataclasses.fields(owner)}
        for name in names:
            with pytest.raises(ArgumentError, match=rf"'--{name}', did you mean that of `hf-ext {command}`\?"):
                parser.parse_args_into_dataclasses([f"--{name}", "x"])
