"""What a run suggests next follows from its verdict: fine-tuning is for models that were shown to be worth it."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from hf_ext.evaluation import judge, judge_pair
from hf_ext.labels import make_kind
from hf_ext.property.results import make_advice
from hf_ext.property.scoring import SplitScores

pytestmark = pytest.mark.internals
REPORT, SETTINGS = {"split": {"rule": "random"}}, {"tower_training": ["frozen"]}
RNG = np.random.default_rng(0)
LABELS = RNG.normal(7, 1, 200)
NOISE, MEAN = RNG.normal(7, 3, 200), np.full(200, 7.0)
CLOSE, NEAR = LABELS + RNG.normal(0, 0.1, 200), LABELS + RNG.normal(0, 0.5, 200)
ALIKE = NEAR + RNG.normal(0, 0.2, 200)  # a little worse


@pytest.mark.parametrize(
    ("predictions", "num_rows", "outcome", "said"),
    [
        ({"model": CLOSE, "training mean": MEAN, "one-hot ridge": NEAR}, 200, "better", "--init_head_from out fine"),
        ({"model": CLOSE, "training mean": MEAN, "one-hot ridge": NEAR}, 200, "better", "--split cluster"),
        ({"model": NOISE, "training mean": MEAN}, 200, "no better", "look at the data and the training before"),
        (
            {"model": NEAR, "training mean": MEAN, "one-hot ridge": CLOSE},
            200,
            "no better",
            "another of --encoders or --pooling.",
        ),
        ({"model": NEAR, "training mean": MEAN, "one-hot ridge": ALIKE}, 60, "undecided", "these 60 decide (--split_"),
        ({"model": NEAR, "training mean": MEAN}, 1, "undefined", "more test rows than these 1 decide"),
    ],
)
def test_advice_follows_the_verdict_and_fine_tuning_is_for_a_good_one(predictions, num_rows, outcome, said):
    columns = {name: values[:num_rows] for name, values in predictions.items()}
    verdict = judge(LABELS[:num_rows], columns)
    test = SplitScores(columns["model"], LABELS[:num_rows], verdict)
    text = " ".join(make_advice(REPORT, SETTINGS, Path("out"), test))
    assert verdict.outcome == outcome
    assert said in text
    of_residues = dataclasses.replace(test, kind=make_kind("residue_regression", ("y",), ("y",)))
    assert "--pooling" not in " ".join(make_advice(REPORT, SETTINGS, Path("out"), of_residues))
    assert ("--use_peft" in text) == ("--split cluster" in text) == (outcome == "better")
    by_column = " ".join(make_advice({"split": {"rule": "column:part"}}, SETTINGS, Path("out"), test))
    assert "--split" not in by_column
    trained = " ".join(make_advice(REPORT, {**SETTINGS, "tower_training": ["lora"]}, Path("out"), test))
    assert "--use_peft" not in trained


@pytest.mark.parametrize(("predictions", "pays"), [(CLOSE, True), (ALIKE, False), (NOISE, False)])
def test_fine_tuning_that_does_not_beat_a_ridge_on_the_encoders_before_it_is_said_not_to_pay(predictions, pays):
    verdict = judge(LABELS, {"model": predictions, "training mean": MEAN})
    tuned = judge_pair(LABELS, NEAR, predictions, names=("ridge on embeddings", "this model"))
    test = SplitScores(predictions, LABELS, verdict, tuned=tuned)
    said = make_advice(REPORT, {**SETTINGS, "tower_training": ["frozen", "full"]}, Path("out"), test)
    assert said[0].startswith("Fine-tuning was not shown to pay: ") != pays
    assert ("`hf-ext compare --sides frozen full --`" in said[0]) != pays
    ranked = {**SETTINGS, "tower_training": ["full"], "objective": "likelihood"}
    (first, *_) = make_advice(REPORT, ranked, Path("out"), test)
    assert ("`hf-ext compare --sides frozen likelihood --`" in first) != pays
    assert (
        "of ridge on embeddings" in said[0] or "and ridge on embeddings" in said[0] or "than ridge" in said[0]
    ) != pays
