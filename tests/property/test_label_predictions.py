"""What a model of each kind of label predicts, alone or in a batch; probabilities and their temperature."""

import math

import numpy as np
import pytest
import torch
from labelled_rows import KINDS, MAX_RESIDUES, make_labelled, make_rows, make_trainer
from scipy.special import expit, softmax

from hf_ext.errors import ArgumentError
from hf_ext.heads import calibrate
from hf_ext.heads.calibration import LIMITS, fit_temperature
from hf_ext.labels import make_kind
from hf_ext.property import AffinityPredictor

pytestmark = pytest.mark.internals
WITH_CLASSES = ["classes", "sets", "residue_classes"]


@pytest.fixture(scope="module")
def predictors(demo_encoders):
    """Of models that tell rows apart."""
    found = {}
    for name in KINDS:
        model, collator = make_labelled(name, demo_encoders[1], "frozen", head_sizes=[])
        torch.nn.init.normal_(model.head.layers[-1].weight, std=0.1)
        found[name] = AffinityPredictor(model, collator, device="cpu")
    return found


def as_list(rows):
    return [np.atleast_1d(row) for row in rows]


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_predicted_alike_alone_in_a_batch_and_by_a_trainer(predictors, demo_encoders, tmp_path, name):
    predictor, rows = predictors[name], make_rows(name)
    whole = predictor.logits(rows)
    alone = [row for one in rows for row in predictor.logits([one])]
    for found, expected in zip(as_list(whole), as_list(alone), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert not np.allclose(whole[0][:1], whole[2][:1], atol=1e-2)
    trainer = make_trainer(name, tmp_path, demo_encoders[1], "frozen", speedups=["embedding_cache"])
    trainer.model.head = predictor.model.head
    lengths = [min(len(row), MAX_RESIDUES) for row in rows["chain"]]
    stored = KINDS[name].split_rows(trainer.predict(rows).predictions, lengths)
    for found, expected in zip(as_list(stored), as_list(whole), strict=True):
        np.testing.assert_allclose(found, expected, atol=3e-3 if "residue" in name else 1e-4)


def test_predictions_are_names_and_numbers_in_the_order_of_the_rows(predictors):
    found = {name: predictor.predict(make_rows(name)) for name, predictor in predictors.items()}
    lengths = [min(len(row), MAX_RESIDUES) for row in make_rows("classes")["chain"]]
    assert found["numbers"].shape == (16, 2)
    assert found["classes"].shape == (16,)
    assert set(found["classes"]) <= {*KINDS["classes"].names}
    assert [set(row) <= {*KINDS["sets"].names} for row in found["sets"]] == [True] * 16
    assert [len(row) for row in found["residue_classes"]] == lengths
    assert set("".join(found["residue_classes"])) <= set("HEC")
    assert [row.shape for row in found["residue_numbers"]] == [(length,) for length in lengths]
    assert predictors["residue_classes"].predict([]) == []


def test_what_is_decoded_by_hand():
    classes, sets, residues, numbers = (KINDS[name] for name in ("classes", "sets", "residue_classes", "numbers"))
    assert classes.decode(np.array([[0, 2, 1], [3, 2, 1]])).tolist() == ["cytoplasm", "nucleus"]
    assert sets.decode(np.array([[0.6, 0.4, 0.9], [0.2, 0.5, 0.1]])) == [("binds", "cuts"), ()]
    padded = np.array([[[9, 0, 0], [0, 9, 0]], [[0, 0, 9], [-100, -100, -100]]])
    assert residues.decode(residues.split_rows(padded, [2, 1])) == ["HE", "C"]
    words = make_kind("residue_classification", ("place",), ("in", "out", "between"))
    assert [row.tolist() for row in words.decode(words.split_rows(padded, [2, 1]))] == [["in", "out"], ["between"]]
    assert numbers.decode(padded) is padded
    assert classes.to_predictions(np.log([[1.0, 2, 1]])).tolist() == [pytest.approx([0.25, 0.5, 0.25])]
    assert sets.to_predictions(np.log([[3.0, 1, 1 / 3]])).tolist() == [pytest.approx([0.75, 0.5, 0.25])]


@pytest.mark.parametrize("name", WITH_CLASSES)
def test_probabilities_belong_to_what_is_predicted(predictors, name):
    predictor, rows = predictors[name], make_rows(name)
    found, predicted = predictor.predict_proba(rows), predictor.predict(rows)
    names = np.array(KINDS[name].names)
    assert found[0].dtype == np.float32
    if name == "sets":
        assert predicted == [tuple(names[row > 0.5]) for row in found]
        return
    for row, label in zip(found, predicted):
        assert row.sum(-1) == pytest.approx(1, abs=1e-6)
        assert "".join(np.atleast_1d(names[row.argmax(-1)])) == label


def test_numbers_have_no_probabilities(predictors):
    with pytest.raises(ArgumentError, match=r"This model predicts numbers \(a, b\)"):
        predictors["numbers"].predict_proba(make_rows("numbers"))


def test_the_temperature_makes_a_model_as_sure_as_it_is_right():
    logits, labels = np.array([[2.0, 0.0]] * 5), np.array([0, 0, 0, 1, -100])
    # Three of four are right, so 2 / T = log(3); of a set likewise.
    assert fit_temperature(logits, labels) == pytest.approx(2 / math.log(3), rel=1e-3)
    of_a_set = np.array([[1.0, 1.0, 1.0, 0.0, -100.0]])
    assert fit_temperature(np.full((1, 5), 2.0), of_a_set) == pytest.approx(2 / math.log(3), rel=1e-3)
    residues = np.concatenate([logits, np.full((1, 2), -100.0)])[None]
    assert fit_temperature(residues, np.append(labels, -100)[None]) == pytest.approx(2 / math.log(3), rel=1e-3)


def test_the_temperature_stays_where_another_helps_nothing_and_within_its_limits():
    right = np.log([[3.0, 1.0]] * 4)
    assert fit_temperature(right, np.array([0, 0, 0, 1])) == 1.0  # says 3/4, and 3 of 4 are right
    assert fit_temperature(right, np.full(4, -100)) == 1.0
    assert fit_temperature(right, np.zeros(4, int)) == pytest.approx(LIMITS[0], rel=1e-3)  # all right: for ever surer
    assert fit_temperature(right, np.array([0, 1, 0, 1])) == pytest.approx(LIMITS[1], rel=1e-3)


@pytest.mark.parametrize("name", WITH_CLASSES)
def test_a_calibrated_model_has_a_lower_log_loss_and_says_so_everywhere(name, demo_encoders, tmp_path):
    trainer = make_trainer(name, tmp_path, demo_encoders[1], "frozen")
    torch.nn.init.normal_(trainer.model.head.layers[-1].weight, std=30.0)  # much too sure
    rows = trainer.eval_dataset
    before, logits = trainer.evaluate()["eval_loss"], trainer.predict(rows).predictions
    temperature = calibrate(trainer, rows)
    assert temperature == trainer.model.config.temperature > 1
    assert trainer.evaluate()["eval_loss"] < before
    lengths = [min(len(row), MAX_RESIDUES) for row in rows["chain"]]
    scaled = KINDS[name].split_rows(logits / temperature, lengths)
    found = AffinityPredictor(trainer.model, trainer.data_collator, device="cpu").predict_proba(rows)
    for row, expected in zip(found, scaled):
        np.testing.assert_allclose(row, expit(expected) if name == "sets" else softmax(expected, -1), atol=1e-4)
    assert calibrate(trainer, rows) == pytest.approx(temperature)  # of the logits as they were, not twice


def test_numbers_need_no_temperature(demo_encoders, tmp_path):
    trainer = make_trainer("numbers", tmp_path, demo_encoders[1], "frozen")
    assert calibrate(trainer, None) == 1.0
