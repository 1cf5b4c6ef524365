"""What a saved model folder holds, and what is said when the disk refuses."""

import errno
import json

import pytest
import torch
from tiny_classifier import ROWS, make_args, make_model
from transformers import EsmForSequenceClassification

from hf_ext.errors import ArgumentError, DiskFailure
from hf_ext.trainer import FastTrainer

TOKEN = "hf_" + "secret" * 5


class Tokenizer:
    """Whose files the disk refuses."""

    def __init__(self, number=None):
        self.number = number

    def save_pretrained(self, folder):
        (folder / "vocab.txt").write_text("A")
        if self.number:
            raise OSError(self.number, "refused")


def make_trainer(folder, number=None):
    args = make_args(folder, save_strategy="no", hub_token=TOKEN)
    return FastTrainer(make_model(), args, train_dataset=ROWS, processing_class=Tokenizer(number))


def test_whole_files_replace_those_of_before_without_pickle_and_token_and_say_whose_they_are(tmp_path):
    (tmp_path / ".staging-model").mkdir()
    (tmp_path / ".staging-model" / "half.safetensors").write_text("half")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "config.json").write_text("old")
    trainer = make_trainer(tmp_path)
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
        make_trainer(tmp_path / "full", errno.ENOSPC).save_model()
    with pytest.raises(OSError, match="refused"):
        make_trainer(tmp_path / "other", errno.EINTR).save_model()
    assert [*tmp_path.glob("*/*")] == []


def test_weights_that_are_spread_over_processes_are_not_merged(tmp_path):
    trainer = make_trainer(tmp_path / "run")
    trainer.is_fsdp_enabled = True
    with pytest.raises(ArgumentError, match="sharded over processes"):
        trainer.save_merged(tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
