"""`--head auto` of classes and of labels that stand alone: mixed probabilities, weighed by their log loss."""

from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from labelled_rows import LETTERS, make_labelled
from scipy.special import expit, softmax

from hf_ext.heads import calibrate, fit_ensemble
from hf_ext.heads.ensemble import choose_weights
from hf_ext.heads.objectives import LogLoss
from hf_ext.labels import UNKNOWN
from hf_ext.models import AffinityModel
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals
NUM_ROWS = 150


def make_rows(name: str, is_random: bool = False) -> Dataset:
    """Sequences in which one of three groups of letters prevails: that is the class; sets lack each seventh label."""
    generator = np.random.default_rng(0)
    classes, rows = generator.integers(0, 3, NUM_ROWS), []
    for row, kind in enumerate(classes):
        letters = np.where(
            generator.random(12) < 0.6, 3 * generator.integers(0, 6, 12) + kind, generator.integers(0, 20)
        )
        told = int(generator.integers(0, 3)) if is_random else int(kind)
        label = [float(told == one) if (row + one) % 7 else float("nan") for one in range(3)]
        rows.append({"chain": "".join(LETTERS[i] for i in letters), "label": told if name == "classes" else label})
    return Dataset.from_list(rows)


@pytest.fixture
def fit(demo_encoders, tmp_path):
    """Trains a head for a few steps and mixes heads; the trainer, what was fitted, and rows not seen."""

    def run(name: str, is_random: bool = False):
        model, collator = make_labelled(name, demo_encoders[1], "frozen", head_sizes=[16, 8])
        quick = {"max_steps": 60, "per_device_train_batch_size": 32, "learning_rate": 3e-3, "use_cpu": True}
        quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
        args = FastTrainingArguments(str(tmp_path), embedding_cache_dir=str(tmp_path / "cache"), **quick, **quiet)
        rows = make_rows(name, is_random)
        train, validation, test = (rows.select(range(*ends)) for ends in ((0, 80), (80, 110), (110, NUM_ROWS)))
        trainer = FastTrainer(model, args, collator, train_dataset=train, eval_dataset=validation)
        trainer.train()
        return trainer, fit_ensemble(trainer, {"train": train, "validation": validation}, None), test

    return run


@pytest.mark.parametrize("name", ["classes", "sets"])
def test_mixed_probabilities_are_better_than_shares_and_survive_the_folder(fit, tmp_path, name):
    trainer, fitted, test = fit(name)
    facts = fitted.facts
    assert (facts["measure"], facts["num_folds"], fitted.predicted) == ("log loss", 5, None)
    assert facts["error"] <= min(one["error"] for one in facts["members"])
    assert {one["name"].split(" on ")[0] for one in facts["members"]} == {"constant", "logistic regression", "networks"}
    output = trainer.predict(test)
    objective, rows = LogLoss(output.label_ids.astype(float), 3), np.arange(len(test))
    found = softmax(output.predictions, -1) if name == "classes" else expit(output.predictions)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-4 if name == "classes" else 3)
    shares = np.tile(LogLoss(trainer.predict(trainer.train_dataset).label_ids.astype(float), 3).constant(rows), (40, 1))
    errors = [float(objective.errors(objective.entries(one, rows), rows)) for one in (found, shares)]
    assert errors[0] < 0.8 * errors[1]
    assert facts["error"] == pytest.approx(errors[0], rel=0.5)
    assert calibrate(trainer, test) == 1.0
    trainer.model.save_pretrained(tmp_path / "saved")
    again = AffinityModel.from_pretrained(tmp_path / "saved").eval()
    batch = {key: torch.randn(5, width) for key, width in again.embedding_sizes.items()}
    residues = torch.randint(0, 3, (5, again.config.ensemble["num_residues"]))
    logits = [one.eval()(embeddings=batch, residues=residues).logits for one in (trainer.model, again)]
    torch.testing.assert_close(*logits, rtol=0, atol=0)


def test_of_random_classes_the_shares_are_predicted(fit):
    trainer, fitted, test = fit("classes", is_random=True)
    assert fitted.facts["members"][0]["weight"] == 1
    assert np.ptp(trainer.predict(test).predictions, axis=0).max() < 1e-5


def test_logistic_regression_is_that_of_scipy_and_leaves_out_what_is_not_known():
    from scipy.optimize import minimize

    generator = np.random.default_rng(0)
    features = generator.normal(size=(60, 4)).astype(np.float32) * [3, 1, 1, 0.3]
    labels = (features @ generator.normal(size=(4, 2)) + generator.normal(size=(60, 2)) > 0).astype(float)
    labels[:7, 1] = UNKNOWN
    objective, rows = LogLoss(labels, 2), np.arange(60)
    weights, levels = objective.fit_linear(features.astype(np.float32), rows)
    penalty = objective.alphas[1] * np.linalg.eigvalsh(np.cov(features.T, bias=True)).mean()
    known = labels != UNKNOWN

    def loss(flat: np.ndarray) -> float:
        logits = features @ flat[:8].reshape(4, 2) + flat[8:]
        each = np.logaddexp(0, np.where(labels > 0, -logits, logits))[known]
        at_mean = logits.mean(0)  # half a row of 0 and half a row of 1 stand there
        prior = (np.logaddexp(0, at_mean) + np.logaddexp(0, -at_mean)).sum() / 2
        return (each.sum() + prior) / (known.sum() + 2) + penalty * np.square(flat[:8]).sum() / 2

    expected = minimize(loss, np.zeros(10), tol=1e-12).x
    np.testing.assert_allclose(np.r_[weights[1].ravel(), levels[1]], expected, atol=2e-3)


def test_weights_are_those_of_the_lowest_log_loss_of_the_mean_probability():
    labels = np.zeros(2000)
    objective, generator = LogLoss(labels, 2), np.random.default_rng(0)
    one = np.where(generator.random(2000) < 0.5, 0.9, 0.1)  # each knows half of the rows, and is wrong of the others
    judged = np.stack([np.full(2000, 0.3), one, 1 - one])
    weights = choose_weights(judged, partial(objective.errors, rows=np.arange(2000)), [*"abc"], 2000)
    assert weights == pytest.approx([0, 0.5, 0.5], abs=0.021)
