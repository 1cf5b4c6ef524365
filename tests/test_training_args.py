"""FastTrainingArguments: stock Trainer's values unless asked, the same on every machine, no token in a pickle."""

import copy
import dataclasses
import io
import pathlib
import pickle

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

from hf_ext import FastTrainingArguments
from hf_ext.errors import ArgumentError, MissingDependencyError
from hf_ext.optional import installed_version

NAN, INF = float("nan"), float("inf")


def make(**given) -> FastTrainingArguments:
    return FastTrainingArguments(output_dir="o", **given)


def differing_fields(ours: TrainingArguments, stock: TrainingArguments) -> set[str]:
    names = [field.name for field in dataclasses.fields(TrainingArguments)]
    return {name for name in names if str(getattr(ours, name)) != str(getattr(stock, name))}


@pytest.mark.parametrize("given", [{}, {"fp16": True}, {"bf16": True, "use_cpu": True}, {"tf32": False, "seed": 7}])
def test_inherited_fields_keep_the_values_of_stock_trainer(given):
    ours, stock = make(**given), TrainingArguments(output_dir="o", **given)
    assert differing_fields(ours, stock) == set()
    assert ours.mixed_precision == stock.mixed_precision
    assert differing_fields(make(max_steps=3, **given), stock) == {"max_steps"}  # so the comparison can fail


def test_the_added_fields_stand_behind_those_of_trainer_and_are_off_by_default():
    inherited = [field.name for field in dataclasses.fields(TrainingArguments)]
    names = [field.name for field in dataclasses.fields(FastTrainingArguments)]
    assert names[: len(inherited)] == inherited  # given by place they are Trainer's
    args, added = make(), {*names[len(inherited) :]} - {"embedding_cache_dir"}
    assert {name: getattr(args, name) for name in added if getattr(args, name)} == {
        **{"attention": "auto", "compile_mode": "default", "resume": "no"},
        **{"early_stopping_min_delta": 0.01, "lora_r": 8, "lora_alpha": 16},
        **{"nan_policy": "stop", "nan_skip_limit": 3},
    }


def test_requests_for_another_machine_construct_here():
    for given, precision in (({"tf32": True}, "no"), ({"bf16": True}, "bf16")):
        args = make(**given)
        assert all(getattr(args, name) is True for name in given)
        assert args.mixed_precision == precision


@pytest.mark.parametrize(("metric", "expected"), [("rmse", False), ("eval_valid_mae", False), ("spearman", True)])
def test_the_best_of_an_error_is_the_smallest(metric, expected):
    assert make(metric_for_best_model=metric).greater_is_better is expected
    assert make(metric_for_best_model=metric, greater_is_better=True).greater_is_better


REFUSED = [
    # words
    ("speedups", ["turbo"], "'turbo': allowed are all, .*embedding_cache"),
    ("without", "packing,ddp", "'packing,ddp': allowed are all, "),
    ("attention", None, "allowed are auto, "),
    ("resume", "AUTO", "allowed are 'auto'"),
    ("resume", "", "allowed are 'auto'"),
    # types that would silently mean something else
    ("use_peft", "false", "must be bool"),
    ("lora_r", "8", "must be int"),
    ("lora_alpha", True, "must be int"),
    ("resume", True, "must be str"),
    ("speedups", None, r"must be list\[str\]"),
    ("save_minutes", True, "must be float or None"),
    # numbers out of range
    ("learning_rate", -1, "must be finite and not negative"),
    ("learning_rate", NAN, "must be finite and not negative"),
    ("learning_rate", "1e-3", "must be finite and not negative, and is text"),
    ("seed", -1, "must be from 0 to 4294967295"),
    ("num_train_epochs", NAN, "must be a finite number"),
    ("max_grad_norm", NAN, "must be a number; 0 and less clip nothing"),
    ("dataloader_num_workers", -1, "must be from 0 to 1024, a process each"),
    ("logging_steps", -1, "must be finite and not negative"),
    ("effective_batch_size", 0, "must be at least 1"),
    ("early_stopping_min_delta", -0.1, "must be finite and not negative"),
    ("encoder_learning_rate", 0, "must be above 0 and finite"),
]


