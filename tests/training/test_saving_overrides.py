"""What is saved: the files of users and other libraries, whole models, and nothing of ours that nobody asked for."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import Manifest
from run_outcomes import same_weights
from safetensors.torch import load_file, save_file
from tiny_classifier import ROWS, make_args, make_model
from transformers import EsmForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from hf_ext.checkpoints import verify
from hf_ext.errors import CheckpointError, DiskFailure
from hf_ext.trainer import FastTrainer


def train(cls, folder, resume=None, callbacks=None, **given) -> Any:
    trainer = cls(make_model(), make_args(folder, **given), train_dataset=ROWS, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def listed(checkpoint) -> set[str]:
    return set(Manifest.read(checkpoint).files)


def goes_on_exactly(cls, folder, **given) -> bool:
    """Whether a run resumed at step 2 ends with the weights of the whole run."""
    whole = train(cls, folder / "whole", **given)
    shutil.copytree(folder / "whole" / "checkpoint-2", folder / "resumed" / "checkpoint-2")
    return same_weights(
        train(cls, folder / "resumed", str(folder / "resumed" / "checkpoint-2"), **given).model, whole.model
    )


class Adds:
    """Overrides of the three methods, each calling the next and adding a file."""

    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        Path(output_dir or self.args.output_dir, "of_save_model.txt").write_text("a")

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        Path(output_dir or self.args.output_dir, "of_save.txt").write_text("b")

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}", "of_checkpoint.txt").write_text("c")


class Added(Adds, FastTrainer):
    pass


ADDED = {"of_save_model.txt", "of_save.txt", "of_checkpoint.txt"}


def test_files_that_overrides_add_are_in_the_checkpoint_and_hashed(tmp_path):
    train(Added, tmp_path / "ours")
    stock = type("Stock", (Adds, Trainer), {})
    stock(make_model(), make_args(tmp_path / "stock", TrainingArguments), train_dataset=ROWS).train()
    for step in (2, 4):
        assert set(os.listdir(tmp_path / "stock" / f"checkpoint-{step}")) >= ADDED  # what stock Trainer does
        checkpoint = tmp_path / "ours" / f"checkpoint-{step}"
        assert listed(checkpoint) >= ADDED
        assert verify(checkpoint, step)[1] == []
        (checkpoint / "of_save.txt").write_text("x")
        assert "of_save.txt" in verify(checkpoint, step)[1][0]


class OnSave(TrainerCallback):
    """Writes into the checkpoint, in a folder of its own too; keeps what it saw."""

    def __init__(self):
        self.seen = []

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.seen.append(sorted(path.name for path in Path(args.output_dir).glob("checkpoint-*")))
        (folder / "extra").mkdir()
        (folder / "extra" / "notes.json").write_text("{}")
        state.save_to_json(str(folder / "trainer_state.json"))  # over ours


def test_files_that_a_callback_writes_on_save_are_part_of_the_checkpoint(tmp_path):
    callback = OnSave()
    train(FastTrainer, tmp_path, callbacks=[callback], save_total_limit=1)
    assert callback.seen == [["checkpoint-2"], ["checkpoint-4"]]
    assert "extra/notes.json" in listed(tmp_path / "checkpoint-4")
    assert verify(tmp_path / "checkpoint-4", 4)[1] == []
    assert not (tmp_path / "checkpoint-2").exists()


def test_the_mirror_holds_what_overrides_and_callbacks_wrote(tmp_path):
    class Local(Added):
        def _save_checkpoint(self, model, trial):
            FastTrainer._save_checkpoint(self, model, trial)
            (self.checkpoints.path(self.state.global_step) / "of_checkpoint.txt").write_text("c")

    train(Local, tmp_path / "out", local_checkpoint_dir=str(tmp_path / "local"))
    (local,) = (tmp_path / "local").iterdir()
    for step in (2, 4):
        copy = tmp_path / "out" / f"checkpoint-{step}"
        if step == 4 or copy.exists():  # of those that wait, the newest is copied
            assert Manifest.read(copy) == Manifest.read(local / f"checkpoint-{step}")
            assert set(os.listdir(copy)) >= ADDED
            assert verify(copy, step)[1] == []


class SavesItself(FastTrainer):
    """As sentence_transformers' trainer: writes the model in its own layout, and reads it so."""

    def _save(self, output_dir=None, state_dict=None):
        os.makedirs(output_dir, exist_ok=True)
        save_file({name: t.clone() for name, t in self.model.state_dict().items()}, f"{output_dir}/model.safetensors")
        Path(output_dir, "modules.json").write_text(json.dumps([{"idx": 0}]))
        torch.save(self.args, f"{output_dir}/training_args.bin")

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        self.model.load_state_dict(load_file(f"{resume_from_checkpoint}/model.safetensors"))


