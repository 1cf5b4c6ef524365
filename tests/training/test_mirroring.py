"""Training with `local_checkpoint_dir`: the output folder ends up whole, and is enough to continue from."""

import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from miniature_esm import make_esm
from run_outcomes import losses
from safetensors.torch import load_file
from transformers import EsmForSequenceClassification

from hf_ext.checkpoints.manifest import Manifest, check_files
from hf_ext.errors import CheckpointError
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments


@pytest.fixture
def make_trainer(tmp_path: Path):
    """A tiny classifier of 16 rows; 8 steps, saved every second one, the best by the loss on the same rows."""

    def make(output: str = "drive", local: str | None = "local", **given):
        model = make_esm(EsmForSequenceClassification)
        ids = torch.randint(4, 24, (16, 9)).tolist()
        rows = Dataset.from_dict({"input_ids": ids, "labels": [i % 2 for i in range(16)]})
        args = FastTrainingArguments(
            **{
                "output_dir": str(tmp_path / output),
                "local_checkpoint_dir": local and str(tmp_path / local),
                "per_device_train_batch_size": 2,
                "max_steps": 8,
                "save_steps": 2,
                "save_total_limit": 1,
                "eval_strategy": "steps",
                "eval_steps": 2,
                "load_best_model_at_end": True,
                "logging_steps": 1,
                "resume": "auto",
                "report_to": "none",
                "disable_tqdm": True,
                "use_cpu": True,
                **given,
            }
        )
        return FastTrainer(model, args, train_dataset=rows, eval_dataset=rows)

    return make


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*checkpoint-*"))


def test_the_output_folder_gets_what_the_local_one_keeps_and_verifies(make_trainer, tmp_path):
    trainer = make_trainer()
    trainer.train()
    (local,) = (tmp_path / "local").iterdir()
    assert "checkpoint-8" in checkpoints(local)
    assert checkpoints(local) == checkpoints(tmp_path / "drive")
    for name in checkpoints(tmp_path / "drive"):
        folder = tmp_path / "drive" / name
        assert check_files(folder, Manifest.read(folder)) == []


def test_a_run_on_a_new_machine_is_the_uninterrupted_one(make_trainer, tmp_path):
    whole = make_trainer("whole", local=None, load_best_model_at_end=False, eval_strategy="no")
    whole.train()
    given = {"load_best_model_at_end": False, "eval_strategy": "no", "save_total_limit": None}
    first = make_trainer(**given)
    first.train()
    shutil.rmtree(tmp_path / "local")
    shutil.rmtree(tmp_path / "drive" / "checkpoint-8")
    newest = max((tmp_path / "drive").glob("checkpoint-*"))  # a slow copy leaves out one that a newer follows
    resumed = make_trainer(**given)
    resumed.train()
    assert resumed._ext_resumer.resumed.stored.path == newest
    assert losses(resumed) == losses(whole)
    ours, theirs = (load_file(tmp_path / run / "checkpoint-8" / "model.safetensors") for run in ("drive", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_best_checkpoint_is_found_where_only_the_output_folder_has_it(make_trainer, tmp_path):
    first = make_trainer(learning_rate=1e-9, max_steps=8)  # the best is the one of step 2 or any later, by chance
    first.train()
    best = first.state.best_global_step
    shutil.rmtree(tmp_path / "local")
    resumed = make_trainer(learning_rate=1e-9, max_steps=8)
    resumed.train()
    assert resumed.state.best_model_checkpoint == str(tmp_path / "drive" / f"checkpoint-{best}")


def test_a_local_folder_inside_the_output_folder_is_refused(make_trainer):
    with pytest.raises(CheckpointError, match="outside"):
        make_trainer(local="drive/local")
