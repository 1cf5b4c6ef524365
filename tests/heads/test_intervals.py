"""Prediction intervals of a model: stored at the end of a run, written when asked, refused where they say nothing."""

import csv
import importlib
import json
from pathlib import Path

import commands
import numpy as np
import pytest
import torch
from datasets import Dataset
from inside import conformal_half_widths

from hf_ext.data import make_demo_table
from hf_ext.errors import ArgumentError
from hf_ext.evaluation import ResamplingGroups
from hf_ext.heads import fit_intervals, half_width, score_intervals
from hf_ext.property import AffinityPredictor
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

RECIPES = str(Path(__file__).resolve().parents[2] / "recipes")
COLUMNS = ["heavy", "light", "antigen"]
NEAR = 0.02  # cached embeddings were computed in half precision, label units


@pytest.fixture
def make(make_affinity, demo_rows, tmp_path):
    """A trainer with an untrained model, and rows with labels of its order: of standard deviation 0.3, noise of 0.1."""

    def made(num_rows=120, **settings):
        torch.manual_seed(0)
        model, collator = make_affinity(**settings)
        model.config.label_std, model.config.label_mean = 10.0, 8.0
        args = FastTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, seed=5)
        trainer = FastTrainer(model, args, collator)
        rows = demo_rows.shuffle(seed=1).select(range(num_rows))
        raw, noise = predict(trainer, rows), np.random.default_rng(0).normal(0, 0.1, num_rows)
        return trainer, relabel(rows, 6 + 0.3 * (raw - raw.mean()) / raw.std() + noise)

    return made


def relabel(rows: Dataset, labels) -> Dataset:
    return rows.remove_columns("label").add_column("label", list(labels))


def predict(trainer, rows) -> np.ndarray:
    return np.asarray(trainer.predict(rows).predictions, np.float64).reshape(-1)


@pytest.mark.nightly
def test_they_are_quantiles_of_the_residuals_and_another_ensemble_drops_them(make):
    trainer, rows = make()
    stored = fit_intervals(trainer, rows, None)
    residuals = np.sort(np.abs(np.asarray(rows["label"]) - predict(trainer, rows)))
    assert half_width(stored, 0.9) == pytest.approx(residuals[109 - 1])  # ceil(121 * 0.9)
    assert half_width(stored, 0.899) == half_width(stored, 0.9) > half_width(stored, 0.89)  # the next level
    assert (stored["num_rows"], stored["unit"], stored["num_limits"], stored["levels"][-1]) == (120, None, 0, 0.99)
    assert trainer.model.config.prediction_intervals == stored == json.loads(json.dumps(stored))
    given = fit_intervals(trainer, rows, None, np.asarray(rows["label"]) + 0.5)  # of members that had not seen them
    assert half_width(given, 0.9) == pytest.approx(0.5)
    trainer.model.set_ensemble(None)
    assert trainer.model.config.prediction_intervals is None


