"""The verdict: each of its sentences where it is due, numbers by hand, and what must not be praised is not."""

import math

import numpy as np

from hf_ext.evaluation import judge, judge_pair, rows_for, score_predictions

RIDGE = "one-hot ridge"


def labels(num_rows: int = 200) -> np.ndarray:
    return np.random.default_rng(0).normal(8.0, 1.0, num_rows)


def near(measured: np.ndarray, noise: float, seed: int = 1) -> np.ndarray:
    """Predictions with errors of this size."""
    return measured + np.random.default_rng(seed).normal(0, noise, len(measured))


def predictors(measured: np.ndarray, **others: np.ndarray) -> dict[str, np.ndarray]:
    return {"training mean": np.full(len(measured), 8.0), **others}


def test_a_model_above_every_baseline_is_better_and_the_hardest_baseline_is_named() -> None:
    measured = labels()
    weak, strong = near(measured, 3.0, 2), near(measured, 1.0, 3)
    for metric, name in (("spearman", "Spearman"), (None, "RMSE")):
        given = predictors(measured, model=near(measured, 0.3), weak=weak, strong=strong)
        verdict = judge(measured, given, metric=metric)
        assert (verdict.is_better, verdict.outcome, verdict.baseline) == (True, "better", "strong")
        assert verdict.text.startswith(f"Better than every baseline: {name} 0.")
        assert "of strong, the hardest of 2 to beat (difference 0." in verdict.text
        assert "200 rows" in verdict.text


def test_a_model_below_a_baseline_is_no_better_even_if_within_the_noise() -> None:
    measured = labels()
    ridge = near(measured, 0.5)
    worse = judge(measured, predictors(measured, model=near(measured, 0.7), **{RIDGE: ridge}))
    assert (worse.is_better, worse.outcome, worse.baseline) == (False, "no better", RIDGE)
    assert worse.text.startswith(f"No better than {RIDGE}: RMSE 0.")
    assert worse.comparison["is_worse"]
    for metric, difference in (("spearman", "0.000 [0.000, 0.000]"), (None, "0 [0, 0]")):
        same = judge(measured, predictors(measured, model=ridge, **{RIDGE: ridge}), metric=metric)
        assert (same.is_better, same.text[: len("No better than")]) == (False, "No better than")
        assert f"difference {difference}" in same.text


def test_a_gain_within_the_noise_is_undecided() -> None:
    measured = labels(60)
    ridge = near(measured, 0.5)
    verdict = judge(measured, predictors(measured, model=near(measured, 0.48, 4), **{RIDGE: ridge}), metric="spearman")
    assert verdict.comparison is not None
    assert verdict.comparison["improvement"] > 0 > verdict.comparison["low"]
    assert (verdict.is_better, verdict.outcome) == (None, "undecided")
    assert verdict.text.startswith(f"Not shown to be better than {RIDGE}: ")
    assert verdict.text.endswith("more rows decide.")


def test_a_baseline_without_a_value_in_the_metric_is_not_compared_and_a_model_without_one_has_no_verdict() -> None:
    measured = labels()
    never, some = near(measured, 0.5).clip(max=8.9), near(measured, 0.3)
    model_alone = judge(measured, predictors(measured, model=some, **{RIDGE: never}), metric="precision", threshold=9.0)
    assert model_alone.text.startswith("Better than every baseline: Spearman 0.")  # what both have
    both = judge(measured, predictors(measured, model=some, a=never, b=near(measured, 1)), metric="precision")
    assert (both.baseline, both.comparison["metric"] if both.comparison else None) == ("b", "precision")
    nothing = judge(measured, predictors(measured, model=never, **{RIDGE: some}), metric="precision", threshold=9.0)
    assert (nothing.outcome, nothing.is_better) == ("undefined", None)
    assert nothing.text.startswith("No verdict: precision is undefined (the model: no prediction is >= 9)")


