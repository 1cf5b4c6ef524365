"""`hf-ext predict --rank`: which rows to measure next, in which order, and what is refused."""

import csv
from dataclasses import replace

import commands
import numpy as np
import pytest
import torch
from labelled_rows import make_labelled

from hf_ext.errors import ArgumentError
from hf_ext.finished import acquire, choose_batch
from hf_ext.models import FEATURES, HeadEnsemble
from hf_ext.property import PredictArguments

MEANS = np.array([5.0, 4.0, 4.8, 5.0, 1.0])
STDS = np.array([0.1, 2.0, 0.5, 0.1, 3.0])


def rank(by: str, number: int = 3, **given) -> list[int]:
    own = PredictArguments(model="m", rank=number, by=by, **given)
    return choose_batch(acquire(own, MEANS, STDS), number)


def test_each_strategy_orders_rows_made_by_hand_and_equal_ones_as_they_stand():
    assert rank("greedy") == [0, 3, 2]
    assert rank("ucb") == [1, 2, 0]  # 6.0, 5.3, 5.1; the fourth row has 5.1, too
    assert rank("ucb", beta=3.0) == [1, 4, 2]  # 10, 10, 6.3
    assert rank("greedy", minimize=True) == [4, 1, 2]
    assert rank("ucb", 2, minimize=True) == [4, 1]  # -1 + 3, -4 + 2


def test_ucb_without_weight_is_greedy_and_with_some_it_is_not():
    assert rank("ucb", 5, beta=0.0) == rank("greedy", 5) != rank("ucb", 5, beta=1.0)


def test_thompson_draws_from_each_rows_own_distribution_the_same_by_seed():
    own = PredictArguments(model="m", rank=1, by="thompson", seed=3)
    assert acquire(own, MEANS, STDS).tolist() == acquire(own, MEANS, STDS).tolist()
    drawn = np.array([acquire(replace(own, seed=seed), MEANS, STDS) for seed in range(600)])
    np.testing.assert_allclose(drawn.mean(0), MEANS, atol=0.4)
    np.testing.assert_allclose(drawn.std(0), STDS, rtol=0.15)


def test_a_diverse_batch_takes_the_best_and_then_rows_unlike_those_taken():
    worth = np.array([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    sequences = [["MKTAY", "MKTAV", "MKTVV", "GGGGG", "GGGGV", "WWWWW"]]
    assert choose_batch(worth, 2, sequences) == [0, 3]  # of the best four; WWWWW is not among them
    assert choose_batch(worth, 3, sequences) == [0, 3, 5]
    assert choose_batch(worth, 2) == [0, 1]
    assert choose_batch(np.ones(3), 3, [["MK", "MK", None]]) == [0, 2, 1]  # an empty cell is far, a copy last


@pytest.fixture(scope="module")
def folders(make_affinity, tmp_path_factory):
    """Models of the demo's encoders: one whose members differ in each row, and one of a single network."""
    found = []
    for name in ("mixed", "single"):
        model, collator = make_affinity()
        folder = tmp_path_factory.mktemp(name)
        if name == "mixed":
            torch.manual_seed(0)
            width = sum(model.embedding_sizes.values())
            linear = {"view": FEATURES, "number": 1, "sizes": []}
            ensemble = HeadEnsemble([*model.embedding_sizes.values()], [0, 0, 0], [linear, linear])
            ensemble.shares.fill_(0.5)
            assert ensemble.networks[0].weights[0].shape == (1, width, 1)
            model.set_ensemble(ensemble)
            model.config.prediction_spread = {"noise": 0.01, "slope": 4.0}
        model.save_pretrained(folder)
        collator.save_pretrained(folder)
        found.append(folder)
    return found


@pytest.fixture
def predict(folders, demo_rows, tmp_path, monkeypatch):
    """Calls `hf-ext predict` on 12 rows, by the first model or as `words` say; the rows of its CSV."""
    monkeypatch.chdir(tmp_path)
    names = ["heavy", "light", "antigen"]
    cells = [",".join(row) for row in zip(*(demo_rows[name][:12] for name in names))]
    (tmp_path / "in.csv").write_text(
        "\n".join(["name," + ",".join(names), *(f"n{i},{c}" for i, c in enumerate(cells))])
    )

    def call(*words: str) -> list[dict[str, str]]:
        given = ["--dataset_name", "in.csv", "--use_cpu", "true", "--embedding_cache_dir", "cache"]
        commands.predict(["--model", str(folders[0]), *given, "--disable_tqdm", "true", *words])
        with open("predictions.csv", newline="") as file:
            return [*csv.DictReader(file)]

    return call


def test_the_file_holds_the_batch_in_order_with_all_its_columns(predict, monkeypatch):
    everything = predict()
    expected = {row["name"]: float(row["prediction"]) + 2 * float(row["prediction_std"]) for row in everything}
    best = sorted(expected, key=lambda name: -expected[name])[:4]
    rows = predict("--rank", "4", "--beta", "2")  # replaces the file
    assert [row["name"] for row in rows] == best
    assert [*rows[0]][-4:] == ["prediction", "prediction_std", "acquisition", "rank"]
    assert [row["rank"] for row in rows] == ["1", "2", "3", "4"]
    assert [int(row["source_row"]) for row in rows] == [int(name[1:]) + 2 for name in best]
    np.testing.assert_allclose([float(row["acquisition"]) for row in rows], [expected[n] for n in best], rtol=1e-5)
    monkeypatch.setattr("hf_ext.data.columns.BLOCK_ROWS", 5)
    assert [row["name"] for row in predict("--rank", "4", "--beta", "2")] == best
    greedy = [row["name"] for row in predict("--rank", "12", "--by", "greedy", "--diverse")]
    assert len({*greedy}) == 12
    assert greedy[0] == max(everything, key=lambda row: float(row["prediction"]))["name"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--diverse", r"--diverse does nothing without --rank N"),
        ("--rank 2 --by greedy --beta 2", r"--beta does nothing without --by ucb"),
        ("--rank 2 --seed 2", r"--seed does nothing without --by thompson"),
        ("--rank 2 --streaming true", r"--rank looks at all rows, and --streaming"),
        ("--rank 13", r"--rank 13: there are 12 rows"),
        ("--rank 0", r"rank=0: must be at least 1"),
        ("--rank 2 --by best", r"best"),
    ],
)
def test_what_cannot_be_ranked_is_refused(predict, words, said):
    with pytest.raises((ArgumentError, SystemExit), match=said):
        predict(*words.split())


def test_a_model_without_spread_ranks_by_the_prediction_alone(predict, folders):
    words = ["--model", str(folders[1]), "--rank", "2"]
    with pytest.raises(ArgumentError, match=r"--rank --by ucb: this model has no spread.*--by greedy"):
        predict(*words)
    rows = predict(*words, "--by", "greedy")
    assert "prediction_std" not in rows[0]
    assert [row["acquisition"] for row in rows] == [row["prediction"] for row in rows]


def test_labels_that_are_no_numbers_are_refused(predict, demo_encoders, tmp_path):
    model, collator = make_labelled("classes", demo_encoders[1])
    model.save_pretrained(tmp_path / "classes")
    collator.save_pretrained(tmp_path / "classes")
    with pytest.raises(ArgumentError, match="--rank is for models of one number per row"):
        predict("--model", str(tmp_path / "classes"), "--rank", "2", "--by", "greedy")
