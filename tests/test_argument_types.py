"""Arguments of a type that would silently mean something else are refused; one word stands for a list of one."""

import pathlib

import numpy as np
import pytest

from hf_ext.errors import ArgumentError
from hf_ext.training_args import FastTrainingArguments


def make(**given):
    return FastTrainingArguments(output_dir="o", **given)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("use_peft", "false", "must be bool"),
        ("use_peft", 1, "must be bool"),
        ("keep_epoch_checkpoint", "no", "must be bool"),
        ("use_dora", None, "must be bool"),
        ("lora_r", "8", "must be int"),
        ("lora_r", 2.5, "must be int"),
        ("lora_alpha", True, "must be int"),
        ("early_stopping_patience", 1.5, "must be int"),
        ("lora_dropout", "0.1", "must be float"),
        ("block_pattern", 3, "must be str"),
        ("resume", True, "must be str"),
        ("speedups", 1, r"must be list\[str\]"),
        ("speedups", None, r"must be list\[str\]"),
        ("without", [1], r"must be list\[str\]"),
        ("lora_target_modules", {"query": 1}, r"must be list\[str\]"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name, value, rule):
    with pytest.raises(ArgumentError, match=rf"{name}=.*: {rule}"):
        make(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("seed", 1.5), ("data_seed", 0.5), ("max_steps", 2.5), ("gradient_accumulation_steps", 1.5)),
        *(("save_total_limit", 1.5), ("max_steps", "10"), ("eval_accumulation_steps", float("nan"))),
    ],
)
def test_a_share_of_a_step_seed_or_row_is_refused_for_trainers_arguments_too(name, value):
    with pytest.raises(ArgumentError, match=f"{name}=.*: must be a whole number"):
        make(**{name: value})


@pytest.mark.parametrize("word", ["false", "False", "no", "off", "0"])
@pytest.mark.parametrize("name", ["push_to_hub", "load_best_model_at_end", "tf32"])
def test_a_word_for_no_that_python_would_take_for_yes_is_refused(name, word):
    with pytest.raises(ArgumentError, match=f"{name}='{word}': .* takes any text for True"):
        make(**{name: word})


def test_what_trainer_takes_is_taken():
    given = {"eval_steps": 0.5, "logging_steps": 0.1, "save_steps": 0.5, "max_steps": 4.0, "seed": np.int64(3)}
    args = make(**given, include_num_input_tokens_seen="no", debug="", use_cpu="yes", data_seed=None)
    assert {name: getattr(args, name) for name in given} == given


def test_paths_counts_and_lists_of_other_kinds_are_taken():
    args = make(
        embedding_cache_dir=pathlib.Path("cache"),
        eval_subset=100,
        lora_r=np.int32(4),
        use_peft=np.True_,
        speedups=("ddp",),
        lora_target_modules=None,
    )
    assert (args.eval_subset, args.lora_r, args.speedups) == (100, 4, ("ddp",))


@pytest.mark.parametrize(
    ("name", "word"),
    [("speedups", "all"), ("without", "tf32"), ("allow_changed", "learning_rate"), ("lora_target_modules", "query")],
)
def test_one_word_is_a_list_of_one(name, word):
    args = make(**{name: word})
    assert getattr(args, name) == [word]
    assert name in args.explicit_fields


def test_an_unknown_speed_up_is_named_whole():
    with pytest.raises(ArgumentError, match=r"speedups=.packing,ddp.: allowed are all, "):
        make(speedups="packing,ddp")


@pytest.mark.parametrize("word", ["AUTO", "Auto", "No", "none", "true", "yes", "False", ""])
def test_a_resume_that_names_no_folder_is_refused_at_once(word):
    with pytest.raises(ArgumentError, match=f"resume={word!r}: .*'auto'.*'no'"):
        make(resume=word)
    assert make(resume="./AUTO").resume == "./AUTO"
