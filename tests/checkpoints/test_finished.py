"""A finished model's folder is what was saved, or is not loaded."""

import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from inside import MaskedLMArguments, build_affinity_model, build_masked_lm
from safetensors.torch import load_file, save_file

from hf_ext.checkpoints import MODEL_MANIFEST, check_model, find_model, write_model_manifest
from hf_ext.errors import ArgumentError, DataError
from hf_ext.property import AffinityArguments, AffinityPredictor, check_predictions, load_model
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

COLUMNS = ["heavy", "light", "antigen"]


@pytest.fixture(scope="module")
def saved(make_affinity, demo_rows, tmp_path_factory) -> Path:
    """What a run with frozen encoders leaves, after two steps."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    model, collator = make_affinity()
    args = FastTrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", max_steps=2, save_steps=2, disable_tqdm=True
    )
    trainer = FastTrainer(model, args, data_collator=collator, train_dataset=demo_rows)
    trainer.train()
    trainer.model.config.is_scaled = True
    trainer.save_model()
    trainer.end()
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def flip(path, place) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x40
    path.write_bytes(content)


def change(folder, name, value) -> None:
    """Puts a value into a tensor, as whoever wrote the folder and its manifest could."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    write_model_manifest(folder)


def set_config(folder, **values) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    write_model_manifest(folder)


def test_a_saved_model_says_what_it_is_and_nothing_of_records(saved):
    manifest = json.loads((saved / MODEL_MANIFEST).read_text())
    assert sorted(name for name in manifest["files"] if "/" not in name) == [
        "config.json",
        "inputs.json",
        "model.safetensors",
    ]
    assert [name for name in manifest["files"] if not name.startswith("tokenizers/")] != manifest["files"]
    assert manifest["step"] == 2
    assert manifest["files"]["model.safetensors"]["size"] == (saved / "model.safetensors").stat().st_size
    for name in ("README.md", "report.html"):
        (saved / name).write_text("written later")
    check_model(saved)


def loaders(folder, demo_encoders, args) -> dict:
    """Every way in which a recipe or a user's line loads the model in a folder."""
    affinity = AffinityArguments(
        encoders=list(demo_encoders),
        tower_inputs=["heavy,light", "antigen"],
        head_sizes=[8],
        init_head_from=str(folder),
    )
    return {
        "from_pretrained": lambda: AffinityPredictor.from_pretrained(folder, device="cpu"),
        "predict": lambda: load_model(find_model(folder)),
        "init_head_from": lambda: build_affinity_model(affinity, COLUMNS),
    }


@pytest.mark.parametrize("way", ["from_pretrained", "predict", "init_head_from"])
@pytest.mark.parametrize("name", ["model.safetensors", "inputs.json", MODEL_MANIFEST])
def test_one_flipped_bit_is_found_by_every_loader(folder, demo_encoders, way, name):
    loaders(folder, demo_encoders, None)[way]()  # and nothing where there is none
    flip(folder / name, -100)
    with pytest.raises(ArgumentError, match=f"{folder} is not what was saved: .*{name}"):
        loaders(folder, demo_encoders, None)[way]()


def test_a_folder_without_a_manifest_loads_with_one_line(folder, caplog):
    (folder / MODEL_MANIFEST).unlink()
    caplog.set_level("INFO", logger="hf_ext")
    load_model(find_model(folder))
    lines = [record.getMessage() for record in caplog.records if "hf_ext" in record.name]
    assert lines == [f"{folder} has no {MODEL_MANIFEST}: its files cannot be verified."]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(folder, value):
    name = next(name for name in load_file(folder / "model.safetensors") if name.endswith("weight"))
    change(folder, name, value)
    with pytest.raises(ArgumentError, match=rf"{name} \(1 in all\) hold NaN or infinity"):
        load_model(find_model(folder))


def test_predictions_that_are_not_finite_are_named_by_row(folder, demo_rows):
    assert check_predictions(np.array([1.0, 2.0])).tolist() == [1.0, 2.0]
    with pytest.raises(DataError, match=r"Predictions of 2 rows .* are NaN or infinite: 2, 3\. "):
        check_predictions(np.array([[0.0, 1.0], [np.nan, 1.0], [0.0, np.inf]]))
    change(folder, "head.layers.3.bias", 3e38)  # finite, but not in label units
    set_config(folder, label_mean=0.0, label_std=10.0)
    predictor = AffinityPredictor.from_pretrained(folder, device="cpu")
    rows = [{name: demo_rows[i][name] for name in COLUMNS} for i in range(3)]
    with pytest.raises(DataError, match="NaN or infinite"):
        predictor.predict(rows * 3)


@pytest.fixture
def masked(tmp_path) -> Path:
    torch.manual_seed(0)
    build_masked_lm(MaskedLMArguments(model_size="demo")).save_pretrained(tmp_path / "mlm")
    write_model_manifest(tmp_path / "mlm")
    return tmp_path / "mlm"


def load_masked(folder):
    return build_masked_lm(MaskedLMArguments(model_name_or_path=str(folder)))


def test_a_masked_language_model_is_verified_and_its_weights_are_finite(masked):
    load_masked(masked)
    name = "esm.encoder.layer.0.output.dense.weight"
    flip(masked / "model.safetensors", -1)
    with pytest.raises(ArgumentError, match=r"not what was saved: model\.safetensors: expected sha256"):
        load_masked(masked)
    flip(masked / "model.safetensors", -1)
    change(masked, name, float("nan"))
    with pytest.raises(ArgumentError, match=rf"{name} .* NaN"):
        load_masked(masked)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_every_file_follows_the_umask(umask, make_affinity, demo_rows, tmp_path):
    before = os.umask(umask)
    try:
        model, collator = make_affinity()
        args = FastTrainingArguments(
            output_dir=str(tmp_path / "run"),
            use_cpu=True,
            report_to="none",
            max_steps=1,
            save_steps=1,
            speedups=["all"],
        )
        args.embedding_cache_dir = str(tmp_path / "cache")
        trainer = FastTrainer(model, args, data_collator=collator, train_dataset=demo_rows.select(range(8)))
        trainer.train()
        trainer.save_model()
        trainer.save_state()
        trainer.end()
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "optimizer.pt", "plan.json", "config.json"}
    wrong = {path.name for path in files if stat.S_IMODE(path.stat().st_mode) != 0o666 & ~umask}
    assert wrong == set()
