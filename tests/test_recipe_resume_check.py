"""recipes/resume_check.py as users run it: it names the checkpoint that a run takes; a .pth becomes a model, or not."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import SAVED, contents, make_trainer, small_esm
from transformers import EsmForSequenceClassification, Trainer, TrainerCallback
from weight_models import different

from hf_ext.affinity.resume import main
from hf_ext.errors import ArgumentError, CheckpointError

# --- looking ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Folders `ours` and `stock`, each with checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("runs")
    make_trainer(folder / "ours").train()
    make_trainer(folder / "stock", Trainer).train()
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


# Name -> what happened to the run's folder, and the step from which a run continues.
CASES = {
    "nothing": (lambda f, r: None, 6),
    "a bit of the newest": (lambda f, r: flip(f / "checkpoint-6" / "model.safetensors"), 4),
    "all damaged": (lambda f, r: [flip(f / f"checkpoint-{n}" / "config.json") for n in SAVED], 0),
    "a newer one of stock Trainer": (lambda f, r: shutil.copytree(r / "stock/checkpoint-6", f / "checkpoint-9"), 6),
}


class BeganAt(TrainerCallback):
    step = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_it_names_the_checkpoint_that_a_run_takes_and_changes_nothing(case, runs, tmp_path, capsys):
    folder = Path(shutil.copytree(runs / "ours", tmp_path / "run"))
    happen, step = CASES[case]
    happen(folder, runs)
    before = contents(folder)
    assert main([str(folder)]) == (0 if step else 1)
    outcome = f"continues from step {step} " if step else "finds nothing to continue from"
    assert f"--resume auto {outcome}" in capsys.readouterr().out
    assert contents(folder) == before
    trainer, began = make_trainer(folder, resume="auto"), BeganAt()
    trainer.add_callback(began)
    trainer.train()
    assert began.step == step


def test_each_checkpoint_is_listed_with_what_is_wrong_with_it(runs, tmp_path, capsys):
    folder = Path(shutil.copytree(runs / "ours", tmp_path / "run"))
    flip(folder / "checkpoint-6" / "model.safetensors")
    shutil.copytree(runs / "stock" / "checkpoint-2", folder / "checkpoint-9")
    main([str(folder)])
    said = capsys.readouterr().out
    for words in ("checkpoint-4  verified", "checkpoint-6  damaged", "checkpoint-9  of stock Trainer"):
        assert words in said
    assert "checkpoint-6: model.safetensors: expected" in said
    assert main([str(folder / "checkpoint-2")]) == 0  # one alone
    assert main([str(folder / "checkpoint-6")]) == 1
    with pytest.raises(CheckpointError, match="expected a folder, found nothing"):
        main([str(tmp_path / "none")])


# --- converting ------------------------------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path, monkeypatch):
    """Makes old.pth of anything, beside a folder `config` that says what the small ESM is, without weights."""
    monkeypatch.chdir(tmp_path)
    small_esm(seed=9).save_pretrained("config")
    Path("config/model.safetensors").unlink()
    Path("config/vocab.txt").write_text("A\nC\n")
    return lambda content, **given: torch.save(content, "old.pth", **given)


def convert(*words: str, model: str = "config") -> int:
    return main(["--convert", "old.pth", "--model", model, "--output_dir", "new", *words])


def prefixed(prefix, state):
    return OrderedDict((prefix + name, tensor) for name, tensor in state.items())


FORMS = {
    "model_state_dict": lambda s: {"model_state_dict": s, "epoch": 1, "best_spearman": np.float64(0.5)},
    "the whole file": lambda s: s,
    "DDP around compiled": lambda s: {"model": prefixed("module.", prefixed("_orig_mod.", s))},
    "half precision": lambda s: {"model": {name: tensor.bfloat16() for name, tensor in s.items()}},
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_come_over_bit_for_bit_from_every_form_of_file(form, old, capsys):
    model = small_esm(seed=1)
    if form == "half precision":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    old(FORMS[form](model.state_dict()), _use_new_zipfile_serialization=form != "the whole file")
    assert convert() == 0
    assert "tensors are now the model in new, equal bit for bit; 0 dropped" in capsys.readouterr().out
    assert different(model, EsmForSequenceClassification.from_pretrained("new")) == []
    assert different(model, small_esm(seed=2)) != []  # the comparison sees other weights
    assert Path("new/vocab.txt").read_text() == "A\nC\n"


def test_renaming_and_dropping_place_entries_of_another_class(old):
    state = small_esm(seed=1).state_dict()
    moved = {name.replace("esm.", "backbone.").replace("classifier.", "regressor."): t for name, t in state.items()}
    old({**moved, "auxiliary.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"(?s)missing: esm.*not in this model: .*backbone.*--rename OLD=NEW"):
        convert()
    assert not Path("new").exists()
    convert("--rename", "backbone.=esm.", "regressor.=classifier.", "--drop", "auxiliary.")
    assert different(small_esm(seed=1), EsmForSequenceClassification.from_pretrained("new")) == []
    with pytest.raises(ArgumentError, match="not empty"):
        convert()


BIAS = "classifier.dense.bias"


def test_an_entry_that_is_missing_extra_or_of_another_kind_is_refused(old):
    for change, words in (
        ({BIAS: None}, f"missing: {BIAS}"),
        ({"extra": torch.zeros(1)}, "not in this model: extra"),
        ({BIAS: torch.zeros(3)}, rf"size mismatch for {BIAS}"),
        ({BIAS: torch.full((16,), 0.1, dtype=torch.float64)}, rf"{BIAS} \(1 in all\) would not be what the file"),
        ({BIAS: torch.full((16,), float("nan"))}, "would not be what the file holds: NaN"),
    ):
        state = {**small_esm().state_dict(), **change}
        old({name: tensor for name, tensor in state.items() if tensor is not None})
        with pytest.raises(CheckpointError, match=f"(?s){words}"):
            convert()
        assert not Path("new").exists()


class Payload:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return exec, ("open('canary', 'w').close()",)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_a_file_that_would_run_code_is_refused_and_nothing_is_run(is_zip, old):
    old({"model": small_esm().state_dict(), "args": Payload()}, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=r"nothing was run \(asks for .*exec\)\. If you made this file yourself"):
        convert()
    assert sorted(path.name for path in Path().iterdir()) == ["config", "old.pth"]
    torch.load("old.pth", weights_only=False)
    assert Path("canary").exists()  # the file is a live one


def test_a_model_of_foreign_code_is_refused(old):
    old(small_esm().state_dict())
    text = json.loads(Path("config/config.json").read_text())
    Path("config/config.json").write_text(json.dumps({**text, "architectures": ["MyModel"]}))
    with pytest.raises(ArgumentError, match="MyModel, which is none of transformers' models"):
        convert()
    with pytest.raises(ArgumentError, match=r"no config\.json"):
        convert(model=".")
