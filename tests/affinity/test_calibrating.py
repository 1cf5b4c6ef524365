"""Calibration of a trained model: fitted on validation rows, stored, applied wherever it predicts, and undone."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_ext.affinity import baselines
from hf_ext.affinity.baselines import pooled_features
from hf_ext.affinity.calibrating import calibrate_model, describe_calibration, uncalibrated
from hf_ext.affinity.predictor import AffinityPredictor
from hf_ext.affinity.scoring import score_split
from hf_ext.affinity.stacking import fit_ridge
from hf_ext.errors import DataError
from hf_ext.evaluation.calibration import fit_calibration
from hf_ext.evaluation.metrics import rmse_at_limits
from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments


@pytest.fixture
def make(make_affinity, demo_rows, tmp_path):
    """A trainer whose untrained model predicts ten times as far from its mean as the labels that it makes are."""

    def made(**settings):
        torch.manual_seed(0)
        model, collator = make_affinity(**settings)
        model.config.label_std, model.config.label_mean = 10.0, 8.0
        quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "per_device_eval_batch_size": 64}
        args = FastTrainingArguments(str(tmp_path), seed=5, **quiet)
        trainer = FastTrainer(model, args, collator)
        rows = demo_rows.shuffle(seed=1).select(range(120))
        raw = np.asarray(trainer.predict(rows).predictions, np.float64).reshape(-1)
        noise = np.random.default_rng(0).normal(0, 1e-4, len(raw))
        return trainer, relabel(rows, 6 + 0.1 * raw + noise)

    return made


def relabel(rows: Dataset, labels) -> Dataset:
    return rows.remove_columns("label").add_column("label", list(labels))


def predict(trainer, rows):
    return np.asarray(trainer.predict(rows).predictions, np.float64).reshape(-1)


@pytest.mark.nightly
def test_the_trained_model_is_fitted_to_the_validation_labels(make):
    trainer, rows = make()
    raw = predict(trainer, rows)
    facts = calibrate_model(trainer, "line", rows)
    line = facts["calibration"]
    assert (line["kind"], line["slope"], line["intercept"]) == (
        "line",
        pytest.approx(0.1, rel=0.05),
        pytest.approx(6, rel=0.05),
    )
    assert facts["rmse_after"] < 0.02 < 1 < facts["rmse_before"]
    np.testing.assert_allclose(predict(trainer, rows), raw * line["slope"] + line["intercept"], rtol=1e-5)
    assert json.loads(json.dumps(facts)) == facts
    assert describe_calibration(facts)[0].startswith("Predictions are calibrated by a line of slope 0.1")
    with uncalibrated(trainer.model) as stored:
        assert stored == line
        np.testing.assert_array_equal(predict(trainer, rows), raw)
    assert trainer.model.config.calibration == line


@pytest.mark.nightly
def test_none_undoes_what_an_earlier_call_fitted_and_the_loss_never_changes(make):
    trainer, rows = make()
    raw, loss = predict(trainer, rows), trainer.evaluate(rows)["eval_loss"]
    calibrate_model(trainer, "line", rows)
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(loss, rel=1e-6)
    facts = calibrate_model(trainer, "none", rows)
    assert (facts["calibration"], facts["reason"]) == (None, "--calibration none")
    np.testing.assert_array_equal(predict(trainer, rows), raw)


@pytest.mark.nightly
def test_a_saved_model_predicts_calibrated(make, tmp_path):
    trainer, rows = make()
    calibrate_model(trainer, "line", rows)
    folder = tmp_path / "model"
    trainer.save_model(str(folder))
    predictor = AffinityPredictor.from_pretrained(folder, device="cpu")
    np.testing.assert_allclose(predictor.predict(rows), predict(trainer, rows), atol=2e-4)
    predictor.model.config.calibration = None
    with uncalibrated(trainer.model):
        np.testing.assert_allclose(predictor.predict(rows), predict(trainer, rows), atol=2e-4)


@pytest.mark.nightly
def test_a_split_is_scored_calibrated_and_says_what_it_was_before(make):
    trainer, rows = make()
    splits = {"train": rows, "validation": rows.select(range(60)), "test": rows.select(range(60, 120))}
    before = score_split(trainer, splits, "test", None, None)
    calibrate_model(trainer, "line", splits["validation"])
    after = score_split(trainer, splits, "test", None, None)
    values = [scores.scores["model"]["rmse"]["value"] for scores in (before, after)]
    assert values[1] < 0.05 < 1 < values[0]
    assert after.scores["model"]["spearman"]["value"] == before.scores["model"]["spearman"]["value"]
    assert any(note.startswith(f"RMSE before calibration {values[0]:.3f}, after ") for note in after.notes)
    assert not any("calibration" in note for note in before.notes)


def test_a_loss_that_ranks_has_no_scale_to_fit(make):
    trainer, rows = make(loss="ranking")
    facts = calibrate_model(trainer, "line", rows)
    assert facts["calibration"] is None
    assert describe_calibration(facts) == ["Predictions are not calibrated: the loss ranks rows, and has no scale."]


@pytest.mark.nightly
def test_a_model_that_a_constant_equals_is_an_alarm(make):
    trainer, rows = make()
    labels = np.random.default_rng(1).normal(8, 0.1, len(rows))
    facts = calibrate_model(trainer, "line", relabel(rows, labels))
    assert facts["beats_constant"] is False
    assert "is not shown to be better than the training mean: RMSE 0.0" in describe_calibration(facts)[-1]
    good, rows = make()
    assert not any("ALARM" in line for line in describe_calibration(calibrate_model(good, "line", rows)))


def test_every_head_of_an_ensemble_is_calibrated_alike(make):
    trainer, rows = make(num_seeds=2)
    members = np.asarray(trainer.predict(rows, ignore_keys=[]).predictions[1], np.float64)
    line = calibrate_model(trainer, "line", rows)["calibration"]
    mended = trainer.predict(rows, ignore_keys=[]).predictions
    np.testing.assert_allclose(mended[1], members * line["slope"] + line["intercept"], rtol=1e-5)
    np.testing.assert_allclose(mended[0], mended[1].mean(1), rtol=1e-5)


def stack(trainer, splits):
    return calibrate_model(trainer, "stack", splits["validation"], ridge=fit_ridge(trainer, splits))


def linear_splits(trainer, rows):
    """Labels that are linear in what varies most in the embeddings, which an untrained head cannot know."""
    features = pooled_features(trainer, rows).astype(np.float64)
    labels = np.linalg.svd(features - features.mean(0), full_matrices=False)[0][:, :3].sum(1)
    labelled = relabel(rows, (labels - labels.mean()) / labels.std() + 8)
    parts = {"train": range(120), "validation": range(120, 160), "test": range(160, 200)}
    return {name: labelled.select(part) for name, part in parts.items()}


@pytest.mark.nightly
def test_a_ridge_that_knows_more_than_the_model_is_stacked_and_saved_with_it(make, demo_rows, tmp_path):
    trainer, _ = make()
    splits = linear_splits(trainer, demo_rows.shuffle(seed=2))
    facts = stack(trainer, splits)
    assert facts["calibration"]["ridge"] > 0.9
    assert facts["rmse_after"] == pytest.approx(facts["rmse_ridge"], rel=0.1)
    assert facts["rmse_after"] < 0.5 * facts["rmse_constant"]
    first, second = describe_calibration(facts)[:2]
    assert "by taking 1 x a ridge on the embeddings alone, chosen on 40 validation rows" in first
    assert second.startswith("ALARM: the head adds nothing to a ridge on the same embeddings")
    scored = score_split(trainer, splits, "test", None, None)
    assert scored.verdict.text.startswith("No better than ridge on embeddings: the head has no part")
    assert scored.verdict.is_better is False
    np.testing.assert_allclose(scored.predictions, predict(trainer, splits["test"]), atol=1e-3)
    assert scored.scores["model"]["rmse"]["value"] < 1.1 * scored.scores["ridge on embeddings"]["rmse"]["value"]
    folder = tmp_path / "model"
    trainer.save_model(str(folder))
    predictor = AffinityPredictor.from_pretrained(folder, device="cpu")
    np.testing.assert_allclose(predictor.predict(splits["test"]), scored.predictions, atol=1e-3)
    predictor.model.set_calibration(None)
    with uncalibrated(trainer.model):
        np.testing.assert_allclose(predictor.predict(splits["test"]), predict(trainer, splits["test"]), atol=1e-3)
    assert "ridge.weights" not in predictor.model.state_dict()


@pytest.mark.nightly
def test_a_model_that_knows_more_than_the_ridge_is_not_mixed_with_it(make):
    trainer, rows = make()  # labels are the model's own, nearly
    splits = {"train": relabel(rows, np.random.default_rng(1).normal(8, 1, len(rows))), "validation": rows}
    facts = stack(trainer, splits)
    assert facts["calibration"].get("ridge", 0.0) < 0.01
    assert facts["rmse_after"] < 0.01 * facts["rmse_ridge"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [{"antibody": "full"}, {"loss": "tobit"}])
def test_where_a_ridge_has_no_place_a_stack_is_a_line(make, settings):
    trainer, rows = make(**settings)
    facts = stack(trainer, {"train": rows, "validation": rows})
    assert "ridge" not in facts["calibration"]
    assert facts["rmse_ridge"] is None


def test_a_line_of_two_leaves_out_the_weight_that_would_be_negative():
    generator = np.random.default_rng(0)
    labels = generator.normal(size=100)
    good, bad = labels + generator.normal(0, 0.1, 100), -labels + generator.normal(0, 0.1, 100)
    found = fit_calibration(bad, labels, ridge=good).calibration
    assert (found["slope"], found["ridge"]) == (0.0, pytest.approx(1, abs=0.05))


@pytest.mark.nightly
def test_the_ridge_that_was_stacked_is_the_baseline_that_is_shown(make, demo_rows, monkeypatch):
    trainer, _ = make()
    splits = linear_splits(trainer, demo_rows.shuffle(seed=2))
    monkeypatch.setattr(baselines, "RIDGE_ROWS", 90)  # of 120: both have to draw the same
    ridge = fit_ridge(trainer, splits)
    own, handed = (score_split(trainer, splits, "test", None, None, ridge=one).to_dict() for one in (None, ridge))
    assert handed == own
    assert own["baselines"]["ridge on embeddings"]["num_rows"] == 90
    # The broken twin: a ridge handed over is not fitted again.
    ridge.pooled.intercept += 1.0
    moved = score_split(trainer, splits, "test", None, None, ridge=ridge).to_dict()["scores"]["ridge on embeddings"]
    assert moved["rmse"]["value"] > own["scores"]["ridge on embeddings"]["rmse"]["value"] + 0.1


@pytest.mark.nightly
def test_where_an_encoder_trains_or_rows_are_a_stream_there_is_no_ridge_to_hand_over(make):
    trainer, rows = make()
    splits = {"train": rows, "validation": rows}
    assert fit_ridge(trainer, splits) is not None
    assert fit_ridge(trainer, {**splits, "train": rows.to_iterable_dataset()}) is None
    trained, rows = make(antigen="full")
    assert fit_ridge(trained, {"train": rows, "validation": rows}) is None


def levels_by_antibody(rows, num_antibodies):
    """120 rows, and their units: an antibody has one level in the labels, which says nothing of the next one's."""
    antibody = np.repeat(np.arange(num_antibodies), 120 // num_antibodies)
    labels = np.random.default_rng(8).normal(8, 1, num_antibodies)[antibody]
    return relabel(rows.select(antibody), labels), ResamplingUnits.of("heavy", antibody)


def test_antibodies_held_out_together_are_never_cut_by_a_fold_nor_counted_row_by_row(make):
    trainer, rows = make()
    grouped, units = levels_by_antibody(rows, 12)
    by_row = calibrate_model(trainer, "line", grouped)  # the broken twin: folds that know every antibody
    assert (by_row["reason"], by_row["beats_constant"]) == (None, True)
    assert (by_row["interval_by"], by_row["num_units"]) == (None, 120)
    by_antibody = calibrate_model(trainer, "line", grouped, units=units)
    assert by_antibody["rmse_before"] == by_row["rmse_before"]
    assert (by_antibody["reason"], by_antibody["beats_constant"]) == (
        "no better on rows that it was not fitted on",
        False,
    )
    assert (by_antibody["interval_by"], by_antibody["num_units"]) == ("heavy", 12)
    assert trainer.model.config.calibration is None
    assert json.loads(json.dumps(by_antibody)) == by_antibody


def test_a_gain_that_holds_for_further_antibodies_is_kept_and_says_how_many_it_rests_on(make):
    trainer, rows = make()  # labels are a line of the predictions, whatever the antibody
    units = ResamplingUnits.of("heavy", np.arange(120) % 12)
    facts = calibrate_model(trainer, "line", rows, units=units)
    assert facts["calibration"]["slope"] == pytest.approx(0.1, rel=0.05)
    assert facts["beats_constant"] is True
    (line,) = describe_calibration(facts)
    assert line.endswith("after (cross-fitted by 12 values of heavy).")


def test_too_few_antibodies_calibrate_nothing_and_are_no_alarm(make):
    trainer, rows = make()
    grouped, units = levels_by_antibody(rows, 5)
    assert calibrate_model(trainer, "line", grouped)["beats_constant"] is True  # the broken twin
    facts = calibrate_model(trainer, "line", grouped, units=units)
    assert (facts["calibration"], facts["beats_constant"]) == (None, None)
    first, second = describe_calibration(facts)
    assert first == "Predictions are not calibrated: fewer than 10 values of heavy (5)."
    assert second.startswith("The values of heavy in the validation rows (5) are too few, or too uneven, to show ")
    with pytest.raises(DataError, match="units of 120 rows for 60 rows"):
        calibrate_model(trainer, "line", grouped.select(range(60)), units=units)


@pytest.mark.nightly
def test_the_effect_on_rows_with_limits_counts_no_error_beyond_them(make):
    trainer, rows = make()
    limits = [1, 0] * 60  # half of the labels are lower limits, and the model predicts above them
    bounded = rows.add_column("bound", limits)
    calibrate_model(trainer, "line", bounded)
    with uncalibrated(trainer.model):
        raw = predict(trainer, bounded)
    scored = score_split(trainer, {"train": rows, "validation": rows, "test": bounded}, "test", None, None)
    one_sided = rmse_at_limits(raw, scored.labels, np.array(limits))
    assert any(note.startswith(f"RMSE before calibration {one_sided:.3f}, after ") for note in scored.notes)
    assert abs(one_sided - np.sqrt(np.mean((raw - scored.labels) ** 2))) > 0.1  # the broken twin
