"""`--head` on the command line: what a search leaves behind, what goes on from it, and when there is none."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.affinity.building import build_model
from hf_ext.affinity.heads import candidates, choice
from hf_ext.affinity.heads.choice import settle_head
from hf_ext.affinity.predictor import AffinityPredictor
from hf_ext.errors import ArgumentError, CheckpointError
from hf_ext.training_args import FastTrainingArguments

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SMALL = (("mlp", (4,), 0.1, 3.0), ("product", (6,), 0.1, 3.0), ("gated", (5,), 0.1, 3.0))


@pytest.fixture(scope="module")
def root(tmp_path_factory, demo_rows):
    folder = tmp_path_factory.mktemp("heads")
    rows = demo_rows.select(range(200)).rename_column("label", "pKd")
    parts = ["train"] * 120 + ["valid"] * 40 + ["test"] * 40
    rows.select_columns(["heavy", "light", "antigen", "pKd"]).add_column("part", parts).to_csv(folder / "rows.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        patch.setattr(candidates, "FORMS", SMALL)
        patch.setattr(candidates, "MIN_STEPS", 8)
        yield folder


@pytest.fixture(scope="module")
def train(root, demo_encoders):
    def run(out: Path, words: str = "") -> dict[str, Any]:
        files = ["--dataset_name", str(root / "rows.csv"), "--output_dir", str(out), "--encoders", *demo_encoders]
        towers = ["--tower_inputs", "heavy,light", "antigen", "--embedding_cache_dir", str(root / "cache")]
        columns = ["--sequence_columns", "heavy", "light", "antigen", "--label_column", "pKd"]
        quiet = ["--split_column", "part", "--disable_tqdm", "true", "--use_cpu", "true"]
        exact = ["--without", "encoder_precision", "cpu_matmul"]  # float32, whatever is faster today
        return importlib.import_module("max_speed").main([*files, *towers, *columns, *quiet, *exact, *words.split()])

    return run


@pytest.fixture(scope="module")
def searched(root, train):
    folder = root / "searched"
    return train(folder), folder


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_what_was_chosen_is_trained_stored_and_shown(searched):
    results, folder = searched
    found, config = results["head_search"], json.loads((folder / "config.json").read_text())
    chosen = found["chosen"]
    assert config["head_form"] == (None if chosen["form"] == "mlp" else chosen["form"])
    assert (config["head_sizes"], config["head_dropout"]) == (chosen["sizes"], chosen["dropout"])
    trained = {name: results["settings"][name] for name in ("learning_rate", "weight_decay", "num_train_epochs")}
    assert trained == {
        "learning_rate": chosen["learning_rate"],
        "weight_decay": chosen["weight_decay"],
        "num_train_epochs": chosen["epochs"],
    }
    assert results["settings_from"]["learning_rate"] == "head search"
    assert results["train"]["epoch"] == chosen["epochs"]
    assert {one["form"] for one in found["tried"]} == {"mlp", "product", "gated"}
    assert found["num_held_out"] > 40  # 40 validation rows are few: parts of training were held out too
    report = (folder / "report.html").read_text()
    assert "All candidates" in report
    assert "chosen among" in report


def test_a_searched_model_is_loaded_from_its_folder_and_predicts_the_same(searched, demo_rows, tmp_path):
    _, folder = searched
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    rows = demo_rows.select(range(160, 200))
    predicted = AffinityPredictor.from_pretrained(str(copy)).predict(
        {name: rows[name][:] for name in ("heavy", "light", "antigen")}
    )
    lines = (folder / "predictions.csv").read_text().splitlines()
    column = lines[0].split(",").index("prediction")
    expected = [float(line.split(",")[column]) for line in lines[1:]]
    np.testing.assert_allclose(predicted, expected, atol=1e-4)


@pytest.mark.nightly
def test_the_same_command_goes_on_with_the_head_that_was_found(searched, train, root, monkeypatch):
    _, folder = searched
    calls = []
    search = choice.search_head
    monkeypatch.setattr(choice, "search_head", lambda *args, **more: calls.append(1) or search(*args, **more))
    again = root / "again"
    again.mkdir()
    shutil.copy(folder / choice.FILE, again)
    train(again)
    assert not calls
    assert weights(again) == weights(folder)
    (again / choice.FILE).write_text('{"facts": 3')
    shutil.move(again / choice.FILE, root / "damaged.json")
    damaged = root / "damaged"
    damaged.mkdir()
    shutil.move(root / "damaged.json", damaged / choice.FILE)
    train(damaged)
    assert calls == [1]
    assert weights(damaged) == weights(folder)


@pytest.mark.nightly
def test_a_search_of_other_settings_is_not_taken_over(searched, train, root, monkeypatch):
    _, folder = searched
    other = root / "other"
    other.mkdir()
    shutil.copy(folder / choice.FILE, other)
    found = train(other, "--learning_rate 0.02 --num_train_epochs 3")["head_search"]
    assert {(one["learning_rate"], one["epochs"]) for one in found["tried"]} == {(0.02, 3)}


@pytest.mark.nightly
def test_mlp_by_name_is_the_perceptron_of_its_sizes_and_searches_nothing(train, root):
    first, second = root / "mlp", root / "sizes"
    results = train(first, "--head mlp --num_train_epochs 1")
    train(second, "--head_sizes 1024 512 256 128 --num_train_epochs 1")
    assert "head_search" not in results
    assert not (first / choice.FILE).exists()
    assert weights(first) == weights(second)
    assert json.loads((first / "config.json").read_text())["head_sizes"] == [1024, 512, 256, 128]


@pytest.mark.nightly
def test_several_heads_are_trained_of_the_form_that_was_found(train, root):
    folder = root / "seeds"
    results = train(folder, "--num_seeds 2 --num_train_epochs 2")
    chosen = results["head_search"]["chosen"]
    for part in (folder, folder / "seed-42", folder / "seed-43"):
        config = json.loads((part / "config.json").read_text())
        assert (config["head_form"] or "mlp", config["head_sizes"]) == (chosen["form"], chosen["sizes"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--without embedding_cache --max_steps 1", "the cache is off"),
        ("--tower_training full frozen --max_steps 1", "here encoders train"),
    ],
)
def test_without_cached_embeddings_there_is_no_search_and_it_is_said(words, reason, train, tmp_path):
    assert "head_search" not in train(tmp_path, words)
    assert f"A search for a better one is made on cached embeddings, and {reason}" in (tmp_path / "run.log").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["product", "gated"])
def test_a_form_by_name_is_trained_as_it_is(form, train, tmp_path):
    results = train(tmp_path / "out", f"--head {form} --head_sizes 6 --num_train_epochs 2")
    assert "head_search" not in results
    assert json.loads((tmp_path / "out" / "config.json").read_text())["head_form"] == form


def test_fine_tuning_takes_the_head_of_a_searched_run(searched, demo_encoders):
    results, folder = searched
    chosen = results["head_search"]["chosen"]
    towers = {"encoders": list(demo_encoders), "tower_inputs": ["heavy,light", "antigen"], "tower_training": ["full"]}
    args = AffinityArguments(**towers, init_head_from=str(folder))
    settle_head(args, FastTrainingArguments(output_dir="out"), (), [])
    assert (args.head, args.head_sizes, args.head_dropout) == (chosen["form"], chosen["sizes"], chosen["dropout"])
    model = build_model(args, ["heavy", "light", "antigen"])
    assert model.config.is_scaled  # carried over
    other = "mlp" if chosen["form"] != "mlp" else "gated"
    wrong = AffinityArguments(**towers, init_head_from=str(folder), head=other, head_sizes=chosen["sizes"])
    with pytest.raises(ArgumentError, match=f"head: {chosen['form']} there, {other} here"):
        build_model(wrong, ["heavy", "light", "antigen"])


def test_small_sets_take_the_batch_of_the_command_where_a_search_follows():
    def batch(explicit=(), **values):
        training = FastTrainingArguments(output_dir="out", cached_batch_size=1024, per_device_train_batch_size=32)
        settle_head(AffinityArguments(**values), training, explicit, range(600))
        return training.cached_batch_size

    assert batch() is None
    assert batch(explicit={"cached_batch_size"}) == 1024
    assert batch(head="mlp") == 1024
    assert batch(explicit={"head_sizes"}) == 1024


@pytest.mark.parametrize("form", ["product", "gated"])
def test_forms_with_one_hidden_layer_have_one_width(form, demo_encoders):
    def settled(explicit=(), **values):
        args = AffinityArguments(head=form, encoders=[demo_encoders[1]], **values)
        settle_head(args, FastTrainingArguments(output_dir="out"), explicit, [])
        return args

    assert settled().head_sizes == [64]
    assert settled(head_sizes=[8], explicit={"head_sizes"}).head_sizes == [8]
    with pytest.raises(ArgumentError, match="one hidden layer, so one size"):
        build_model(settled(head_sizes=[8, 4], explicit={"head_sizes"}), ["antigen"])


def test_auto_with_sizes_is_a_contradiction():
    training = FastTrainingArguments(output_dir="out")
    with pytest.raises(ArgumentError, match="--head auto chooses the sizes: leave --head_sizes out"):
        settle_head(AffinityArguments(head_sizes=[8]), training, {"head", "head_sizes"}, [])
    args = AffinityArguments(head_sizes=[8])
    settle_head(args, training, {"head_sizes"}, [])
    assert args.head == "mlp"


@pytest.mark.nightly
def test_a_run_too_short_to_compare_heads_is_said_to_be(train, tmp_path):
    assert "head_search" not in train(tmp_path, "--max_steps 2 --num_train_epochs 1")
    assert "--max_steps 2 is too short to tell heads apart" in (tmp_path / "run.log").read_text()


@pytest.mark.nightly
def test_a_run_that_is_refused_leaves_the_search_of_the_finished_one(searched, train, root, monkeypatch):
    _, folder = searched
    copy = root / "refused"
    shutil.copytree(folder, copy)
    before = (copy / choice.FILE).read_bytes()
    monkeypatch.setattr(choice, "search_head", None)  # nothing is searched again
    with pytest.raises(CheckpointError, match="learning_rate"):
        train(copy, "--learning_rate 0.0123")
    assert (copy / choice.FILE).read_bytes() == before
    train(copy, "--learning_rate 0.0123 --allow_changed learning_rate")
    assert (copy / choice.FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sizes", [-5]),
        ("sizes", "64"),
        ("learning_rate", "fast"),
        ("learning_rate", float("nan")),
        ("epochs", 0),
        ("epochs", "3"),
        ("form", "bogus"),
        ("dropout", 1.0),
        ("sizes", [8]),  # sound, but none of those that were tried
    ],
)
def test_damaged_choices_are_searched_again(searched, name, value, tmp_path):
    _, folder = searched
    stored = json.loads((folder / choice.FILE).read_text())
    file = tmp_path / choice.FILE
    file.write_text(json.dumps(stored))
    assert choice._read(file, stored["facts"], {}) == stored["found"]
    stored["found"]["chosen"][name] = value
    file.write_text(json.dumps(stored))
    assert choice._read(file, stored["facts"], {}) is None


@pytest.mark.nightly
def test_a_folder_in_the_way_of_the_search_is_named(train, tmp_path):
    (tmp_path / choice.FILE).mkdir()
    with pytest.raises(ArgumentError, match="is no file: move it away"):
        train(tmp_path)
