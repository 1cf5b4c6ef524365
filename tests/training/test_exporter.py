"""`Exporter` without a Trainer: what a saved folder holds, and what is said when the disk refuses."""

import errno
import json

import pytest
import torch
from tiny_classifier import make_args, make_model
from transformers import EsmForSequenceClassification, TrainerState

from hf_ext.errors import ArgumentError, DiskFailure
from hf_ext.models.lora import LoraSettings, wrap_with_lora
from hf_ext.training.exporter import EXPORT_STAGING, Exporter, save_pretrained

TOKEN = "hf_" + "secret" * 5


@pytest.fixture
def exporter(tmp_path):
    return Exporter(make_args(tmp_path / "run", hub_token=TOKEN))


def test_whole_files_replace_those_of_before_and_remains_go(tmp_path):
    (tmp_path / EXPORT_STAGING).mkdir()
    (tmp_path / EXPORT_STAGING / "half.safetensors").write_text("half")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "config.json").write_text("old")
    model = make_model()
    save_pretrained(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", "notes.txt"}
    again = EsmForSequenceClassification.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_arguments_go_without_the_token_and_without_pickle(exporter, tmp_path):
    class Collator:
        tokenizer = None

        def save_pretrained(self, folder):
            (folder / "inputs.json").write_text("{}")

    exporter.save_companions(tmp_path, None, Collator())
    text = (tmp_path / "training_args.json").read_text()
    assert TOKEN not in text
    assert json.loads(text)["learning_rate"] == 1e-2
    assert (tmp_path / "inputs.json").is_file()


def test_an_export_says_whose_it_is_once_it_is_whole(exporter, tmp_path):
    model, state = make_model(), TrainerState()
    state.global_step = 7
    with exporter.exporting(model, tmp_path, state):
        save_pretrained(model, tmp_path)
        assert not (tmp_path / "model_manifest.json").exists()
    assert '"step": 7' in (tmp_path / "model_manifest.json").read_text()


def test_a_full_disk_is_named_and_another_error_is_not(exporter, tmp_path):
    with (
        pytest.raises(DiskFailure, match=r"not complete\. Checkpoints are untouched"),
        exporter.naming_failures(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="interrupted"), exporter.naming_failures(tmp_path):
        raise OSError(errno.EINTR, "interrupted")


def test_merged_weights_predict_the_same_and_the_model_keeps_its_adapters(exporter, tmp_path):
    torch.manual_seed(0)
    model = wrap_with_lora(make_model(), LoraSettings(r=2)).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    exporter.save_merged(model, tmp_path / "merged", TrainerState(), None, None)
    merged = EsmForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    ids = torch.tensor([[0, 5, 6, 7, 2]])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=1e-5, rtol=0)
    assert any("lora_B" in name for name, _ in model.named_parameters())
    assert {path.name for path in tmp_path.iterdir()} == {"merged"}


def test_weights_that_are_spread_over_processes_are_not_merged(tmp_path):
    with pytest.raises(ArgumentError, match="sharded over processes"):
        Exporter(make_args(tmp_path), is_spread=True).save_merged(
            make_model(), tmp_path / "m", TrainerState(), None, None
        )
    assert not (tmp_path / "m").exists()
