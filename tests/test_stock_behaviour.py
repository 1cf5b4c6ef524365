"""With nothing of ours asked for, what a FastTrainer leaves and shows is what Trainer leaves and shows."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_classifier import ROWS, make_args, make_model
from transformers import Trainer, TrainingArguments

from hf_ext.errors import CheckpointError
from hf_ext.trainer import FastTrainer


def run(folder: Any, resume: Any = None, model: Any = None, **given: Any) -> FastTrainer:
    args = make_args(folder, **given)
    trainer = FastTrainer(model or make_model(), args, train_dataset=ROWS, eval_dataset=ROWS)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def copied(folder: Path, step: int, to: Path) -> str:
    shutil.copytree(folder / f"checkpoint-{step}", to / f"checkpoint-{step}")
    return str(to / f"checkpoint-{step}")


def test_a_plain_run_leaves_no_files_of_ours_beside_its_checkpoints(tmp_path):
    run(tmp_path / "plain")
    assert sorted(os.listdir(tmp_path / "plain")) == ["checkpoint-2", "checkpoint-4"]
    Trainer(make_model(), make_args(tmp_path / "stock", TrainingArguments), train_dataset=ROWS).train()
    assert sorted(os.listdir(tmp_path / "stock")) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize("asked", [{"speedups": ["all"]}, {"preset": "baseline"}, {"nan_policy": "skip"}])
def test_one_that_asks_for_more_leaves_its_records(tmp_path, asked):
    run(tmp_path, **asked)
    assert {"plan.json", "throughput.json"} <= set(os.listdir(tmp_path))


def read_state(folder: Path) -> dict[str, Any]:
    """What two runs that learn the same have in common: all but rates and times in the log."""
    state = json.loads((folder / "trainer_state.json").read_text())
    for entry in state["log_history"]:
        for name in [name for name in entry if name.endswith(("_per_s", "_gib", "_share", "_runtime", "_per_second"))]:
            del entry[name]
        entry.pop("hours_left", None)
    return state


def test_two_runs_that_learn_the_same_have_the_same_state(tmp_path):
    given = {"eval_strategy": "steps", "eval_steps": 2}
    run(tmp_path / "one", **given)
    run(tmp_path / "two", copied(tmp_path / "one", 2, tmp_path / "two"), **given)
    one, two = read_state(tmp_path / "one" / "checkpoint-4"), read_state(tmp_path / "two" / "checkpoint-4")
    assert one == two
    assert set(one["stateful_callbacks"]) == {"TrainerControl"}


def test_a_resume_that_is_refused_names_the_argument_and_the_flag(tmp_path):
    run(tmp_path, max_steps=2)
    with pytest.raises(CheckpointError) as refusal:
        run(tmp_path, str(tmp_path / "checkpoint-2"))
    assert 'allow_changed=["NAME", ...]' in str(refusal.value)
    assert "--allow_changed NAME" in str(refusal.value)


def test_a_stock_checkpoint_is_named_where_true_does_not_take_it(tmp_path):
    Trainer(make_model(), make_args(tmp_path, TrainingArguments, max_steps=2), train_dataset=ROWS).train()
    with pytest.raises(CheckpointError) as refusal:
        run(tmp_path, True)
    path = str(tmp_path / "checkpoint-2")
    assert f"resume_from_checkpoint={path!r}" in str(refusal.value)
    assert run(tmp_path, path).state.global_step == 4