def test_rows_held_out_together_are_weighed_together_and_limits_are_left_out(make):
    trainer, rows = make(num_rows=60)
    groups = ResamplingGroups.of("heavy", np.arange(60) // 5)
    bounds = np.where(np.arange(60) % 5 == 0, -1, 0)
    stored = fit_intervals(trainer, rows.add_column("bound", bounds.tolist()), groups)
    kept = bounds == 0
    residuals = (np.asarray(rows["label"]) - predict(trainer, rows))[kept]
    expected = conformal_half_widths(residuals, (0.9,), groups=groups.select(kept))
    assert half_width(stored, 0.9) == pytest.approx(expected[0])
    assert (stored["num_rows"], stored["num_limits"], stored["unit"], stored["num_units"]) == (48, 12, "heavy", 12)
    with pytest.raises(
        ArgumentError, match=r"19 values of heavy for validation; .* 12 values of heavy in 48 valid.*exact"
    ):
        half_width(stored, 0.95)


def test_where_there_are_none_the_reason_is_said(make):
    ranking, rows = make(loss="ranking")
    trainer, _ = make()
    limits = rows.add_column("bound", [1] * len(rows))
    for one, given, reason in (
        (ranking, rows, "this model has none: the loss ranks rows"),
        (trainer, rows.to_iterable_dataset(), "validation rows were a stream"),
        (trainer, limits, "every label of the validation rows is a limit"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            half_width(fit_intervals(one, given, None), 0.9)
    facts = score_intervals({"reason": "a reason"}, np.zeros(3), np.zeros(3), {}, None)
    assert facts["notes"] == ["No prediction intervals: a reason."]
    for level in (0.0, 1.0, 90.0, -0.5, float("nan")):
        with pytest.raises(ArgumentError, match="give the share of rows that it is to hold"):
            half_width({"levels": [0.5], "half_widths": [1.0], "num_rows": 1}, level)


STORED = {"levels": [0.5, 0.8, 0.9], "half_widths": [0.5, 1.0, 2.0], "num_rows": 120, "num_limits": 0}
STORED |= {"unit": None, "num_units": None}


def test_coverage_of_test_rows_is_measured_and_told():
    errors = np.r_[np.full(4, 3.0), np.zeros(36)]
    rows = Dataset.from_dict({"heavy": ["a"] * 40})
    facts = score_intervals(STORED, np.full(40, 7.0), 7 + errors, rows, None)
    assert (facts["level"], facts["coverage"]["value"], facts["width"]) == (0.9, 0.9, 4.0)
    assert facts["notes"][0].startswith("Prediction intervals of 90 % held 90 % [80 %, 97.5 %]")
    assert facts["notes"][0].endswith("(`hf-ext predict --interval 0.9` writes them, from 120 validation rows).")
    assert "half_widths" not in facts
    bounded = rows.add_column("bound", [-1] * 4 + [0] * 36)
    held = score_intervals(STORED, np.full(40, 7.0), 7 + errors, bounded, None)["coverage"]
    assert (held["value"], held["n"]) == (1.0, 36)


@pytest.fixture(scope="module")
def run(demo_encoders, tmp_path_factory):
    """A run of max_speed.py with light chains held out, ten for validation: its folder and results."""
    folder = tmp_path_factory.mktemp("run")
    make_demo_table().to_csv(folder / "rows.csv")
    words = (
        f"--dataset_name {folder}/rows.csv --sequence_columns heavy light antigen --label_column pKd "
        f"--encoders {demo_encoders[0]} {demo_encoders[1]} --tower_inputs heavy,light antigen "
        f"--split group:light --split_sizes 0.5 0.25 0.25 --output_dir {folder}/out --embedding_cache_dir "
        f"{folder}/cache --num_train_epochs 6 --use_cpu true --disable_tqdm true"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RECIPES)
        return folder, importlib.import_module("max_speed").main(words.split())


def new_rows() -> list[dict[str, str]]:
    with open("new.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def predict_file(run, tmp_path, monkeypatch):
    """Calls `hf-ext predict` on ten rows without labels; returns its columns as numbers."""
    folder, _ = run
    monkeypatch.syspath_prepend(RECIPES)
    monkeypatch.chdir(tmp_path)
    with open(folder / "out" / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))[:10]
    with open("new.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)

    def call(*words: str, model: str = str(folder / "out")) -> dict[str, np.ndarray]:
        given = ["--model", model, "--dataset_name", "new.csv", "--use_cpu", "true", "--disable_tqdm", "true"]
        path = commands.predict([*given, "--embedding_cache_dir", "cache", *words])
        with path.open(newline="") as file:
            header, *found = csv.reader(file)
        return {name: np.array([float(row[i]) for row in found]) for i, name in enumerate(header[3:], 3)}

    return call


@pytest.mark.nightly
def test_a_run_stores_intervals_by_what_it_held_out_and_reports_their_coverage(run):
    folder, results = run
    facts = results["prediction_intervals"]
    assert (facts["unit"], facts["num_units"], facts["level"]) == ("light", 10, 0.9)
    assert facts["coverage"]["low"] <= facts["coverage"]["value"] <= facts["coverage"]["high"]
    assert facts["coverage"]["num_units"] == results["test"]["num_units"]
    (note,) = facts["notes"]
    assert "from 10 values of light in " in note
    assert note in (folder / "out" / "README.md").read_text().replace("\\", "")


@pytest.mark.nightly
def test_predict_writes_them_beside_the_prediction_and_the_predictor_says_the_same(run, predict_file, capsys):
    folder, results = run
    found = predict_file("--interval", "0.9")
    assert ", from 10 values of light in " in capsys.readouterr().out
    assert list(found) == ["source_row", "prediction", "prediction_std", "prediction_low", "prediction_high"]
    width = results["prediction_intervals"]["width"]
    np.testing.assert_allclose(found["prediction_high"] - found["prediction_low"], width, rtol=1e-4)
    np.testing.assert_allclose(found["prediction_high"] + found["prediction_low"], 2 * found["prediction"], rtol=1e-5)
    assert list(predict_file()) == ["source_row", "prediction", "prediction_std"]
    ends = AffinityPredictor.from_pretrained(folder / "out", device="cpu").predict_interval(new_rows(), 0.9)
    assert (ends.shape, ends.dtype) == ((10, 2), np.float32)
    np.testing.assert_allclose(ends, np.stack([found["prediction_low"], found["prediction_high"]], 1), atol=NEAR)


@pytest.mark.nightly
def test_a_level_that_so_few_units_do_not_allow_is_refused(run, predict_file):
    with pytest.raises(ArgumentError, match=r"level 0\.95 needs at least 19 values of light .* are 10 values of light"):
        predict_file("--interval", "0.95")
    assert not Path("predictions.csv").exists()
