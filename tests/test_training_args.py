"""FastTrainingArguments: stock Trainer's values unless asked, the same on every machine, no token in a pickle."""

import copy
import dataclasses
import io
import pickle
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from transformers import TrainingArguments

from hf_ext.errors import ArgumentError, HfExtError
from hf_ext.training_args import FastTrainingArguments

NAN, INF = float("nan"), float("inf")
ADDED = {
    "preset",
    "speedups",
    "without",
    "effective_batch_size",
    "lr_scaling",
    "cached_batch_size",
    "embedding_cache_dir",
    "max_encoder_noise",
    "max_tokens_per_batch",
    "encoder_learning_rate",
    "load_in_8bit",
    "load_in_4bit",
    "optim_ext",
    "nccl_preset",
    "attention",
    "activation_policy",
    "activation_budget_gb",
    "block_pattern",
    "compile_mode",
    "torch_profiler",
    "baseline_json",
    "baseline_batches_per_second",
    "baseline_batch_size",
    "resume",
    "allow_changed",
    "save_minutes",
    "max_hours",
    "keep_epoch_checkpoint",
    "save_total_size_gb",
    "disk_policy",
    "local_checkpoint_dir",
    "nan_policy",
    "oom_policy",
    "find_batch_size",
    "eval_subset",
    "eval_every_epochs",
    "early_stopping_patience",
    "early_stopping_min_delta",
    "dollars_per_hour",
    "use_peft",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "use_rslora",
    "use_dora",
}


def differing_fields(ours: TrainingArguments, stock: TrainingArguments) -> set[str]:
    names = [field.name for field in dataclasses.fields(TrainingArguments)]
    return {name for name in names if str(getattr(ours, name)) != str(getattr(stock, name))}


@pytest.mark.parametrize("given", [{}, {"fp16": True}, {"bf16": True, "use_cpu": True}, {"tf32": False, "seed": 7}])
def test_inherited_fields_keep_the_values_of_stock_trainer(given):
    ours, stock = FastTrainingArguments(output_dir="o", **given), TrainingArguments(output_dir="o", **given)
    assert differing_fields(ours, stock) == set()
    assert ours.mixed_precision == stock.mixed_precision
    changed = FastTrainingArguments(output_dir="o", max_steps=3, **given)
    assert differing_fields(changed, stock) == {"max_steps"}  # so the comparison can fail


def test_the_added_fields_are_these_and_off_by_default():
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    names = {field.name for field in dataclasses.fields(FastTrainingArguments)}
    assert names - inherited == ADDED
    args = FastTrainingArguments(output_dir="o")
    assert (args.preset, args.speedups, args.without, args.effective_batch_size) == (None, [], [], None)
    assert (args.lr_scaling, args.cached_batch_size) == ("none", None)
    assert (args.attention, args.max_tokens_per_batch, args.encoder_learning_rate) == ("auto", None, None)
    assert args.baseline_json is None
    assert (args.resume, args.allow_changed, args.disk_policy) == ("no", [], "refuse")
    assert (args.save_minutes, args.max_hours, args.save_total_size_gb, args.local_checkpoint_dir) == (None,) * 4


@pytest.mark.parametrize("given", [{"tf32": True}, {"bf16": True}])
def test_requests_for_another_machine_construct_here_where_stock_arguments_do_not(given):
    args = FastTrainingArguments(output_dir="o", **given)
    (name,) = given
    assert getattr(args, name) is True
    assert args.mixed_precision == ("bf16" if name == "bf16" else "no")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"tf32|bf16"):
            TrainingArguments(output_dir="o", **given)


@pytest.mark.parametrize(("metric", "expected"), [("rmse", False), ("eval_valid_mae", False), ("spearman", True)])
def test_the_best_of_an_error_is_the_smallest(metric, expected):
    assert FastTrainingArguments(output_dir="o", metric_for_best_model=metric).greater_is_better is expected
    assert FastTrainingArguments(output_dir="o", metric_for_best_model=metric, greater_is_better=True).greater_is_better


