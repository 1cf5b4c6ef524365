"""What a run suggests next follows from its verdict: fine-tuning is for models that were shown to be worth it."""

from pathlib import Path

import numpy as np
import pytest

from hf_ext.affinity.results import make_advice
from hf_ext.affinity.scoring import SplitScores
from hf_ext.evaluation.verdict import judge

SETTINGS = {"tower_training": ["frozen"], "split": "random", "split_column": None}
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
            "ridge does as well",
        ),
        ({"model": NEAR, "training mean": MEAN, "one-hot ridge": ALIKE}, 60, "undecided", "rows than these 60 decide"),
        ({"model": NEAR, "training mean": MEAN}, 1, "undefined", "more test rows than these 1 decide"),
    ],
)
def test_advice_follows_the_verdict_and_fine_tuning_is_for_a_good_one(predictions, num_rows, outcome, said):
    columns = {name: values[:num_rows] for name, values in predictions.items()}
    verdict = judge(LABELS[:num_rows], columns)
    test = SplitScores(columns["model"], LABELS[:num_rows], verdict)
    text = " ".join(make_advice({}, SETTINGS, Path("out"), test))
    assert verdict.outcome == outcome
    assert said in text
    assert ("--use_peft" in text) == ("--split cluster" in text) == (outcome == "better")
    trained = " ".join(make_advice({}, {**SETTINGS, "tower_training": ["lora"]}, Path("out"), test))
    assert "--use_peft" not in trained


def test_luck_on_random_labels_is_no_reason_to_go_on():
    """Noise often beats the training mean on the rows at hand: that alone claims nothing and advises nothing."""
    luck, advised = 0, 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        labels, columns = rng.normal(7, 1, 20), {"model": rng.normal(7, 0.1, 20), "training mean": np.full(20, 7.0)}
        errors = {name: float(np.mean((values - labels) ** 2)) for name, values in columns.items()}
        verdict = judge(labels, columns)
        text = " ".join(make_advice({}, SETTINGS, Path("out"), SplitScores(columns["model"], labels, verdict)))
        luck += errors["model"] < errors["training mean"]
        advised += "--use_peft" in text or verdict.outcome == "better"
    assert luck >= 10
    assert advised <= 2  # of an interval of 95 %
