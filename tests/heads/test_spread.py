"""The spread of each prediction: by hand, calibrated on rows not seen, and the widths of intervals that follow it."""

import csv
import json

import commands
import numpy as np
import pytest
import torch
from datasets import Dataset
from inside import scales_help

from hf_ext.errors import ArgumentError
from hf_ext.evaluation import ResamplingGroups
from hf_ext.heads import fit_spread, half_width, mix_predictions, score_spread
from hf_ext.models import FEATURES, AffinityConfig, HeadEnsemble
from hf_ext.property import TASK, AffinityPredictor

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
COLUMNS = ["heavy", "antigen"]


def planted(num_rows: int, slope: float, seed: int = 0):
    """How far members are apart (n,), and normal residuals whose variance is 0.04 + `slope` times that."""
    generator = np.random.default_rng(seed)
    apart = generator.exponential(1.0, num_rows)
    return apart, generator.normal(size=num_rows) * np.sqrt(0.04 + slope * apart)


def test_members_are_as_far_apart_as_worked_out_by_hand():
    ensemble = HeadEnsemble([1], [0], [{"view": FEATURES, "number": 1, "sizes": []} for _ in range(2)])
    ensemble.shares.copy_(torch.tensor([0.25, 0.75]))
    for stack, weight in zip(ensemble.networks, (2.0, 6.0)):
        stack.weights[0].fill_(weight)
        stack.biases[0].zero_()
    mean, apart = ensemble.mix(torch.tensor([[1.0], [-2.0], [0.0]]))
    assert mean.tolist() == [5.0, -10.0, 0.0]
    assert apart.tolist() == [0.25 * 9 + 0.75 * 1, 0.25 * 36 + 0.75 * 4, 0.0]
    torch.testing.assert_close(ensemble(torch.tensor([[1.0]])), mean[:1])


def test_the_variance_that_was_planted_is_found_and_none_where_members_know_nothing():
    found = fit_spread(*planted(20_000, 1.0))
    assert (found["noise"], found["slope"]) == (pytest.approx(0.04, abs=0.02), pytest.approx(1.0, abs=0.05))
    apart, residuals = planted(20_000, 0.0)
    flat = fit_spread(apart, residuals)
    assert flat["slope"] * apart.mean() < 0.05 * flat["noise"]
    assert flat["noise"] == pytest.approx(0.04, rel=0.05)
    assert fit_spread(np.zeros(9), np.full(9, 2.0)) == {"noise": pytest.approx(4.0), "slope": 0.0}


def test_calibrated_deviations_hold_what_they_say_and_those_of_one_width_do_not():
    apart, residuals = planted(4000, 1.0, seed=1)
    fitted = fit_spread(*planted(4000, 1.0))
    rows = Dataset.from_dict({"label": residuals})  # without bounds
    facts = score_spread(np.sqrt(fitted["noise"] + fitted["slope"] * apart), residuals, rows)
    assert facts["calibration_error"] < 0.02
    assert facts["spearman"] > 0.3
    assert facts["std"] == pytest.approx(facts["rmse"], rel=0.1)
    flat = score_spread(np.full(4000, residuals.std()), residuals, rows)
    assert flat["calibration_error"] > 2 * facts["calibration_error"]
    assert flat["spearman"] is None
    assert "It is the same for all rows" in flat["notes"][0]