def test_an_rmse_no_better_than_the_training_mean_is_no_better_than_a_constant_whatever_the_order() -> None:
    measured = labels()
    verdict = judge(measured, predictors(measured, model=measured + 2.0, **{RIDGE: near(measured, 3.0)}))
    assert (verdict.is_better, verdict.outcome, verdict.baseline) == (False, "no better", "training mean")
    rmse = math.sqrt(np.mean((measured - 8.0) ** 2))
    assert verdict.text == (
        f"No better than a constant: RMSE 2.00 against {rmse:#.3g} of the training mean (difference -1.04 [-1.13, "
        "-0.96], 200 rows). Spearman 1.000."
    )


def test_an_rmse_below_the_training_mean_by_chance_is_not_shown_to_be_better() -> None:
    measured = labels(30)
    verdict = judge(measured, predictors(measured, model=8.0 + 0.03 * (measured - 8.0) + near(0 * measured, 0.1)))
    assert (verdict.is_better, verdict.outcome) == (None, "undecided")
    assert verdict.text.startswith("Not shown to be better than a constant: RMSE ")
    assert ", which may be 0: more rows decide. Spearman 0." in verdict.text


def test_predictions_without_an_order_are_no_better_than_a_constant() -> None:
    measured = labels(40)
    for is_scale_free in (False, True):
        verdict = judge(measured, predictors(measured, model=np.full(40, 6.0)), is_scale_free=is_scale_free)
        assert verdict.text == "No better than a constant: all 40 predictions are 6; Spearman is undefined."
    verdict = judge(measured, predictors(measured, model=np.where(np.arange(40) == 3, np.nan, measured)))
    assert verdict.text == "No better than a constant: 1 of 40 predictions are NaN or infinite (first: row 3)."
    assert verdict.is_better is False


def test_labels_that_allow_no_score_give_no_verdict() -> None:
    equal, one, none = np.full(40, 6.0), np.array([6.0]), np.array([])
    reasons = ["all 40 references are equal (6)", "1 row; at least 2 are needed", "no rows"]
    for measured, reason in zip((equal, one, none), reasons):
        verdict = judge(measured, predictors(measured, model=np.arange(len(measured), dtype=float)))
        assert verdict.text == f"No verdict: Spearman is undefined ({reason})."
        assert (verdict.is_better, verdict.outcome) == (None, "undefined")


def test_a_loss_without_scale_is_judged_by_order_alone() -> None:
    measured = labels()
    model = 1000.0 * near(measured, 0.3)
    given = predictors(measured, model=model, **{RIDGE: near(measured, 2.0)})
    assert judge(measured, given).text.startswith("No better than a constant")
    assert judge(measured, given, is_scale_free=True).text.startswith("Better than every baseline")
    alone = judge(measured, predictors(measured, model=model), is_scale_free=True)
    assert (alone.is_better, alone.text.startswith("Better than chance at ordering rows")) == (True, True)


def test_a_prediction_beyond_a_limit_is_no_error() -> None:
    # 100 rows at the floor of 7: the model says 3 there, where the truth may be, and is right on the others.
    exact = np.linspace(7.5, 11, 100)
    measured, bounds = np.concatenate([np.full(100, 7.0), exact]), np.repeat([-1, 0], 100)
    model = np.concatenate([np.linspace(1.0, 5.0, 100), exact + 0.1])
    given = {"model": model, "training mean": np.full(200, measured.mean())}
    assert judge(measured, given).text.startswith("No better than a constant")
    verdict = judge(measured, given, bounds=bounds)
    assert verdict.text.startswith(f"Better than a constant: RMSE {0.1 * math.sqrt(0.5):#.3g} against ")
    # On the wrong side of the limit it is an error like any other.
    wrong = judge(measured, {**given, "model": np.where(bounds < 0, 10.0, model)}, bounds=bounds)
    assert wrong.text.startswith("No better than a constant")
    assert "(limits counted from their wrong side only)" in wrong.text