@pytest.mark.parametrize("use_cpu", [True, False])
@pytest.mark.parametrize("end", ["", "_full_eval"])
def test_bf16_together_with_fp16_is_refused_for_what_it_is_on_every_machine(end, use_cpu):
    with pytest.raises(ArgumentError, match=f"bf16{end}=True with fp16{end}=True: a run computes in one precision"):
        FastTrainingArguments(output_dir="o", use_cpu=use_cpu, **{f"bf16{end}": True, f"fp16{end}": True})


@pytest.mark.parametrize("field", ["speedups", "without"])
def test_an_unknown_speedup_is_refused_and_the_known_ones_named(field):
    with pytest.raises(ArgumentError, match=f"{field}=.turbo.: allowed are all, .*embedding_cache"):
        FastTrainingArguments(output_dir="o", **{field: ["turbo"]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nan_policy", "Stop"),
        ("disk_policy", "Degrade"),
        ("lr_scaling", "log"),
        ("attention", "flash"),
        ("optim_ext", "lion"),
        ("hub_strategy", "sometimes"),
        ("report_to", "bogus"),
    ],
)
def test_a_word_that_the_command_line_refuses_is_refused_from_python_too(name, value):
    with pytest.raises(ArgumentError, match=f"{name}='?{value}'?: allowed are "):
        FastTrainingArguments(output_dir="o", **{name: value})


@pytest.mark.parametrize("name", ["nan_policy", "disk_policy", "lr_scaling", "attention"])
def test_none_is_refused_where_the_type_has_no_none(name):
    with pytest.raises(ArgumentError, match=f"{name}=None: allowed are "):
        FastTrainingArguments(output_dir="o", **{name: None})


def test_none_and_words_beside_a_choice_are_taken_where_the_type_or_the_default_has_them():
    @dataclass
    class Theirs(FastTrainingArguments):
        flavour: Literal["a", "b"] = None  # as libraries write it
        parts: list[Literal["a", "b"]] | None = None
        place: str | Literal[False] | None = None

    args = Theirs(output_dir="o", optim_ext=None, nccl_preset=None, parts=["a"], place="here")
    assert (args.optim_ext, args.flavour, args.parts, args.place) == (None, None, ["a"], "here")
    with pytest.raises(ArgumentError, match="flavour='c': allowed are a, b"):
        Theirs(output_dir="o", flavour="c")


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("learning_rate", -1, "finite and not negative"),
        ("learning_rate", NAN, "finite and not negative"),
        ("weight_decay", INF, "finite and not negative"),
        ("seed", -1, "from 0 to 4294967295"),
        ("data_seed", 2**32, "from 0 to 4294967295"),
        ("num_train_epochs", NAN, "a finite number"),
        ("num_train_epochs", INF, "a finite number"),
        ("adam_beta1", 2, "at least 0 and below 1"),
        ("adam_beta2", 1.0, "at least 0 and below 1"),
        ("max_grad_norm", NAN, "a number; 0 and less clip nothing"),
        ("dataloader_num_workers", -1, "from 0 to 1024, a process each"),
        ("dataloader_num_workers", 100_000, "from 0 to 1024, a process each"),
        ("neftune_noise_alpha", NAN, "finite and not negative"),
        ("ddp_timeout", -1, "above 0 and finite"),
        ("logging_steps", -1, "finite and not negative"),
        ("logging_steps", NAN, "finite and not negative"),
        ("eval_steps", -1, "finite and not negative"),
        ("save_minutes", True, "float or None"),
        ("max_encoder_noise", NAN, "above 0 and finite"),
        ("encoder_learning_rate", 0, "above 0 and finite"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(name, value, rule):
    with pytest.raises(ArgumentError) as error:
        FastTrainingArguments(output_dir="o", **{name: value})
    assert str(error.value) == f"{name}={value!r}: must be {rule}."


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("optim_args", "bogus", "optim_args='bogus': write name=value"),
        ("optim_args", "a=1,b", "optim_args='a=1,b': write name=value"),
        ("lr_scheduler_kwargs", "__import__('os')", "must be a mapping"),
        ("gradient_checkpointing_kwargs", "yes", "must be a mapping"),
        ("torch_compile_backend", "bogus", "torch_compile_backend='bogus': allowed are .*inductor"),
        ("embedding_cache_dir", "", "embedding_cache_dir='': name a folder"),
    ],
)
def test_what_no_run_could_use_is_refused_before_it_starts(name, value, message):
    with pytest.raises(ArgumentError, match=message):
        FastTrainingArguments(output_dir="o", **{name: value})