def test_a_class_that_saves_and_loads_by_itself_does_so_in_checkpoints(tmp_path):
    assert goes_on_exactly(SavesItself, tmp_path)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert listed(checkpoint) >= {"modules.json", "model.safetensors", "training_args.bin", "optimizer.pt"}


class SavesEncoderOnly(FastTrainer):
    """Keeps in a checkpoint what others are to load, from which training could not go on."""

    def _save(self, output_dir=None, state_dict=None):
        if self.args.should_save:
            self.model.esm.save_pretrained(output_dir)


def test_a_class_that_saves_other_weights_is_refused_where_training_would_go_on_without(tmp_path):
    train(SavesEncoderOnly, tmp_path, max_steps=2)
    with pytest.raises(CheckpointError, match=r"does not fit this model(?s:.*)missing: esm"):
        train(SavesEncoderOnly, tmp_path, str(tmp_path / "checkpoint-2"), max_steps=4, allow_changed=["max_steps"])


class NotesWhatItLoads(FastTrainer):
    """Has a loader of its own that leaves the loading to the next class."""

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        self.loaded = [*getattr(self, "loaded", []), Path(resume_from_checkpoint).name]
        super()._load_from_checkpoint(resume_from_checkpoint, model)


def test_the_best_model_of_a_run_that_was_continued_is_not_the_one_it_continued_from(tmp_path):
    given = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "load_best_model_at_end": True}
    given |= {"save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1}
    first = NotesWhatItLoads(
        make_model(), make_args(tmp_path, max_steps=2, **given), train_dataset=ROWS, eval_dataset=ROWS
    )
    first.train()
    args = make_args(tmp_path, max_steps=8, allow_changed=["max_steps"], **given)
    trainer = NotesWhatItLoads(make_model(), args, train_dataset=ROWS, eval_dataset=ROWS)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    best = trainer.state.best_global_step
    assert best > 2
    assert trainer.loaded == ["checkpoint-2", f"checkpoint-{best}"]
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.evaluate()["eval_loss"] == min(losses)


TOKEN = "hf_" + "secret" * 5


class Tokenizer:
    """Whose files the disk refuses."""

    def __init__(self, number=None):
        self.number = number

    def save_pretrained(self, folder):
        (folder / "vocab.txt").write_text("A")
        if self.number:
            raise OSError(self.number, "refused")


def make_exporter(folder, number=None):
    args = make_args(folder, save_strategy="no", hub_token=TOKEN)
    return FastTrainer(make_model(), args, train_dataset=ROWS, processing_class=Tokenizer(number))


def test_whole_files_replace_those_of_before_without_pickle_and_token_and_say_whose_they_are(tmp_path):
    (tmp_path / ".staging-model").mkdir()
    (tmp_path / ".staging-model" / "half.safetensors").write_text("half")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "config.json").write_text("old")
    trainer = make_exporter(tmp_path)
    trainer.train()
    trainer.save_model()
    files = {"config.json", "model.safetensors", "vocab.txt", "training_args.json", "model_manifest.json"}
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {*files, "notes.txt"}
    assert not (tmp_path / ".staging-model").exists()
    again = EsmForSequenceClassification.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), trainer.model.parameters(), strict=True))
    text = (tmp_path / "training_args.json").read_text()
    assert (json.loads(text)["learning_rate"], TOKEN in text) == (1e-2, False)
    assert '"step": 4' in (tmp_path / "model_manifest.json").read_text()


def test_a_full_disk_is_named_and_another_error_is_not_and_no_half_model_is_left(tmp_path):
    with pytest.raises(DiskFailure, match=r"not complete\. Checkpoints are untouched"):
        make_exporter(tmp_path / "full", errno.ENOSPC).save_model()
    with pytest.raises(OSError, match="refused"):
        make_exporter(tmp_path / "other", errno.EINTR).save_model()
    assert [*tmp_path.glob("*/*")] == []


def run(folder, resume=None, model=None, **given) -> FastTrainer:
    args = make_args(folder, **given)
    trainer = FastTrainer(model or make_model(), args, train_dataset=ROWS, eval_dataset=ROWS)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_a_plain_run_leaves_no_files_of_ours_beside_its_checkpoints(tmp_path):
    run(tmp_path / "plain")
    assert sorted(os.listdir(tmp_path / "plain")) == ["checkpoint-2", "checkpoint-4"]
    Trainer(make_model(), make_args(tmp_path / "stock", TrainingArguments), train_dataset=ROWS).train()
    assert sorted(os.listdir(tmp_path / "stock")) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize("asked", [{"speedups": ["all"]}, {"preset": "baseline"}, {"max_hours": 9}])
def test_one_that_asks_for_more_leaves_its_records(tmp_path, asked):
    run(tmp_path, **asked)
    assert {"plan.json", "throughput.json"} <= set(os.listdir(tmp_path))


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
