"""Every argument is compared when a run is continued, or free to differ for a reason; new ones are asked about here."""

import dataclasses
import json
import math

import pytest
from tiny_masked_lm import make_trainer
from transformers import Seq2SeqTrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from hf_ext.checkpoints import compare_runs, refuse
from hf_ext.checkpoints.free_to_differ import FREE_TO_DIFFER
from hf_ext.errors import CheckpointError
from hf_ext.tasks import TASKS, find_task
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals
COMPARED = set(
    """
    per_device_train_batch_size gradient_accumulation_steps max_steps num_train_epochs max_tokens_per_batch
    optim optim_args optim_target_modules weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
    learning_rate encoder_learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
    average_tokens_across_devices label_smoothing_factor label_names neftune_noise_alpha
    bf16 fp16 tf32 load_in_8bit load_in_4bit seed data_seed parallelism_config fsdp fsdp_config deepspeed
    ddp_broadcast_buffers dataloader_drop_last dataloader_in_order remove_unused_columns train_sampling_strategy
    length_column_name metric_for_best_model greater_is_better sortish_sampler
    accelerator_config.split_batches accelerator_config.dispatch_batches accelerator_config.even_batches
    accelerator_config.use_seedable_sampler accelerator_config.gradient_accumulation_kwargs
    """.split()  # noqa: SIM905  readable as a paragraph
)


def names(*kinds) -> set[str]:
    """Of all fields, those of `accelerator_config` one by one."""
    found = {spec.name for kind in kinds for spec in dataclasses.fields(kind)}
    nested = {f"accelerator_config.{spec.name}" for spec in dataclasses.fields(AcceleratorConfig)}
    return (found - {"accelerator_config"}) | nested if "accelerator_config" in found else found


def test_every_argument_is_compared_or_free_for_a_reason():
    trained = names(FastTrainingArguments, Seq2SeqTrainingArguments)
    tasks = names(*(kind for task in TASKS for kind in find_task(task).arguments))
    assert COMPARED & FREE_TO_DIFFER.keys() == set()
    assert trained - FREE_TO_DIFFER.keys() == COMPARED  # a new one: here, or into the table
    assert tasks - FREE_TO_DIFFER.keys() == set()  # by rows, model and collator; a new one: into the table
    assert FREE_TO_DIFFER.keys() - trained - tasks == set()
    assert all(FREE_TO_DIFFER.values())


def test_a_run_describes_what_is_compared_and_nothing_else(tmp_path):
    described = make_trainer(tmp_path)._ext_parts.resumer.describe()["arguments"]
    assert described.keys() == COMPARED - {"sortish_sampler"}
    assert described["accelerator_config.split_batches"] is False


SPLITS = {"split_batches": True}


@pytest.mark.parametrize("form", [SPLITS, json.dumps(SPLITS)])
def test_other_rows_in_a_step_by_accelerators_configuration_are_refused(tmp_path, form):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    make_trainer(tmp_path, **saving).train()
    again = {**saving, "resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    line = r"\n  accelerator_config.split_batches: False in the checkpoint, True now\n.*--allow_changed NAME"
    with pytest.raises(CheckpointError, match=line):
        make_trainer(tmp_path, **again, accelerator_config=form).train()
    for innocent in (
        {"accelerator_config": {"split_batches": False, "non_blocking": True}},
        {"accelerator_config": SPLITS, "allow_changed": ["accelerator_config.split_batches"]},
    ):
        make_trainer(tmp_path, **again, **innocent).train()


@dataclasses.dataclass
class OwnArguments(FastTrainingArguments):
    margin: float = 1.0
    tracker_api_key: str = ""


def test_arguments_of_a_users_own_class_are_compared_and_no_secret_is_stored(tmp_path):
    trainer = make_trainer(tmp_path)
    given = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    trainer.args = OwnArguments(**given, tracker_api_key="canary")
    describe = trainer._ext_parts.resumer.describe
    old = describe()
    assert "canary" not in json.dumps(old)
    trainer.args = OwnArguments(**given, margin=2.0)
    assert compare_runs(old, describe()).contradictions == ["margin: 1.0 in the checkpoint, 2.0 now"]


@pytest.mark.parametrize(
    ("name", "old", "new", "lines"),
    [
        ("lr_scheduler_kwargs", {"num_cycles": 1}, {"num_cycles": 2}, [".num_cycles: 1 in the checkpoint, 2 now"]),
        ("lr_scheduler_kwargs", None, {"num_cycles": 2}, [".num_cycles: None in the checkpoint, 2 now"]),
        ("lr_scheduler_kwargs", None, {}, []),
        ("fsdp", "", [], []),
        ("margin", math.nan, float("nan"), []),
        ("margins", [1.0, math.nan], [1.0, float("nan")], []),
        ("margin", math.nan, 1.0, [": nan in the checkpoint, 1.0 now"]),
        ("data_seed", None, 0, [": None in the checkpoint, 0 now"]),
        ("fsdp_config", {"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, [".a.c: 2 in the checkpoint, None now"]),
    ],
)
def test_settings_are_compared_one_by_one_and_nothing_given_is_no_change(name, old, new, lines):
    before, now = ({"arguments": {name: value, "seed": 1}} for value in (old, new))
    assert compare_runs(before, now).contradictions == [f"{name}{line}" for line in lines]
    assert compare_runs(before, now, [name]).contradictions == []
    assert compare_runs({"arguments": {"seed": 1}}, now).contradictions == []  # of a version that did not record it


@pytest.mark.parametrize(("seed", "can_be_allowed"), [(1, False), (2, True)])
def test_a_way_to_allow_a_change_is_named_only_where_there_is_one(seed, can_be_allowed):
    before = {"arguments": {"optim": "sgd", "seed": 1}}
    changes = compare_runs(before, {"arguments": {"optim": "adamw_torch", "seed": seed}})
    with pytest.raises(CheckpointError, match="\n  optim: sgd in the checkpoint, adamw_torch now: ") as refused:
        refuse("out/checkpoint-4", changes)
    assert ("--allow_changed" in str(refused.value)) == can_be_allowed
