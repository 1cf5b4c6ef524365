"""What a stage sets, what the user's own flags keep, and what is refused before anything is read."""

import pytest

from hf_ext.data.arguments import DataArguments
from hf_ext.errors import ArgumentError
from hf_ext.generation.arguments import GeneratorArguments
from hf_ext.generation.stages import STAGES, check_auto, describe_defaults, describe_stage, settle_stage
from hf_ext.training_args import FastTrainingArguments


def settle(tmp_path, stage, *explicit, **given):
    model_args, data_args = GeneratorArguments(), DataArguments()
    args = FastTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **given)
    return settle_stage(stage, model_args, data_args, args, explicit), model_args, data_args, args


def test_the_table_is_that_of_the_specification():
    rows = [
        (s.size, s.max_train_samples, s.max_validation_samples, s.min_affinity, s.num_train_epochs)
        for s in STAGES.values()
    ]
    assert rows == [("tiny", 1000, 100, 7.0, 10), ("small", 10000, 1000, 7.0, 20), ("full", None, None, None, 50)]
    batches = [(s.per_device_train_batch_size, s.gradient_accumulation_steps) for s in STAGES.values()]
    assert batches == [(32, 1), (64, 1), (64, 2)]


def test_a_stage_sets_what_the_user_did_not(tmp_path):
    changed, model_args, data_args, args = settle(tmp_path, 2, "num_train_epochs", num_train_epochs=3)
    assert (model_args.size, data_args.max_train_samples, args.num_train_epochs) == ("small", 10_000, 3)
    assert (args.early_stopping_patience, args.load_best_model_at_end) == (5, True)
    assert "num_train_epochs" not in changed


@pytest.mark.parametrize(
    ("stage", "given", "rates"),
    [
        (1, {}, (0.01, None)),  # an LSTM of 128
        (3, {}, (0.0025, None)),
        (1, {"architecture": "transformer"}, (0.003, None)),
        (3, {"architecture": "light"}, (0.00075, None)),
        (2, {"architecture": "esm", "antigen_encoder": "e", "encoder_training": "lora"}, (0.0015, 0.0003)),
    ],
)
def test_the_learning_rate_goes_by_architecture_and_width(tmp_path, stage, given, rates):
    args = FastTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", learning_rate=0.7)
    model_args = GeneratorArguments(**given)
    changed = settle_stage(stage, model_args, DataArguments(), args, ())
    assert (args.learning_rate, args.encoder_learning_rate) == rates
    assert changed["learning_rate"] == rates[0]
    args.learning_rate = 0.7
    settle_stage(stage, model_args, DataArguments(), args, ("learning_rate",))
    assert args.learning_rate == 0.7


def test_a_batch_of_the_users_is_kept_whole(tmp_path):
    for flag in ("per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size"):
        changed, *_, args = settle(tmp_path, 3, flag, "max_steps")
        assert not {"per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"} & set(changed)
    *_, args = settle(tmp_path, 1)  # which is to memorise, and so keeps its last model
    assert (args.load_best_model_at_end, args.early_stopping_patience) == (False, None)


def test_what_auto_does_is_said_and_what_one_stage_alone_can_have_is_refused(tmp_path):
    assert "nothing of stage 1 is carried over" in describe_stage(2, {"size": "small"}, is_alone=False)
    assert "not looked at" in describe_stage(2, {"size": "small"}, is_alone=True)
    with pytest.raises(ArgumentError, match="of one stage"):
        check_auto(settle(tmp_path, 1, resume="out/checkpoint-5")[-1])


def test_help_names_the_default_of_each_stage():
    assert describe_defaults("min_affinity") == "Left out: 7.0 in stage 1, 7.0 in stage 2, none in stage 3."


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"stage": "4"}, "stage"),
        ({"architecture": "esm"}, "needs one, such as facebook"),
        ({"antigen_encoder": "x"}, "belongs to --architecture esm"),
        ({"encoder_training": "lora"}, "only acts with --architecture esm"),
        ({"architecture": "transformer", "attend": True}, "only acts with --architecture lstm"),
        ({"heavy_column": "antigen"}, "name different columns"),
        ({"top_p": 0.0}, "above 0 and at most 1"),
        ({"num_judged": 0}, "at least 1"),
        ({"gates": {"valid": float("nan")}}, "finite"),
        ({"gates": {"correlation": 0.5}}, "stage 1 has no 'correlation'; it has token_loss, "),
        ({"gates": {"num_errors": 5}}, "has no 'num_errors'"),
        ({"gates": "valid"}, "names with numbers"),
        ({"gates": {"valid": "high"}}, "names with numbers"),
    ],
)
def test_arguments_that_cannot_be_are_refused(given, says):
    with pytest.raises(ArgumentError, match=says):
        GeneratorArguments(**given)


def test_a_threshold_counts_where_its_stage_has_the_gate():
    args = GeneratorArguments(stage="auto", gates='{"valid": 0.9, "token_loss": 0.2}')
    assert [args.gates_of(stage) for stage in (1, 2)] == [{"token_loss": 0.2, "valid": 0.9}, {"valid": 0.9}]
