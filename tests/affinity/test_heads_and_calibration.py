"""What a user notices of the search for a head and of calibration: it finds, it stays found, it fits, it is saved."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_ext.affinity.baselines import pooled_features
from hf_ext.affinity.calibrating import calibrate_model, describe_calibration
from hf_ext.affinity.heads import candidates, choice
from hf_ext.affinity.heads.candidates import HeadSettings
from hf_ext.affinity.heads.rows import HeadRows
from hf_ext.affinity.heads.search import search_head
from hf_ext.affinity.heads.training import Recipe
from hf_ext.affinity.predictor import AffinityPredictor
from hf_ext.affinity.stacking import fit_ridge
from hf_ext.affinity.task import TASK
from hf_ext.evaluation.metrics import value_of
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

COLUMNS = ["heavy", "light", "antigen"]


# --- the search -------------------------------------------------------------------------------------------------------


def rmse(predicted: np.ndarray, rows: HeadRows) -> float:
    return float(np.sqrt(np.mean((predicted - rows.labels) ** 2)))


def product_rows(num_rows: int, seed: int) -> HeadRows:
    """Standard normal features of two inputs, 20 and 15 wide; labels are the product of a direction of each."""
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(num_rows, 35))
    products = (features[:, :20] @ np.linspace(-1, 1, 20)) * (features[:, 20:] @ np.linspace(1, -0.5, 15)) / 5
    labels = 7 + products + generator.normal(0, 0.1, num_rows)
    return HeadRows(torch.from_numpy(features).float(), labels, np.zeros(num_rows, np.int64))


@pytest.mark.nightly
def test_where_labels_are_a_product_of_towers_the_search_beats_its_start_and_leaves_the_random_state():
    start = HeadSettings("mlp", (1024, 512, 256, 128), 0.3, 1e-3, 0.01, 30)
    losses = {"loss": "mse", "huber_delta": 1.0, "tobit_scale": 0.25, "measure": rmse}
    steps = {"rows_per_step": 32, "warmup": 0.05, "scheduler": "linear", "max_grad_norm": 1.0, "max_steps": 0}
    recipe = Recipe(widths=(20, 15), seed=0, **losses, **steps)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = search_head(start, (), recipe, [(product_rows(600, 0), product_rows(300, 1))], 8.0, is_quiet=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.chosen.form == "product"
    assert min(one["error"] for one in found.tried if one["error"]) < 0.8 * found.tried[0]["error"]


@pytest.fixture(scope="module")
def train(tmp_path_factory, demo_rows, demo_encoders):
    """Runs `hf-ext train` on demo rows, with small heads to choose among; (its results, its folder)."""
    root = tmp_path_factory.mktemp("heads")
    parts = ["train"] * 120 + ["valid"] * 40 + ["test"] * 40
    rows = demo_rows.select(range(200)).select_columns([*COLUMNS, "label"])
    rows.add_column("part", parts).to_csv(root / "rows.csv")
    quiet = "--label_column label --split_column part --num_train_epochs 8 --disable_tqdm true --use_cpu true"
    exact = "--without encoder_precision cpu_matmul"  # float32, whatever is faster today
    files = ["--dataset_name", str(root / "rows.csv"), "--embedding_cache_dir", str(root / "cache")]
    model = ["--encoders", *demo_encoders, "--tower_inputs", "heavy,light", "antigen", "--sequence_columns", *COLUMNS]

    def run(name: str) -> tuple[dict, object]:
        words = [*files, *model, "--output_dir", str(root / name), *quiet.split(), *exact.split()]
        return TASK.main(words), root / name

    with pytest.MonkeyPatch.context() as patch:
        small = (("mlp", (4,), 0.1, 3.0), ("product", (6,), 0.1, 3.0), ("gated", (5,), 0.1, 3.0))
        patch.setattr(candidates, "FORMS", small)
        patch.setattr(candidates, "MIN_STEPS", 8)
        yield run


@pytest.fixture(scope="module")
def searched(train):
    return train("searched")


def test_what_was_chosen_is_trained_stored_and_shown(searched):
    results, folder = searched
    found, config = results["head_search"], json.loads((folder / "config.json").read_text())
    chosen = found["chosen"]
    assert config["head_form"] == (None if chosen["form"] == "mlp" else chosen["form"])
    assert (config["head_sizes"], config["head_dropout"]) == (chosen["sizes"], chosen["dropout"])
    for name in ("learning_rate", "weight_decay"):
        assert results["settings"][name] == chosen[name]
    assert results["train"]["epoch"] == results["settings"]["num_train_epochs"] == chosen["epochs"]
    assert {one["form"] for one in found["tried"]} == {"mlp", "product", "gated"}
    assert {one["epochs"] for one in found["tried"]} == {8}  # what the user set is never changed
    assert "All candidates" in (folder / "report.html").read_text()


def test_a_searched_model_is_loaded_from_its_folder_and_predicts_the_same(searched, demo_rows, tmp_path):
    copy = shutil.copytree(searched[1], tmp_path / "copy")
    rows = demo_rows.select(range(160, 200))
    predicted = AffinityPredictor.from_pretrained(str(copy)).predict({name: rows[name][:] for name in COLUMNS})
    expected = Dataset.from_csv(str(searched[1] / "predictions.csv"))["prediction"][:]
    np.testing.assert_allclose(predicted, expected, atol=1e-4)


@pytest.mark.nightly
def test_the_same_command_goes_on_with_the_head_that_was_found(searched, train, monkeypatch):
    _, folder = searched
    monkeypatch.setattr(choice, "search_head", None)  # nothing is searched again
    again = folder.parent / "again"
    again.mkdir()
    shutil.copy(folder / choice.FILE, again)
    train("again")
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


# --- calibration ------------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer(make_affinity, tmp_path):
    """Its untrained model predicts ten times as far from its mean as the labels of `nearly_right` lie."""
    model, collator = make_affinity()
    model.config.label_std, model.config.label_mean = 10.0, 8.0
    args = FastTrainingArguments(str(tmp_path), seed=5, use_cpu=True, report_to="none", disable_tqdm=True)
    return FastTrainer(model, args, collator)


def relabel(rows: Dataset, labels) -> Dataset:
    return rows.remove_columns("label").add_column("label", list(labels))


def predict(trainer, rows) -> np.ndarray:
    return np.asarray(trainer.predict(rows).predictions, np.float64).reshape(-1)


def test_a_line_is_fitted_to_validation_labels_changes_no_order_is_saved_and_undone(trainer, demo_rows, tmp_path):
    rows = demo_rows.shuffle(seed=1).select(range(120))
    raw = predict(trainer, rows)
    rows = relabel(rows, 6 + 0.1 * raw + np.random.default_rng(0).normal(0, 1e-4, 120))
    loss = trainer.evaluate(rows)["eval_loss"]
    facts = calibrate_model(trainer, "line", rows)
    assert facts["rmse_after"] < 0.02 < 1 < facts["rmse_before"]
    assert describe_calibration(facts)[0].startswith("Predictions are calibrated by a line of slope 0.1")
    calibrated = predict(trainer, rows)
    assert value_of("rmse", calibrated, rows["label"][:]).value < 0.05
    assert (np.diff(calibrated[np.argsort(raw)]) >= 0).all()
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(loss, rel=1e-6)  # which is of the head alone
    trainer.save_model(str(tmp_path / "model"))
    loaded = AffinityPredictor.from_pretrained(tmp_path / "model", device="cpu")
    np.testing.assert_allclose(loaded.predict(rows), calibrated, atol=2e-4)
    assert calibrate_model(trainer, "none", rows)["calibration"] is None
    np.testing.assert_array_equal(predict(trainer, rows), raw)


@pytest.mark.nightly
def test_a_ridge_that_knows_more_than_the_model_is_stacked_and_saved_with_it(trainer, demo_rows, tmp_path):
    rows = demo_rows.shuffle(seed=2).select(range(160))
    features = pooled_features(trainer, rows).astype(np.float64)
    labels = np.linalg.svd(features - features.mean(0), full_matrices=False)[0][:, :3].sum(1)
    rows = relabel(rows, (labels - labels.mean()) / labels.std() + 8)  # linear in what varies most in embeddings
    splits = {"train": rows.select(range(120)), "validation": rows.select(range(120, 160))}
    facts = calibrate_model(trainer, "stack", splits["validation"], ridge=fit_ridge(trainer, splits))
    assert facts["calibration"]["ridge"] > 0.9
    assert facts["rmse_after"] < 0.5 * facts["rmse_constant"]
    assert any(line.startswith("ALARM: the head adds nothing") for line in describe_calibration(facts))
    trainer.save_model(str(tmp_path / "model"))
    loaded = AffinityPredictor.from_pretrained(tmp_path / "model", device="cpu")
    np.testing.assert_allclose(loaded.predict(rows), predict(trainer, rows), atol=1e-3)
