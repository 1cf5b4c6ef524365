"""`--head auto`: several heads on frozen embeddings, weighed by rows that they have not seen; one folder."""

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pandas as pd
import pytest
import torch
from run_outcomes import same_tensors
from safetensors.torch import load_file

from hf_ext.errors import ArgumentError, DataError
from hf_ext.heads import ensemble, half_width
from hf_ext.heads.objectives import SquaredError
from hf_ext.models import (
    DIRECTIONS,
    FEATURES,
    PRODUCT,
    AffinityConfig,
    AffinityModel,
    HeadEnsemble,
    principal_directions,
)
from hf_ext.property import TASK, AffinityPredictor

pytestmark = pytest.mark.internals
LETTERS = "ACDEFGHIKLMNPQRSTVWY"
COLUMNS = ["heavy", "antigen"]
NUM_CLONES, COPIES = 40, 6


def write_rows(path: Path, is_random: bool = False) -> list[dict[str, str]]:
    """40 clones, each with six variants that differ in two residues; no linear model knows the label."""
    generator = np.random.default_rng(0)
    worth = np.linspace(-1, 1, 20)
    rows = []
    for clone in range(NUM_CLONES):
        heavy = generator.integers(0, 20, 14)
        for _ in range(COPIES):
            heavy, antigen = heavy.copy(), generator.integers(0, 20, 12)
            heavy[generator.integers(0, 14, 2)] = generator.integers(0, 20, 2)
            of_heavy, of_antigen = worth[heavy].sum() / 2, worth[antigen].sum() / 2
            label = 7 + 3 * np.tanh(of_heavy) + of_heavy * of_antigen + generator.normal(0, 0.2)
            if is_random:
                label = generator.normal(7, 1)
            texts = ["".join(LETTERS[i] for i in codes) for codes in (heavy, antigen)]
            rows.append({"heavy": texts[0], "antigen": texts[1], "clone": f"c{clone}", "pKd": f"{label:.4f}"})
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, [*rows[0]])
        table.writeheader()
        table.writerows(rows)
    return rows


@pytest.fixture(scope="module")
def train(tmp_path_factory, demo_encoders):
    """Runs `hf-ext train` in this process, clones held out; (its results, its folder)."""
    root = tmp_path_factory.mktemp("ensemble")
    write_rows(root / "rows.csv")
    write_rows(root / "random.csv", is_random=True)

    def run(name: str, *words: str, data: str = "rows.csv") -> tuple[dict[str, Any], Path]:
        model = ["--encoders", *demo_encoders, "--sequence_columns", *COLUMNS, "--label_column", "pKd"]
        files = ["--dataset_name", str(root / data), "--embedding_cache_dir", str(root / "cache")]
        quick = "--split group:clone --num_train_epochs 8 --disable_tqdm true --use_cpu true --learning_rate 0.003"
        exact = "--without encoder_precision cpu_matmul"  # float32, whatever is faster today
        out = root / name
        given = [*files, *model, "--output_dir", str(out), *quick.split(), *exact.split(), *words]
        return TASK.main(given), out

    return run


@pytest.fixture(scope="module")
def trained(train):
    return train("trained")


def predictions_of(path: Path) -> np.ndarray:
    with path.open() as file:
        return np.array([float(row["prediction"]) for row in csv.DictReader(file)])


def test_members_are_weighed_recorded_shown_and_no_worse_together_than_the_best_alone(trained):
    results, folder = trained
    facts = results["ensemble"]
    weights = [one["weight"] for one in facts["members"]]
    assert sum(weights) == pytest.approx(1)
    assert min(weights) >= 0
    assert facts["error"] <= min(one["error"] for one in facts["members"])
    names = " ".join(one["name"] for one in facts["members"])
    assert all(
        kind in names for kind in ("constant", "ridge on features", "ridge on directions", "networks on", "products on")
    )
    assert all(
        kind in names for kind in ("ridge on residues", "kernel of features", "both kernels", "nearest rows, 10")
    )
    sizes = results["data"]["sizes"]
    assert (facts["num_folds"], facts["num_held_out"]) == (5, sizes["train"] + sizes["validation"])
    networks = json.loads((folder / "config.json").read_text())["ensemble"]["networks"]
    assert {one["number"] for one in networks if one["sizes"]} == {10}  # two seeds of each fold
    assert all(text in (folder / "report.html").read_text() for text in ("All heads", "where the time went"))
    phases = results["costs"]["phases"]
    assert {"start", "load", "leak report", "plan", "encode", "train", "heads", "score", "baselines"} <= {*phases}
    assert 0.1 < sum(one["wall_s"] for one in phases.values()) / results["costs"]["wall_s"] <= 1.01
    assert "Head: the weighted mean of" in (folder / "run.log").read_text()
    shown = results["test"]["scores"]
    assert shown["model"]["rmse"]["value"] < 0.8 * shown["training mean"]["rmse"]["value"]