def test_metrics_of_rows_with_several_predictions_are_judged_in_their_own_words() -> None:
    # 40 rows of 1 to 4 residues; losses 1 and 2 nats per residue.
    numbers, name = np.resize([1.0, 2.0, 3.0, 4.0], 40), "unigram frequencies"
    assert judge(numbers, {"model": numbers, name: 2 * numbers}, metric="token_loss").text == (
        "Better than unigram frequencies: perplexity 2.72 against 7.39 of unigram frequencies "
        "(difference of the loss 1.000 [1.000, 1.000], 40 rows)."
    )
    worse = judge(numbers, {"model": 2 * numbers, name: numbers}, metric="token_loss")
    assert worse.text.startswith("No better than unigram frequencies")
    nothing = judge(0 * numbers, {"model": 0 * numbers, name: 0 * numbers}, metric="token_loss")
    assert nothing.text.startswith("No verdict: loss per residue is undefined (unigram frequencies:")
    errors = np.linspace(0.1, 0.2, 40)
    verdict = judge(np.ones(40), {"model": errors, "the mean": 2 * errors}, metric="nrmse")
    assert verdict.text.startswith("Better than the mean: nRMSE 0.150 against 0.300 of the mean (difference 0.150 [")
    right = {"model": np.ones(40), "the most frequent class": np.resize([0.0, 1.0], 40)}
    assert judge(np.ones(40), right, metric="accuracy").text.startswith(
        "Better than the most frequent class: accuracy 1.000 against 0.500 of the most frequent class (difference 0.500"
    )


GENERATOR = np.random.default_rng(0)
LABELS = GENERATOR.normal(7, 1, 300)
NOISE, OTHER = GENERATOR.normal(0, 1, (2, 300))
WORSE, BETTER = LABELS + 0.6 * NOISE, LABELS + 0.3 * NOISE  # twice the error in every row


def test_a_model_with_half_the_error_is_better_and_the_other_way_round_worse():
    for metric in ("rmse", "spearman"):
        there = judge_pair(LABELS, WORSE, BETTER, names=("old", "new"), metric=metric)
        back = judge_pair(LABELS, BETTER, WORSE, names=("old", "new"), metric=metric)
        assert (there.outcome, back.outcome) == ("better", "worse")
        assert there.text.startswith("new is better than old: ")
        assert back.text.startswith("new is worse than old: ")


def test_models_that_are_alike_or_as_good_show_no_difference():
    none = judge_pair(LABELS, np.full(len(LABELS), 6.0), BETTER, names=("old", "new"), metric="spearman")
    assert none.text.startswith("No verdict: Spearman is undefined (old: all ")
    same = judge_pair(LABELS, WORSE, WORSE.copy(), names=("old", "new"))
    assert same.text == "No difference: new predicts what old predicts, on all 300 rows."
    found = judge_pair(LABELS, LABELS + 0.5 * NOISE, LABELS + 0.5 * OTHER, names=("old", "new"))
    assert found.text.startswith("No difference between new and old is shown: RMSE ")
    assert same.outcome == found.outcome == "no difference"


def test_resamples_of_a_metric_are_measured_once_for_its_interval_and_every_comparison(monkeypatch) -> None:
    measured = labels()
    given = {name: near(measured, noise) for name, noise in (("model", 0.3), ("weak", 3.0), ("strong", 1.0))}
    rows = {name: rows_for(None, values, measured) for name, values in given.items()}
    drawn = []
    regression = type(rows["model"])
    spearman = regression.spearman

    def counted(self, counts):
        drawn.append(len(counts))
        return spearman(self, counts)

    monkeypatch.setattr(regression, "spearman", counted)
    scores = score_predictions(rows["model"], measured)
    verdict = judge(measured, rows)
    assert sum(num for num in drawn if num > 1) == 3 * 1000  # once for each of the three
    monkeypatch.undo()
    assert (scores, verdict) == (score_predictions(given["model"], measured), judge(measured, given))
    again = judge(measured, rows, seed=1)
    assert again.comparison != verdict.comparison  # other draws are not taken for these
