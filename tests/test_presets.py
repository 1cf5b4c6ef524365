"""Presets construct, compose, and give way to whatever the user says."""

import dataclasses

import pytest

from hf_ext import PRESETS, FastArgumentParser, FastTrainingArguments
from hf_ext.errors import ArgumentError
from hf_ext.speedups import REGISTRY

# Per preset value, what a user could type instead.
OTHER = {
    "speedups": ("tf32", ["tf32"]),
    "without": ("length_grouping", ["length_grouping"]),
    "cached_batch_size": ("64", 64),
    "per_device_train_batch_size": ("3", 3),
    "per_device_eval_batch_size": ("5", 5),
    "gradient_accumulation_steps": ("2", 2),
    "activation_policy": ("full", "full"),
    "oom_policy": ("stop", "stop"),
    "dataloader_pin_memory": ("true", True),
    "save_total_limit": ("7", 7),
    "eval_subset": ("500", 500.0),
    "eval_every_epochs": ("3", 3),
    "report_to": ("tensorboard", ["tensorboard"]),
    "full_determinism": ("false", False),
    "data_seed": ("1", 1),
    "tf32": ("false", False),
}


def parse(*argv: str) -> FastTrainingArguments:
    parser = FastArgumentParser(FastTrainingArguments, presets=PRESETS)
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "out", *argv])
    args.mark_explicit(parser.explicit)
    return args


def make(**given) -> FastTrainingArguments:
    return FastTrainingArguments("out", use_cpu=True, **given)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_what_it_says_from_both_sides_and_gives_way(preset):
    typed, ours = parse("--preset", preset, "--use_cpu"), make(preset=preset)
    assert typed.preset == ours.preset == preset
    assert typed.explicit_fields == ours.explicit_fields == {"output_dir", "preset", "use_cpu"}
    known = ours.to_dict()
    assert {n for n, value in typed.to_dict().items() if n != "logging_dir" and known[n] != value} == set()
    for name, value in PRESETS[preset].items():
        assert getattr(ours, name) == ([] if (name, value) == ("report_to", "none") else value), name
        words, expected = OTHER[name]
        args = parse("--preset", preset, f"--{name}", words)
        assert getattr(args, name) == expected
        assert name in args.explicit_fields


def test_presets_name_only_fields_and_speedups_that_exist():
    fields = {field.name for field in dataclasses.fields(FastTrainingArguments)}
    names = {speedup.NAME for speedup in REGISTRY} | {"all"}
    for values in PRESETS.values():
        assert set(values) <= fields
        assert {*values.get("speedups", []), *values.get("without", [])} <= names


def test_max_speed_with_reproducible_leaves_every_rounding_speedup_out():
    args = parse("--preset", "max_speed+reproducible")
    assert args.speedups == ["all"]
    assert args.full_determinism
    rounding = {speedup.NAME for speedup in REGISTRY if speedup.KIND == "N"}
    assert set(args.without) == rounding - {"quantized_base"}  # which comes by the user's own word alone


def test_presets_compose_and_the_later_one_wins():
    assert parse("--preset", "max_speed+baseline").speedups == []
    assert parse("--preset", "baseline+max_speed").speedups == ["all"]
    assert parse("--preset", "low_disk+low_memory").save_total_limit == 1
    args = make(preset="low_memory+quick_eval", per_device_train_batch_size=4, eval_subset=0.5)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 8)
    assert (args.eval_subset, args.eval_every_epochs) == (0.5, 2)
    assert args.explicit_fields >= {"per_device_train_batch_size", "eval_subset"}
    assert "gradient_accumulation_steps" not in args.explicit_fields
    args.speedups.append("ddp")
    assert PRESETS["low_memory"]["speedups"] == ["all"]
    assert dataclasses.replace(args, seed=1).speedups == ["all", "ddp"]
    for none in ("none", "", None):
        assert make(preset=none).speedups == []


def test_an_unknown_preset_is_refused_with_the_nearest_name():
    message = r"'max_sped' in 'low_disk\+max_sped', did you mean 'max_speed'\?\. Known: "
    for refused in (lambda name: parse("--preset", name), lambda name: make(preset=name)):
        with pytest.raises(ArgumentError, match=message):
            refused("low_disk+max_sped")
    with pytest.raises(ArgumentError, match=r"preset=\[.max_speed.\]: must be str or None"):
        make(preset=["max_speed"])
