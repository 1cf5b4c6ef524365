"""A few lines predict what the Trainer predicted, from a folder or the Hub, and refuse what they cannot read."""

import csv
import importlib
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from hub_server import HubServer, serve_hub

import hf_ext
from hf_ext.arguments import PredictingArguments
from hf_ext.checkpoints import MODEL_MANIFEST, find_model, write_model_manifest
from hf_ext.errors import ArgumentError, DataError
from hf_ext.hub import push_folder
from hf_ext.property import AffinityPredictor, load_model, predicting, training_arguments
from hf_ext.property import predictor as predictor_module
from hf_ext.speedups import set_attention
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_" + "canary" * 5 + "bird"
COLUMNS = ["heavy", "light", "antigen"]


def shift(model: Any) -> None:
    """Adapters do nothing at the beginning, and would not be missed."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))


@pytest.fixture(scope="module")
def save(make_affinity: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """Writes a model folder; returns it with model and collator."""

    def write(**settings: Any) -> tuple[Path, Any, Any]:
        model, collator = make_affinity(**settings)
        shift(model)
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        collator.save_pretrained(folder)
        return folder, model, collator

    return write


@pytest.fixture(scope="module")
def frozen(save: Callable) -> tuple[Path, Any, Any]:
    return save()


@pytest.fixture(scope="module")
def predictor(frozen: Any) -> AffinityPredictor:
    return AffinityPredictor.from_pretrained(frozen[0], device="cpu")


def assert_same(predictor: AffinityPredictor, rows: Any, expected: np.ndarray) -> None:
    found = predictor.predict(rows)
    assert (found.dtype, found.shape) == (np.float32, expected.shape)
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", [{}, {"antibody": "lora", "antigen": "full"}, {"save_full": True}])
def test_the_predictor_equals_trainer_predict(
    save: Callable, demo_rows: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder, model, collator = save(**settings)
    rows = demo_rows.shuffle(seed=1).select(range(60))  # neither sorted by length nor by sequence
    args = FastTrainingArguments(output_dir=str(tmp_path), report_to="none", preset="baseline", use_cpu=True)
    expected = FastTrainer(model, args, data_collator=collator).predict(rows).predictions
    predictor = AffinityPredictor.from_pretrained(folder, device="cpu")
    assert_same(predictor, rows, expected)
    with pytest.raises(AssertionError):
        assert_same(predictor, rows.select(range(59, -1, -1)), expected)


def test_under_half_precision_it_rounds_as_the_command_does(save: Callable, demo_rows: Any, tmp_path: Path) -> None:
    folder, _, collator = save()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "encoder_autocast": "bfloat16"}))
    args = training_arguments(PredictingArguments(use_cpu=True, embedding_cache_dir=str(tmp_path)))
    rows = demo_rows.select(range(60))
    with predicting(load_model(folder), collator, args) as trainer:
        expected = trainer.predict(rows).predictions
    predictor = AffinityPredictor.from_pretrained(folder, device="cpu")

    def off() -> float:
        return float(np.abs(predictor.predict(rows) - expected).max() / expected.std())

    assert off() < 1e-4
    predictor.model.transform_encoders(partial(set_attention, kernel="sdpa"))  # the broken twin
    assert off() > 1e-3


def test_batches_make_no_difference(
    predictor: AffinityPredictor, demo_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{**demo_rows[i], "antigen": demo_rows[i]["antigen"][: 20 + i % 40]} for i in range(60)]
    expected = predictor.predict(rows)
    monkeypatch.setattr("hf_ext.baselines.embedded.TOKENS_PER_BATCH", 1)
    monkeypatch.setattr(predictor_module, "ROWS_PER_BATCH", 7)
    assert_same(predictor, rows, expected)
    assert len(np.unique(expected)) > 50


def test_every_kind_of_table_gives_the_same_numbers(predictor: AffinityPredictor, demo_rows: Any) -> None:
    table = demo_rows.select(range(5))
    rows = [table[i] for i in range(5)]
    expected = predictor.predict(table)
    kinds = (rows, tuple(rows), table.to_pandas(), table.to_dict(), {name: table[name] for name in COLUMNS})
    assert [np.array_equal(predictor.predict(kind), expected) for kind in kinds] == [True] * 5
    small = [{name: f" {row[name].lower()}\n" for name in COLUMNS} for row in rows]
    assert np.array_equal(predictor.predict(small), expected)


def test_no_rows_give_no_numbers(predictor: AffinityPredictor) -> None:
    assert predictor.predict([]).shape == (0,)
    assert predictor.columns == COLUMNS


GOOD = {"heavy": "EVQL", "light": "DIQM", "antigen": "MKTA"}


def test_what_cannot_be_read_is_refused_with_its_row(predictor: AffinityPredictor) -> None:
    for rows, message in (
        (
            [{**GOOD, "light": ""}],
            r"row 1, column 'light', value '': the sequence is missing\. .* --missing_chains of training\.\nFix or",
        ),
        ([GOOD, {**GOOD, "heavy": "EV1L"}], r"row 2, column 'heavy', value 'EV1L': digit '1' at position 3 of 4"),
        ([GOOD, GOOD, {**GOOD, "antigen": None}], r"row 3, column 'antigen', value '': the sequence is missing"),
        ([GOOD, {"heavy": "EVQL", "light": "DIQM"}], r"row 2, column 'antigen', value '.*': the sequence is missing"),
        ([{**GOOD, "heavy": "EV-L"}], r"Take gaps out.*\.\nFix or remove these rows\. Options that begin with -- "),
        ({"heavy": ["EVQL"], "light": ["DIQM"]}, r"no column 'antigen': the model reads \['heavy', .*there are"),
        ({**GOOD}, r"rows cannot be read as a table \(If using all scalar values.*: give a list of dicts"),
        ({"heavy": ["E"], "light": ["D", "D"], "antigen": ["M"]}, r"must be of the same length\): give a list"),
        ("EVQL", r"give a list of dicts, .* with heavy, light, antigen"),
    ):
        with pytest.raises(DataError, match=message):
            predictor.predict(rows)


def test_a_long_sequence_is_cut_or_refused_where_that_is_said(frozen: Any) -> None:
    predictor = AffinityPredictor.from_pretrained(frozen[0], device="cpu")
    cut, long = predictor.predict([{**GOOD, "heavy": "EV" * 255}, {**GOOD, "heavy": "EV" * 300}])
    assert cut == long
    predictor.collator.too_long = "error"
    with pytest.raises(DataError, match=r"'heavy' has 511 residues; this model reads 510.*\n.*row 2 of rows"):
        predictor.predict([GOOD, {**GOOD, "heavy": "E" * 511}])


def test_a_model_that_is_not_there_is_named_with_the_remedy(
    frozen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, revision, message in (
        ("no/such/folder", None, "Repo id must be in the form"),
        ("me/unheard-of", None, "Check the name .OWNER/NAME., the revision and the network"),
        (".", None, r"Model \.: no inputs.json there. Give the output folder of a finished `hf-ext train`"),
        (frozen[0], "v1", r"revision='v1': .* is a folder here"),
    ):
        with pytest.raises(ArgumentError, match=message):
            AffinityPredictor.from_pretrained(name, revision=revision)


@pytest.mark.parametrize("weights", [None, b"half a file"])
def test_weights_that_are_lost_or_damaged_are_an_error_of_ours(frozen: Any, tmp_path: Path, weights: Any) -> None:
    folder = shutil.copytree(frozen[0], tmp_path / "copy")
    (folder / "model.safetensors").unlink()
    if weights:
        (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ArgumentError, match=r"copy cannot be loaded \(.*\)\. Copy it, or download it, again"):
        AffinityPredictor.from_pretrained(folder)


def test_a_lost_tokenizer_is_named(frozen: Any, tmp_path: Path) -> None:
    (tmp_path / "inputs.json").write_text((frozen[0] / "inputs.json").read_text())
    with pytest.raises(ArgumentError, match=r"tokenizers/0: no tokenizer there for input 'heavy'"):
        frozen[2].from_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"inputs\.json: not there, or damaged"):
        frozen[2].from_pretrained(tmp_path / "elsewhere")


# End to end: model and encoders on a Hub, a private one.


def go_online(patch: pytest.MonkeyPatch) -> None:
    # The variables HF_HUB_OFFLINE and HF_HUB_DISABLE_XET, which were read when the tests began.
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    patch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)


def test_what_the_hub_does_not_hand_out_is_said(frozen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer(TOKEN) as hub:
        go_online(monkeypatch)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        push_folder(frozen[0], "me/affinity", token=TOKEN)
        for revision, token, message in (
            ("v9", TOKEN, "'me/affinity' at revision 'v9': .*the Hub did not hand it out"),
            (None, "hf_old", "for a private or gated model run `hf auth login`"),
        ):
            monkeypatch.setenv("HF_TOKEN", token)
            with pytest.raises(ArgumentError, match=message):
                find_model("me/affinity", revision)


def test_a_pushed_model_is_verified_where_it_is_loaded_and_a_damaged_one_is_not_sent(
    frozen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(frozen[0], tmp_path / "model"))
    write_model_manifest(folder)
    with monkeypatch.context() as patch, serve_hub(patch, TOKEN):
        go_online(patch)
        patch.setenv("HF_TOKEN", TOKEN)
        push = push_folder(folder, "me/verified", token=TOKEN)
        loaded = find_model("me/verified", push.oid)
        assert (loaded / "config.json").read_bytes() == (folder / "config.json").read_bytes()
        assert (loaded / MODEL_MANIFEST).is_file()
        (loaded / "inputs.json").resolve().write_text("{}")
        with pytest.raises(ArgumentError, match=r"not what was saved: inputs\.json"):
            AffinityPredictor.from_pretrained("me/verified", revision=push.oid)
        (folder / "inputs.json").write_text("{}")
        with pytest.raises(ArgumentError, match=r"not what was saved: inputs\.json"):
            push_folder(folder, "me/verified", token=TOKEN)


def push_all(hub: HubServer, folder: Path, encoders: tuple[str, ...], tmp_path: Path) -> None:
    """Pushes the encoders, and the model as one that refers to them by id."""
    config = json.loads((folder / "config.json").read_text())
    for spec, path in zip(config["encoders"], encoders):
        assert spec["name_or_path"] == str(Path(path).resolve())
        spec["name_or_path"] = f"me/{Path(path).name}"
        spec["fingerprint"] = None
        push_folder(path, spec["name_or_path"], token=TOKEN)
    pushed = tmp_path / "pushed"
    pushed.mkdir()
    for path in folder.rglob("*"):
        if path.is_file():
            (pushed / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (pushed / path.relative_to(folder)).write_bytes(path.read_bytes())
    (pushed / "config.json").write_text(json.dumps(config))
    push_folder(pushed, "me/affinity", token=TOKEN)


def test_the_recipe_lists_dropped_rows_under_the_name_of_its_output(
    frozen: Any, demo_rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "new.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows([{c: demo_rows[0][c] for c in COLUMNS}, {**GOOD, "heavy": "EV1L"}])
    (tmp_path / "rejected_rows.csv").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "recipes")
    words = "--without embedding_cache --dataset_name new.csv --bad_rows drop --output out.csv --use_cpu true"
    for _ in range(2):  # over its own files too
        importlib.import_module("hf_ext.finished.predict").main(["--model", str(frozen[0]), *words.split()])
    assert sorted(os.listdir(tmp_path)) == ["new.csv", "out.csv", "out.rejected_rows.csv", "rejected_rows.csv"]
    assert (tmp_path / "rejected_rows.csv").read_text() == "mine"
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 2
    assert (tmp_path / "out.rejected_rows.csv").read_text().splitlines()[1].startswith("3,heavy,EV1L,")


def test_the_recipe_predicts_by_hub_id_and_afterwards_without_network(
    frozen: Any, demo_encoders: Any, demo_rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = frozen
    rows = [{name: demo_rows[i][name] for name in COLUMNS} for i in range(8)]
    with (tmp_path / "new.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    with monkeypatch.context() as patch, serve_hub(patch, TOKEN) as hub:
        patch.setenv("HF_TOKEN", TOKEN)
        patch.chdir(tmp_path)
        patch.syspath_prepend(ROOT / "recipes")
        push_all(hub, folder, demo_encoders, tmp_path)
        words = (
            "--model me/affinity --without embedding_cache --dataset_name new.csv --disable_tqdm true --use_cpu true"
        )
        importlib.import_module("hf_ext.finished.predict").main(words.split())
    with (tmp_path / "predictions.csv").open() as file:
        predicted = [float(row["prediction"]) for row in csv.DictReader(file)]
    expected = AffinityPredictor.from_pretrained(folder, device="cpu").predict(rows)
    assert predicted == pytest.approx(expected, abs=1e-4)
    # The server is gone; the cache has the model and its encoders.
    assert_same(hf_ext.AffinityPredictor.from_pretrained("me/affinity", device="cpu"), rows, expected)