def test_intervals_scale_where_that_is_shown_to_help_and_only_there():
    apart, residuals = planted(1000, 1.0)
    scales = np.sqrt(0.04 + apart)
    assert scales_help(residuals, scales)
    assert not scales_help(residuals, scales[::-1])  # of other rows
    assert not scales_help(planted(1000, 0.0)[1], scales)  # errors that are alike everywhere
    assert not scales_help(residuals[:15], scales[:15])  # too few to show it
    clusters = ResamplingGroups.of("clone", np.arange(1000) // 500)
    assert not scales_help(residuals, scales, clusters)  # two units


def test_half_widths_follow_the_row_only_where_that_is_stored():
    stored = {"levels": [0.9], "half_widths": [2.0], "num_rows": 30}
    stds = np.array([0.5, 1.0])
    assert half_width(stored, 0.9, stds) == 2.0  # as models of earlier versions have it
    assert half_width({**stored, "times_std": True}, 0.9, stds).tolist() == [1.0, 2.0]


def test_several_models_are_mixed_by_their_variances_and_the_variance_of_their_means():
    mean, std = mix_predictions(np.array([[1.0, 2.0], [3.0, 2.0]]), np.array([[1.0, 2.0], [1.0, 4.0]]))
    assert mean.tolist() == [2.0, 2.0]
    assert std.tolist() == pytest.approx([np.sqrt(1 + 1), np.sqrt(10 + 0)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory, demo_encoders):
    """A run on 160 rows whose noise is larger for large labels; (its results, its folder)."""
    root = tmp_path_factory.mktemp("spread")
    generator = np.random.default_rng(0)
    lines = ["heavy,antigen,pKd"]
    for _ in range(160):
        codes = generator.integers(0, 20, (2, 10))
        worth = (codes[0] - 10).sum() / 10
        label = worth + generator.normal(0, 0.1 + 0.5 * max(worth, 0))
        lines.append(",".join(["".join(LETTERS[i] for i in row) for row in codes] + [f"{label:.3f}"]))
    (root / "rows.csv").write_text("\n".join(lines) + "\n")
    words = ["--dataset_name", str(root / "rows.csv"), "--encoders", *demo_encoders, "--output_dir", str(root / "out")]
    words += ["--sequence_columns", *COLUMNS, "--label_column", "pKd", "--embedding_cache_dir", str(root / "cache")]
    quick = "--num_train_epochs 3 --disable_tqdm true --use_cpu true --without encoder_precision cpu_matmul"
    return TASK.main([*words, *quick.split()]), root / "out"


def read(path) -> dict[str, list[str]]:
    with path.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    return {name: [row[name] for row in rows] for name in rows[0]}


def test_a_run_its_folder_and_predict_write_the_same_deviations(trained, tmp_path):
    results, folder = trained
    written = read(folder / "predictions.csv")
    stds = np.array(written["prediction_std"], float)
    spread = json.loads((folder / "config.json").read_text())["prediction_spread"]
    assert stds.min() >= np.sqrt(spread["noise"]) * 0.999 > 0
    errors = np.array(written["label"], float) - np.array(written["prediction"], float)
    facts = results["prediction_spread"]
    held = (np.abs(errors) <= 0.6744898 * stds).mean()
    assert facts["observed"][facts["expected"].index(0.5)] == pytest.approx(held, abs=0.07)
    assert "prediction_std: the share of 16 test rows" in (folder / "report.html").read_text()
    rows = {name: written[name] for name in COLUMNS}
    predictor = AffinityPredictor.from_pretrained(folder, device="cpu")
    np.testing.assert_allclose(predictor.predict_std(rows), stds, rtol=2e-3)
    (tmp_path / "new.csv").write_text(
        "\n".join(["heavy,antigen", *(",".join(pair) for pair in zip(*rows.values()))]) + "\n"
    )
    words = ["--model", str(folder), "--dataset_name", str(tmp_path / "new.csv"), "--use_cpu", "true"]
    words += ["--output", str(tmp_path / "out.csv"), "--interval", "0.5", "--disable_tqdm", "true"]
    commands.predict([*words, "--embedding_cache_dir", str(tmp_path), "--without", "encoder_precision", "cpu_matmul"])
    found = read(tmp_path / "out.csv")
    assert [*found][-4:] == ["prediction", "prediction_std", "prediction_low", "prediction_high"]
    np.testing.assert_allclose(np.array(found["prediction_std"], float), stds, rtol=2e-3)
    reach = half_width(predictor.model.config.prediction_intervals, 0.5, np.array(found["prediction_std"], float))
    ends = np.array([found["prediction_low"], found["prediction_high"]], float)
    np.testing.assert_allclose(ends[1] - ends[0], 2 * reach, rtol=1e-3)


def test_a_model_that_was_saved_without_spread_predicts_intervals_of_one_width(trained):
    folder = trained[1]
    config = json.loads((folder / "config.json").read_text())
    del config["prediction_spread"]
    config["prediction_intervals"] = {"levels": [0.5], "half_widths": [0.25], "num_rows": 16}
    predictor = AffinityPredictor.from_pretrained(folder, device="cpu")
    predictor.model.config = AffinityConfig.from_dict(config)
    ends = predictor.predict_interval({name: [LETTERS, LETTERS[::-1]] for name in COLUMNS}, 0.5)
    np.testing.assert_allclose(ends[:, 1] - ends[:, 0], 0.5, rtol=1e-5)
    with pytest.raises(ArgumentError, match="predict_std: this model has no spread"):
        predictor.predict_std({name: [LETTERS] for name in COLUMNS})