def test_a_value_that_is_wrong_or_would_mean_something_else_is_refused_by_name():
    for name, value, rule in REFUSED:
        with pytest.raises(ArgumentError, match=f"^{name}=.*{rule}"):
            make(**{name: value})
    for end, use_cpu in (("", True), ("", False), ("_full_eval", False)):
        with pytest.raises(ArgumentError, match=f"bf16{end}=True with fp16{end}=True: a run computes in one precision"):
            make(use_cpu=use_cpu, **{f"bf16{end}": True, f"fp16{end}": True})


@pytest.mark.skipif(installed_version("deepspeed") is not None, reason="DeepSpeed is installed")
@pytest.mark.parametrize(("given", "launched"), [({"deepspeed": "zero.json"}, "false"), ({}, "true")])
def test_a_missing_deepspeed_is_one_line_with_what_to_install(given, launched, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", launched)  # as the launcher does, of zero3.yaml
    with pytest.raises(
        MissingDependencyError, match=r'^deepspeed is needed .* Run: pip install "hf_ext\[deepspeed\]"$'
    ):
        make(**given)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    assert make().deepspeed is None


def test_what_stock_trainer_has_a_use_for_stays_allowed():
    """No limit, no end by steps, never saved by steps; parts of a run; whole floats; scheduler settings as JSON."""
    given = {"save_total_limit": 0, "max_steps": -1, "save_steps": -1, "logging_steps": 0, "eval_steps": None}
    args = make(**given, logging_strategy="no", optim_args="a=1, b=2", lr_scheduler_kwargs='{"num_cycles": 2}')
    assert {name: getattr(args, name) for name in given} == given
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}
    given = {"eval_steps": 0.5, "logging_steps": 0.1, "save_steps": 0.5, "max_steps": 4.0, "seed": np.int64(3)}
    args = make(**given, include_num_input_tokens_seen="no", debug="", use_cpu="yes", data_seed=None)
    assert {name: getattr(args, name) for name in given} == given
    for bound in (INF, 0, -1.0):  # that clips nothing
        assert make(max_grad_norm=bound).max_grad_norm == bound


def test_paths_numbers_and_lists_of_other_kinds_are_taken_and_one_word_is_a_list_of_one():
    args = make(
        embedding_cache_dir=pathlib.Path("cache"),
        eval_subset=100,
        lora_r=np.int32(4),
        use_peft=np.True_,
        speedups=("ddp",),
        without="tf32",
        lora_target_modules="query",
    )
    assert (args.eval_subset, args.lora_r, args.speedups) == (100, 4, ("ddp",))
    assert (args.without, args.lora_target_modules) == (["tf32"], ["query"])
    assert args.explicit_fields >= {"without", "lora_target_modules"}
    assert make(resume="./AUTO").resume == "./AUTO"


def test_explicit_fields_are_what_code_gave_or_changed_or_the_parser_recorded():
    assert make().explicit_fields == {"output_dir"}
    args = make(use_cpu=True, learning_rate=1e-3, hub_token="hf_abcdefghij")
    known = {"output_dir", "use_cpu", "learning_rate", "hub_token"}  # not what use_cpu entails
    assert args.explicit_fields == known
    for copied in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert copied.explicit_fields | {"hub_token"} == known
        copied.dataloader_num_workers = 1
        assert "dataloader_num_workers" in copied.explicit_fields
    assert args.explicit_fields == known
    args.mark_explicit(frozenset({"seed"}))
    assert args.explicit_fields == {"seed"}


def test_a_pickle_of_the_arguments_holds_no_token():
    secret = "hf_abcdefghij"
    args = make(hub_token=secret)
    buffer, stock = io.BytesIO(), io.BytesIO()
    torch.save(args, buffer)
    assert secret.encode() not in buffer.getvalue()
    for copied in (copy.copy(args), copy.deepcopy(args)):
        assert copied.hub_token == secret  # the run itself still has it
        assert copied == args
    torch.save(TrainingArguments(output_dir="o", hub_token=secret), stock)
    assert secret.encode() in stock.getvalue()  # what the check above would find