def test_folder_predictor_and_predict_say_what_the_run_said(trained, tmp_path):
    folder = trained[1]
    expected = predictions_of(folder / "predictions.csv")
    with (folder / "predictions.csv").open() as file:
        rows = [{name: row[name] for name in COLUMNS} for row in csv.DictReader(file)]
    np.testing.assert_allclose(
        AffinityPredictor.from_pretrained(folder, device="cpu").predict(rows), expected, atol=2e-4
    )
    text = "".join(f"{row['heavy']},{row['antigen']}\n" for row in rows)
    (tmp_path / "new.csv").write_text(f"heavy,antigen\n{text}")
    files = ["--dataset_name", str(tmp_path / "new.csv"), "--output", str(tmp_path / "out.csv")]
    quiet = ["--use_cpu", "true", "--disable_tqdm", "true", "--embedding_cache_dir", str(tmp_path / "cache")]
    commands.predict(["--model", str(folder), *files, *quiet, "--without", "encoder_precision", "cpu_matmul"])
    np.testing.assert_allclose(predictions_of(tmp_path / "out.csv"), expected, atol=2e-4)
    loaded = AffinityModel.from_pretrained(folder)
    head_alone = AffinityModel.from_pretrained(folder)
    head_alone.set_ensemble(None)
    batch = {name: torch.randn(5, width) for name, width in loaded.embedding_sizes.items()}
    both = [one.eval()(embeddings=batch).logits for one in (loaded, head_alone)]
    assert (both[0] - both[1]).abs().max() > 0.01  # it could fail
    config = json.loads((folder / "config.json").read_text())
    (folder.parent / "damaged").mkdir()
    config["ensemble"] = None
    for name in ("model.safetensors", "config.json"):
        (folder.parent / "damaged" / name).write_bytes((folder / name).read_bytes())
    (folder.parent / "damaged" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArgumentError, match=r"another head than the weights are of .* not asked for \['ensemble"):
        AffinityModel.from_pretrained(folder.parent / "damaged")


def test_what_only_residues_know_is_predicted_by_run_predictor_and_command_alike(train, tmp_path):
    generator = np.random.default_rng(0)
    texts = ["".join(generator.choice([*LETTERS], 14)) for _ in range(240)]
    given = {"heavy": texts, "antigen": texts[::-1], "clone": [*map(str, range(240))]}
    given["pKd"] = [float((text[3] in LETTERS[:10]) + 2 * (text[7] in LETTERS[:5])) for text in texts]
    pd.DataFrame(given).to_csv(tmp_path / "rows.csv", index=False)
    results, folder = train("residues", data=str(tmp_path / "rows.csv"))
    assert json.loads((folder / "config.json").read_text())["ensemble"]["num_residues"] > 100
    shown = results["test"]["scores"]
    assert shown["model"]["rmse"]["value"] < 0.85 * shown["ridge on embeddings"]["rmse"]["value"]
    assert {"nearest one-hot", "nearest embeddings", "one-hot kernel ridge", "kernel ridge on embeddings"} <= {*shown}
    found = pd.read_csv(folder / "predictions.csv")
    predictor = AffinityPredictor.from_pretrained(folder, device="cpu")
    np.testing.assert_allclose(predictor.predict(found[COLUMNS]), found["prediction"], atol=2e-4)
    found[COLUMNS].to_csv(tmp_path / "new.csv", index=False)
    files = ["--dataset_name", str(tmp_path / "new.csv"), "--output", str(tmp_path / "out.csv"), "--use_cpu", "true"]
    exact = ["--disable_tqdm", "true", "--without", "encoder_precision", "cpu_matmul", "embedding_cache"]
    commands.predict(["--model", str(folder), *files, *exact])
    np.testing.assert_allclose(predictions_of(tmp_path / "out.csv"), found["prediction"], atol=2e-4)


