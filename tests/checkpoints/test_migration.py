"""Dictionaries that other scripts saved become models and checkpoints to go on from, bit for bit, or are refused."""

import argparse
import json
import os
import shutil
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from old_scripts import save_old, write_config
from safetensors.torch import load_file
from small_runs import contents, small_esm
from torch import nn
from transformers import BertForMaskedLM, EsmForSequenceClassification
from weight_models import bert, different, esm

from hf_ext.checkpoints.tools.migration import ConversionSettings, convert
from hf_ext.errors import ArgumentError, CheckpointError


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"))


def compiled(state):
    return OrderedDict((f"_orig_mod.{name}", tensor) for name, tensor in state.items())


def parallel(state):
    return OrderedDict((f"module.{name}", tensor) for name, tensor in state.items())


# Form of the file -> what is saved, and the prefixes that the report says were taken off.
FORMS = {
    "model_state_dict": (lambda s: {"model_state_dict": s, "epoch": 1}, []),
    "state_dict": (lambda s: {"state_dict": s}, []),
    "model": (lambda s: {"model": s, "best_spearman": np.float64(0.5)}, []),
    "the whole file": (lambda s: s, []),
    "a name of its own": (lambda s: {"ema_weights": s, "step": 7}, []),
    "compiled": (lambda s: {"model_state_dict": compiled(s)}, ["_orig_mod."]),
    "DDP": (lambda s: {"model_state_dict": parallel(s)}, ["module."]),
    "DDP around compiled": (lambda s: {"model_state_dict": parallel(compiled(s))}, ["_orig_mod.", "module."]),
    "compiled around DDP": (lambda s: {"model_state_dict": compiled(parallel(s))}, ["_orig_mod.", "module."]),
    "a compiled part": (
        lambda s: {"model": {name.replace("esm.", "esm._orig_mod.", 1): t for name, t in s.items()}},
        ["_orig_mod."],
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_weights_come_over_bit_for_bit_from_every_form_of_file(form, is_zip, config, tmp_path):
    make, prefixes = FORMS[form]
    model = small_esm(seed=1)
    torch.save(make(model.state_dict()), tmp_path / "old.pth", _use_new_zipfile_serialization=is_zip)
    report = convert(tmp_path / "old.pth", config, tmp_path / "new")
    assert report["prefixes_removed"] == prefixes
    assert different(model, EsmForSequenceClassification.from_pretrained(tmp_path / "new")) == []
    assert different(model, small_esm(seed=2)) != []  # the comparison sees other weights
    assert json.loads((tmp_path / "new" / "conversion.json").read_text()) == report
    assert (tmp_path / "new" / "vocab.txt").read_text() == "A\nC\n"


def test_numbers_beside_the_weights_are_kept_and_other_entries_are_named(config, tmp_path):
    more = {"batch_idx": 12, "best_spearman": np.float64(0.41), "loss": torch.tensor(0.5), "val": float("inf")}
    more |= {"history": [0.1, np.float32(0.2)], "rng": torch.zeros(3, dtype=torch.uint8), "preds": np.arange(3)}
    report = convert(save_old(tmp_path / "a.pth", small_esm(), **more), config, tmp_path / "new")
    assert report["values"] == {"epoch": 3, "batch_idx": 12, "best_spearman": 0.41, "loss": 0.5, "val": "inf"}
    assert report["not_taken"] == {"history": "list", "rng": "Tensor", "preds": "ndarray"}
    assert report["optimizer"] == {"left_out": "the file has none"}


def test_renaming_and_dropping_place_entries_of_another_class(config, tmp_path):
    class Old(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = small_esm(seed=1).esm
            self.regressor = small_esm(seed=1).classifier
            self.auxiliary = nn.Linear(2, 2)

    save_old(tmp_path / "old.pth", Old())
    with pytest.raises(CheckpointError) as error:
        convert(tmp_path / "old.pth", config, tmp_path / "new")
    for word in ("missing: ", "not in this model", "backbone.embeddings", "auxiliary.weight", "--rename", "--drop"):
        assert word in str(error.value)
    assert not (tmp_path / "new").exists()
    names = ConversionSettings([("backbone.", "esm."), ("regressor.", "classifier.")], ["auxiliary."])
    report = convert(tmp_path / "old.pth", config, tmp_path / "new", names)
    assert report["left_out"] == ["auxiliary.weight", "auxiliary.bias"]
    assert report["taken"]["classifier.dense.bias"] == "regressor.dense.bias"
    assert different(small_esm(seed=1), EsmForSequenceClassification.from_pretrained(tmp_path / "new")) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (ConversionSettings([("absent.", "esm.")]), "--rename absent.=esm.: no name fits"),
        (ConversionSettings(drop=["absent."]), "--drop absent.: no name fits"),
        (ConversionSettings([("classifier.dense.", "classifier.out_proj.")]), "several entries would become one"),
        (ConversionSettings(weights_key="absent"), "Entries with weights: ['model_state_dict']"),
    ],
)
def test_a_mapping_that_fits_nothing_is_refused(settings, words, config, tmp_path):
    save_old(tmp_path / "old.pth", small_esm())
    with pytest.raises((ArgumentError, CheckpointError)) as error:
        convert(tmp_path / "old.pth", config, tmp_path / "new", settings)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("classifier.dense.bias"), "missing: classifier.dense.bias"),
        (lambda s: s.update(extra=torch.zeros(1)), "extra"),
        (lambda s: s.update({"classifier.dense.bias": torch.zeros(3)}), "float32[3], here float32[16]"),
        (lambda s: s.update({"classifier.dense.bias": torch.zeros(16).double()}), "float64[16], here float32[16]"),
    ],
)
def test_an_entry_that_is_missing_extra_or_of_another_kind_is_refused(change, words, config, tmp_path):
    state = small_esm().state_dict()
    change(state)
    torch.save(state, tmp_path / "old.pth")
    with pytest.raises(CheckpointError) as error:
        convert(tmp_path / "old.pth", config, tmp_path / "new")
    assert words in str(error.value)


