"""What a run suggests next follows from its verdict: fine-tuning is for models that were shown to be worth it."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path

import numpy as np
import pytest

from hf_ext.affinity.advice import make_advice
from hf_ext.affinity.scoring import SplitScores
from hf_ext.evaluation.verdict import judge

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"tower_training": ["frozen"], "split": "random", "split_column": None}
RNG = np.random.default_rng(0)
LABELS = RNG.normal(7, 1, 200)
CLOSE, NEAR, NOISE, MEAN = (
    LABELS + RNG.normal(0, 0.1, 200),
    LABELS + RNG.normal(0, 0.5, 200),
    RNG.normal(7, 3, 200),
    np.full(200, 7.0),
)
ALIKE = NEAR + RNG.normal(0, 0.2, 200)  # a little worse
LUCK = MEAN + 0.02 * (LABELS - 7) + RNG.normal(0, 0.15, 200)  # a little below the mean's error, and by chance
FINE_TUNING = ("--use_peft", "--tower_training lora", "--tower_training full", "--init_head_from")


def advise(settings=SETTINGS, rows=200, **predictions) -> tuple[str, str]:
    """Outcome and advice for a model beside baselines; `ridge_on_x` is called "ridge on x"."""
    columns = {name.replace("_", " "): values[:rows] for name, values in predictions.items()}
    verdict = judge(LABELS[:rows], columns)
    test = SplitScores(columns["model"], LABELS[:rows], verdict, predictors=columns)
    return verdict.outcome, " ".join(make_advice({"leaks": {}}, settings, Path("out"), test))


def test_after_a_good_verdict_fine_tuning_and_a_harder_split_are_suggested():
    outcome, text = advise(model=CLOSE, training_mean=MEAN, one_hot_ridge=NEAR)
    assert outcome == "better"
    assert "--use_peft --init_head_from out" in text
    assert "--split cluster" in text


@pytest.mark.parametrize(
    ("predictions", "outcome", "said"),
    [
        ({"model": NOISE, "training_mean": MEAN}, "no better", "look at the data before the model"),
        (
            {"model": NOISE, "training_mean": MEAN, "one_hot_ridge": NEAR},
            "no better",
            "one hot ridge has RMSE 0.5",
        ),
        (
            {"model": NEAR, "training_mean": MEAN, "one_hot_ridge": CLOSE},
            "no better",
            "one hot ridge does as well without",
        ),
        (
            {"model": NEAR, "training_mean": MEAN, "ridge_on_embeddings": CLOSE},
            "no better",
            "ridge on embeddings sees what the head sees",
        ),
        (
            {"model": NEAR, "training_mean": MEAN, "one_hot_ridge": ALIKE, "rows": 60},
            "undecided",
            "more test rows than these 60 decide (--split_sizes",
        ),
        (
            {"model": NOISE, "training_mean": MEAN, "one_hot_ridge": LUCK, "two_mer_ridge": NOISE},
            "no better",
            "no baseline is shown to beat the training mean",
        ),
        ({"model": NEAR, "training_mean": MEAN, "rows": 1}, "undefined", "a test split that can be scored"),
    ],
)
def test_after_any_other_verdict_its_reason_is_followed_and_fine_tuning_is_not_named(predictions, outcome, said):
    found, text = advise(**predictions)
    assert found == outcome
    assert said in text
    assert not any(words in text for words in (*FINE_TUNING, "--split cluster"))


def test_after_bad_fine_tuning_frozen_encoders_are_suggested():
    _, text = advise({**SETTINGS, "tower_training": ["lora"]}, model=NOISE, training_mean=MEAN)
    assert "--tower_training frozen is quick" in text


@pytest.mark.nightly
def test_a_bad_run_of_the_recipe_says_who_is_few_and_does_not_send_people_into_fine_tuning(
    tmp_path, monkeypatch, demo_encoders
):
    """Labels that no sequence has to do with; of 50 test rows 45 have sequences new to training."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.chdir(tmp_path)
    rng = random.Random(1)
    sequences = ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=20)) for _ in range(145)]
    rows = [(s, "train") for s in sequences[:80]] + [(s, "valid") for s in sequences[80:100]]
    rows += [(s, "test") for s in [*sequences[:5], *sequences[100:]]]
    lines = [f"{sequence},{rng.gauss(7, 1):.3f},{part}\n" for sequence, part in rows]
    Path("rows.csv").write_text("sequence,pKd,part\n" + "".join(lines))
    words = "--label_column pKd --split_column part --num_train_epochs 20 --head_sizes 64 --use_cpu true"
    given = ["--dataset_name", "rows.csv", "--encoders", demo_encoders[1], "--embedding_cache_dir", "cache"]
    importlib.import_module("max_speed").main([*given, *words.split(), "--disable_tqdm", "true"])
    results = json.loads(Path("outputs/affinity/all_results.json").read_text())
    assert results["verdict"]["outcome"] != "better"
    assert results["test"]["notes"][0] == (
        "45 of 50 rows are new to training in sequence, so these scores are for new ones: the other 5 are too few to "
        "be scored apart (it takes 30)."
    )
    page = Path("outputs/affinity/report.md").read_text()
    assert all(line.startswith("Next: ") or "repeat training rows" in line for line in results["advice"])
    assert any(line.startswith("Next: ") for line in results["advice"])
    assert not any(words in f"{page} {results['advice']}" for words in ("--use_peft --init", "fine-tunes the encoders"))