def column(path: Path, name: str = "prediction_std") -> np.ndarray:
    with path.open() as file:
        return np.array([float(row[name]) for row in csv.DictReader(file)])


def test_run_folder_and_predict_give_each_row_the_same_standard_deviation(trained, tmp_path):
    results, folder = trained
    stds = column(folder / "predictions.csv")
    spread = json.loads((folder / "config.json").read_text())["prediction_spread"]
    assert stds.min() >= np.sqrt(spread["noise"]) * 0.999 > 0
    errors = column(folder / "predictions.csv", "label") - predictions_of(folder / "predictions.csv")
    facts = results["prediction_spread"]
    held = (np.abs(errors) <= 0.6744898 * stds).mean()
    assert facts["observed"][4] == pytest.approx(held, abs=1e-6)  # of a half
    assert f"the share of {len(stds)} test rows within so many" in (folder / "report.html").read_text()
    rows = pd.read_csv(folder / "predictions.csv")[COLUMNS]
    predictor = AffinityPredictor.from_pretrained(folder, device="cpu")
    np.testing.assert_allclose(predictor.predict_std(rows), stds, rtol=2e-3)
    rows.to_csv(tmp_path / "new.csv", index=False)
    files = ["--dataset_name", str(tmp_path / "new.csv"), "--output", str(tmp_path / "out.csv"), "--interval", "0.5"]
    quiet = ["--use_cpu", "true", "--disable_tqdm", "true", "--embedding_cache_dir", str(tmp_path / "cache")]
    commands.predict(["--model", str(folder), *files, *quiet, "--without", "encoder_precision", "cpu_matmul"])
    found = pd.read_csv(tmp_path / "out.csv")
    assert [*found][-4:] == ["prediction", "prediction_std", "prediction_low", "prediction_high"]
    np.testing.assert_allclose(found["prediction_std"], stds, rtol=2e-3)
    reach = half_width(predictor.model.config.prediction_intervals, 0.5, found["prediction_std"])
    np.testing.assert_allclose(found["prediction_high"] - found["prediction_low"], 2 * reach, rtol=1e-3)


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


def test_rows_that_are_the_same_up_to_the_last_residue_that_is_read_are_refused(train, tmp_path):
    rows = "".join(f"{'MKTAY' + ending},{'GHIKL' + ending},c{i},{i}\n" for i, ending in enumerate(LETTERS))
    (tmp_path / "same.csv").write_text("heavy,antigen,clone,pKd\n" + rows)
    with pytest.raises(DataError, match="have the same embeddings, so there is nothing to learn"):
        train("same", "--max_residues", "5", "--too_long", "truncate", data=str(tmp_path / "same.csv"))


def test_lora_starts_from_the_network_of_the_folder(trained, train):
    results, folder = train("lora", "--use_peft", "--init_head_from", str(trained[1]), "--max_steps", "1")
    assert "ensemble" not in results
    config = json.loads((folder / "config.json").read_text())
    assert (config["head_sizes"], config["ensemble"]) == ([256, 64], None)


@pytest.mark.nightly
def test_a_run_that_is_repeated_fits_the_same_numbers(trained, train):
    again = train("again")[1]
    assert same_tensors(*(load_file(folder / "model.safetensors") for folder in (trained[1], again)))


def test_on_random_labels_the_model_is_a_constant_and_that_is_said(train):
    results, folder = train("random", data="random.csv")
    scores = results["test"]["scores"]
    assert scores["model"]["rmse"]["value"] == pytest.approx(scores["training mean"]["rmse"]["value"], rel=0.02)
    assert results["verdict"]["is_better"] is not True
    assert np.ptp(predictions_of(folder / "predictions.csv")) < 1e-5
    assert "ALARM: no head predicts rows that it has not seen" in (folder / "run.log").read_text()