def test_half_precision_is_widened_exactly_and_what_the_model_computes_is_left_to_it(config, tmp_path):
    state = {
        name: tensor.bfloat16() for name, tensor in small_esm(seed=1).state_dict().items() if "inv_freq" not in name
    }
    torch.save({**state, "esm.embeddings.position_ids": torch.arange(8)}, tmp_path / "old.pth")
    report = convert(tmp_path / "old.pth", config, tmp_path / "new")
    saved = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(saved[name].bfloat16(), tensor) for name, tensor in state.items())
    assert report["widened"]["classifier.dense.bias"] == "bfloat16"
    assert report["computed_by_the_model"] == ["esm.embeddings.position_ids", "esm.rotary_embeddings.inv_freq"]


def test_tied_weights_come_over(tmp_path):
    bert(seed=9).save_pretrained(tmp_path / "config")
    save_old(tmp_path / "old.pth", bert(seed=1))
    convert(tmp_path / "old.pth", tmp_path / "config", tmp_path / "new")
    loaded = BertForMaskedLM.from_pretrained(tmp_path / "new")
    assert different(bert(seed=1), loaded) == []
    assert loaded.cls.predictions.decoder.weight is loaded.bert.embeddings.word_embeddings.weight


# --- files that are refused -------------------------------------------------------------------------------------------


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return exec, (f"open({str(self.canary)!r}, 'w').close()",)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("place", ["model_state_dict", "optimizer_state_dict", "best_spearman", "weights"])
def test_a_file_that_would_run_code_is_refused_and_nothing_is_run(place, is_zip, config, tmp_path):
    content = {"model_state_dict": small_esm().state_dict(), "weights": {}, place: Payload(tmp_path / "canary")}
    torch.save(content, tmp_path / "old.pth", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=r"nothing was run \(asks for exec\)\. If you made this file yourself"):
        convert(tmp_path / "old.pth", config, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.pth"]
    torch.load(tmp_path / "old.pth", weights_only=False)
    assert (tmp_path / "canary").exists()  # the file is a live one


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:2000])


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda p: torch.save({"fn": os.mkdir}, p), "asks for posix.mkdir"),  # torch's text advises weights_only=False
        (lambda p: torch.save({"model": small_esm()}, p), "asks for transformers."),
        (lambda p: torch.save({"args": argparse.Namespace(lr=1)}, p), "asks for argparse.Namespace"),
        (lambda p: torch.save({"epoch": 1, "best": 0.5}, p), "no entry is a dictionary of names and tensors"),
        (lambda p: torch.save({"a": {"x": torch.ones(1)}, "b": {"x": torch.ones(1)}}, p), "--weights_key"),
        (lambda p: torch.save([torch.ones(1)], p), "holds a list"),
        (lambda p: p.write_text("not a checkpoint"), "damaged"),
        (lambda p: p.write_bytes(b""), "damaged"),
        (lambda p: [save_old(p, small_esm()), cut_off(p)], "damaged"),
        (lambda p: p.mkdir(), "found a folder"),
        (lambda p: None, "found nothing"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(write, words, config, tmp_path):
    write(tmp_path / "old.pth")
    with pytest.raises(CheckpointError) as error:
        convert(tmp_path / "old.pth", config, tmp_path / "new")
    assert words in str(error.value)
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten_and_a_model_of_foreign_code_is_refused(config, tmp_path):
    save_old(tmp_path / "old.pth", esm())
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine").write_text("")
    before = contents(tmp_path)
    with pytest.raises(ArgumentError, match="not empty"):
        convert(tmp_path / "old.pth", config, tmp_path / "new")
    assert contents(tmp_path) == before
    with pytest.raises(ArgumentError, match=r"no config\.json"):
        convert(tmp_path / "old.pth", tmp_path, tmp_path / "other")
    foreign = Path(shutil.copytree(config, tmp_path / "foreign"))
    text = json.loads((config / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps({**text, "architectures": ["MyModel"]}))
    with pytest.raises(ArgumentError, match="MyModel, which is none of transformers' models"):
        convert(tmp_path / "old.pth", foreign, tmp_path / "other")
