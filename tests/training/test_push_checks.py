"""`check_download` without a Trainer: what is known of a folder that came back."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from tiny_classifier import ROWS, make_args, make_model
from transformers import default_data_collator

from hf_ext.hub import HubError
from hf_ext.training.push_check import TrainedInputs, check_download


def inputs_of(*datasets):
    return TrainedInputs(None, default_data_collator, datasets, lambda collator, rows: collator(rows))


def check(folder, model, inputs, is_spread=False):
    return check_download(folder, make_args(folder / "run"), model, Accelerator(cpu=True), inputs, is_spread)


def test_rows_come_from_the_first_dataset_that_has_some():
    assert inputs_of(None, {"a": [], "b": ROWS[3:]}, ROWS).rows() == ROWS[3:]
    assert inputs_of(iter(range(99))).rows() == list(range(16))
    assert inputs_of(None).rows() == []


def test_the_same_weights_predict_the_same_and_others_do_not(tmp_path):
    model = make_model().eval()
    model.save_pretrained(tmp_path)
    assert "predictions for 16 rows are the same bit for bit" in check(tmp_path, model, inputs_of(ROWS))
    with torch.no_grad():
        model.classifier.out_proj.weight += 1.0
    with pytest.raises(HubError):
        check(tmp_path, model, inputs_of(ROWS))


def test_what_cannot_be_compared_is_said(tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    assert "no rows" in check(tmp_path, model, inputs_of())
    assert "spread over processes" in check(tmp_path, model, inputs_of(ROWS), is_spread=True)
    assert "SimpleNamespace does not load" in check(tmp_path, SimpleNamespace(), inputs_of(ROWS))