def test_no_fold_cuts_what_was_held_out_together_and_its_broken_twin_does():
    clones = np.repeat(np.arange(NUM_CLONES), COPIES)
    groups = [*map(str, clones[:180])], [*map(str, clones[180:])]

    def num_cut(given):
        folds = ensemble.make_folds(180, 60, 320, given, 0)
        assert sorted(np.concatenate(folds)) == [*range(240)]
        assert folds[0].tolist() == [*range(180, 240)]
        return sum(len({*clones[fold]} & {*np.delete(clones[:180], fold)}) for fold in folds[1:])

    assert num_cut(groups) == 0
    assert num_cut(None) > 30
    assert len(ensemble.make_folds(180, 60, 12_800, groups, 0)) == 1  # validation alone


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--loss ranking", "by least squares, not by --loss ranking"),
        ("--use_peft", "here encoders train"),
        ("--binder_threshold 7 --metric_for_best_model recall", "seldom reaches the threshold of --metric"),
    ],
)
@pytest.mark.nightly
def test_where_heads_cannot_be_mixed_one_network_is_trained_and_that_is_said(train, words, said):
    results, folder = train(words.replace(" ", ""), *words.split(), "--max_steps", "2")
    assert "ensemble" not in results
    log = (folder / "run.log").read_text()
    assert "--head auto mixes several heads, but " in log
    assert said in log


def test_auto_with_sizes_is_refused(train):
    with pytest.raises(ArgumentError, match="--head auto has sizes of its own"):
        train("refused", "--head", "auto", "--head_sizes", "8")


def test_weights_are_those_of_the_smallest_error_and_of_a_constant_where_heads_know_nothing():
    generator = np.random.default_rng(0)
    labels, rows = generator.normal(size=4000), np.arange(4000)
    good, noise = labels + generator.normal(0, 1, (2, 4000)), generator.normal(0, 1, (3, 4000))
    errors = partial(SquaredError(labels).errors, rows=rows)
    weights = ensemble.choose_weights(np.stack([np.zeros(4000), *good, *noise]), errors, [*"abbccd"], 4000)
    # Of two unbiased predictions with independent errors each has a third, what is left is the mean's.
    assert weights == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0, 0], abs=0.04)
    assert ensemble.choose_weights(np.stack([np.zeros(4000), *noise]), errors, [*"abcd"], 4000)[0] == 1


def test_few_rows_weigh_the_best_of_each_kind_evenly_and_more_of_them_what_fits_best():
    labels = np.random.default_rng(0).normal(size=32)
    noise = np.where(np.arange(32) % 2, 0.1, -0.1)  # the same of all, so that no mean is better than the best alone
    scored = np.stack([np.zeros(32), labels + noise, labels + 1.05 * noise, labels + 1.1 * noise, labels + 8 * noise])
    errors = partial(SquaredError(labels).errors, rows=np.arange(32))
    # The second has the half that 32 rows decide, and of the other half as much as the best "c"; "d" gains little.
    weights = ensemble.choose_weights(scored, errors, [*"abbcd"], 32)
    assert weights == pytest.approx([0, 0.75, 0, 0.25, 0], abs=0.03)
    assert ensemble.choose_weights(scored, errors, [*"abbcd"], 32_000)[1] > 0.95


def test_directions_are_products_of_what_varies_and_survive_the_state_dict():
    torch.manual_seed(0)
    features = torch.randn(50, 7)
    features[:, 4:] = 0  # an input that is the same in all rows
    bases = [principal_directions(block) for block in features.split([4, 3], dim=1)]
    assert [basis.shape for basis in bases] == [(4, 4), (3, 0)]
    features[:, 4:] = torch.randn(50, 3)
    bases = [principal_directions(block) for block in features.split([4, 3], dim=1)]
    networks = [{"view": view, "number": 2, "sizes": [5]} for view in (FEATURES, DIRECTIONS)]
    networks.append({"view": DIRECTIONS, "number": 1, "sizes": [6], "form": PRODUCT})
    made = HeadEnsemble([4, 3], [4, 3], networks)
    made.shares.fill_(0.5)
    made.fit_directions(bases, features)
    directions = made.directions(features)
    assert directions.shape == (50, 4 + 3 + 4 * 3)
    assert directions.square().mean().item() == pytest.approx(1, rel=1e-5)
    ratio = directions[:, 7] / (directions[:, 0] * directions[:, 4])
    torch.testing.assert_close(ratio, ratio[:1].expand(50), rtol=1e-3, atol=1e-3)
    again = HeadEnsemble([4, 3], **json.loads(json.dumps(made.shapes())))
    again.load_state_dict(made.state_dict())
    torch.testing.assert_close(again(features), made(features))