def test_what_stock_trainer_has_a_use_for_stays_allowed():
    """No limit, no end by steps, never saved by steps; words of another optimizer, and scheduler settings as JSON."""
    given = {"save_total_limit": 0, "max_steps": -1, "save_steps": -1, "logging_steps": 0, "eval_steps": None}
    args = FastTrainingArguments(
        output_dir="o", **given, logging_strategy="no", optim_args="a=1, b=2", lr_scheduler_kwargs='{"num_cycles": 2}'
    )
    assert {name: getattr(args, name) for name in given} == given
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}
    for backend in ("inductor", "aot_eager", "EAGER"):
        assert FastTrainingArguments(output_dir="o", torch_compile_backend=backend).torch_compile


def test_bounds_of_gradients_that_clip_nothing_are_allowed():
    for bound in (INF, 0, -1.0):
        assert FastTrainingArguments(output_dir="o", max_grad_norm=bound).max_grad_norm == bound


def test_text_where_a_number_belongs_is_called_text():
    with pytest.raises(ArgumentError, match=r"learning_rate='1e-3': must be finite and not negative, and is text"):
        FastTrainingArguments(output_dir="o", learning_rate="1e-3")


@pytest.mark.parametrize("name", ["effective_batch_size", "cached_batch_size"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(HfExtError, match=f"{name}=0: must be at least 1"):
        FastTrainingArguments(output_dir="o", **{name: 0})


def test_explicit_fields_are_what_code_gave_or_changed():
    assert FastTrainingArguments(output_dir="o").explicit_fields == {"output_dir"}
    args = FastTrainingArguments(output_dir="o", use_cpu=True, learning_rate=1e-3)
    assert args.explicit_fields == {"output_dir", "use_cpu", "learning_rate"}  # not what use_cpu entails
    args.per_device_train_batch_size = 3
    assert args.explicit_fields == {"output_dir", "use_cpu", "learning_rate", "per_device_train_batch_size"}


def test_explicit_fields_of_a_copy_are_those_of_the_arguments_and_what_is_set_on_it():
    args = FastTrainingArguments(output_dir="o", use_cpu=True, hub_token="hf_abcdefghij")
    args.learning_rate = 1e-3
    for copied in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert copied.explicit_fields - {"hub_token"} == {"output_dir", "use_cpu", "learning_rate"}
        copied.dataloader_num_workers = 1
        assert "dataloader_num_workers" in copied.explicit_fields
    assert "dataloader_num_workers" not in args.explicit_fields


def test_explicit_fields_are_what_the_parser_recorded():
    args = FastTrainingArguments(output_dir="o", learning_rate=1e-3)
    args.mark_explicit(frozenset({"seed"}))
    assert args.explicit_fields == {"seed"}


def test_a_pickle_of_the_arguments_holds_no_token():
    secret = "hf_abcdefghij"
    args = FastTrainingArguments(output_dir="o", hub_token=secret)
    buffer = io.BytesIO()
    torch.save(args, buffer)
    assert secret.encode() not in buffer.getvalue()
    for copied in (copy.copy(args), copy.deepcopy(args)):
        assert copied.hub_token == secret  # the run itself still has it
        assert copied == args

    stock = io.BytesIO()
    torch.save(TrainingArguments(output_dir="o", hub_token=secret), stock)
    assert secret.encode() in stock.getvalue()  # what the check above would find


@pytest.mark.parametrize("home", ["/dev/null", __file__])
def test_without_a_home_embeddings_are_kept_beside_the_output_folder(tmp_path, monkeypatch, caplog, home):
    monkeypatch.setenv("HOME", home)
    output = str(tmp_path / "run")
    assert FastTrainingArguments(output_dir=output).embedding_cache_dir == f"{output}-embeddings"
    assert "embeddings are kept in" in caplog.text
    named = FastTrainingArguments(output_dir=output, embedding_cache_dir=str(tmp_path / "cache"))
    assert named.embedding_cache_dir == str(tmp_path / "cache")
