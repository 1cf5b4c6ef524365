"""A student learns from a teacher's predictions; scores stay against measured labels, and nothing runs twice."""

import json

import numpy as np
import pytest
from datasets import Dataset

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.affinity.distilling import compare_with_teacher, distill, format_distillation
from hf_ext.affinity.scoring import SplitScores
from hf_ext.data.arguments import DataArguments
from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation import score_predictions
from hf_ext.evaluation.verdict import judge
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

COLUMNS = ["heavy", "light", "antigen"]


@pytest.fixture(scope="module")
def splits(demo_rows):
    parts = {"train": range(100), "validation": range(100, 120), "test": range(120, 160)}
    return {name: demo_rows.select(rows) for name, rows in parts.items()}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def arguments(cache):
    def make(folder, **given):
        settings = {"output_dir": str(folder), "embedding_cache_dir": cache, "use_cpu": True, "report_to": "none"}
        return FastTrainingArguments(**settings, disable_tqdm=True, speedups=["embedding_cache"], **given)

    return make


@pytest.fixture(scope="module")
def teacher(make_affinity, arguments, splits, tmp_path_factory):
    """Folder of a trained model with the test rows it held out, and its predictions for the training rows."""
    folder = tmp_path_factory.mktemp("teacher")
    model, collator = make_affinity(seed=1)
    args = arguments(folder, max_steps=8, learning_rate=1e-2, save_strategy="no")
    trainer = FastTrainer(model, args, collator, splits["train"])
    trainer.train()
    trainer.save_model()
    held_out = splits["test"].select_columns([*COLUMNS, "label"]).to_pandas().assign(prediction=0.0)
    held_out.to_csv(folder / "predictions.csv", index=False)
    return folder, trainer.predict(splits["train"]).predictions, trainer.predict(splits["test"]).predictions


def run(folder, arguments, splits, teacher, columns=COLUMNS, **given):
    model_args = AffinityArguments(encoders=["e"], distill_from=str(teacher[0]), **given)
    return distill(model_args, DataArguments(sequence_columns=list(columns)), arguments(folder), splits)


def test_training_labels_are_the_mixture_and_all_others_stay(arguments, splits, teacher, tmp_path):
    alpha = 0.25
    result = run(tmp_path, arguments, splits, teacher, distill_alpha=alpha)
    measured = np.asarray(splits["train"]["label"][:])
    np.testing.assert_allclose(result.train["label"][:], alpha * teacher[1] + (1 - alpha) * measured, rtol=0, atol=1e-5)
    assert np.abs(np.asarray(result.train["label"][:]) - measured).max() > 0.1
    assert splits["train"]["label"][:] == measured.tolist()
    np.testing.assert_allclose(result.test_predictions, teacher[2], rtol=0, atol=1e-5)
    assert result.train.column_names.count("label") == 1
    assert result.train["heavy"][:] == splits["train"]["heavy"][:]


def test_further_rows_are_labelled_by_the_teacher_alone_and_rows_of_the_splits_are_left_out(
    arguments, splits, teacher, tmp_path
):
    new = {"heavy": ["EVQLVESGG" * 5] * 2, "light": ["DIQMTQ" * 6] * 2, "antigen": ["MKTAYIAK" * 6] * 2}
    known = {name: splits["test"][name][:3] for name in COLUMNS}
    Dataset.from_dict({name: new[name] + known[name] for name in COLUMNS}).to_csv(tmp_path / "more.csv")
    result = run(tmp_path, arguments, splits, teacher, distill_rows=str(tmp_path / "more.csv"), distill_alpha=0.5)
    assert len(result.train) == 101
    assert (result.facts["num_further_rows"], result.facts["num_further_rows_left_out"]) == (1, 4)
    assert result.train[100]["heavy"] == "EVQLVESGG" * 5
    alone = run(
        tmp_path / "other", arguments, {**splits, "test": Dataset.from_dict({**new, "label": [0.0] * 2})}, teacher
    )
    assert result.train[100]["label"] == pytest.approx(float(alone.test_predictions[0]), abs=1e-5)


def test_a_teacher_that_may_know_the_test_rows_is_warned_about(arguments, splits, teacher, tmp_path, caplog):
    assert run(tmp_path, arguments, splits, teacher).facts["held_out"] == ""
    assert "WARNING" not in [record.levelname for record in caplog.records]
    other = {**splits, "test": splits["train"].select(range(10))}
    found = run(tmp_path, arguments, other, teacher).facts["held_out"]
    assert found.startswith(
        "0 of these 10 rows are in the test split of the teacher. If others were in its training table"
    )
    assert found in caplog.text


def test_what_cannot_be_distilled_is_refused(arguments, splits, teacher, tmp_path):
    with pytest.raises(ArgumentError, match=r"no inputs\.json there"):
        run(tmp_path, arguments, splits, (tmp_path,))
    with pytest.raises(ArgumentError, match=r"reads heavy, light, antigen; the rows have the sequence columns c, b, a"):
        run(tmp_path, arguments, splits, teacher, columns="cba")
    with pytest.raises(ArgumentError, match="drop --streaming"):
        run(tmp_path, arguments, {**splits, "train": splits["train"].to_iterable_dataset()}, teacher)
    strange = Dataset.from_dict({**splits["test"][:2], "heavy": ["A" * 3000, "A"]})
    with pytest.raises(DataError, match="Input 'heavy' has 3000 residues; its encoder takes"):
        run(tmp_path, arguments, {**splits, "train": strange, "test": strange}, teacher)
    for given, message in (
        ({"distill_alpha": 0.0}, "above 0, at most 1"),
        ({"distill_rows": "more.csv"}, "only acts with --distill_from"),
        ({"distill_from": "t", "loss": "tobit"}, "Use --loss mse or huber"),
    ):
        with pytest.raises(ArgumentError, match=message):
            AffinityArguments(**given)


def test_the_teachers_score_stands_beside_the_students_with_its_size(arguments, splits, teacher, tmp_path):
    result = run(tmp_path, arguments, splits, teacher)
    labels = np.asarray(splits["test"]["label"][:], np.float64)
    student = labels + 0.1 * np.sin(np.arange(40.0))
    verdict = judge(labels, {"model": student, "training mean": np.full(40, 7.0)})
    test = SplitScores(student, labels, verdict, {"model": score_predictions(student, labels)})
    facts = compare_with_teacher(result, test, splits["test"], str(teacher[0]), threshold=None)
    expected = float(np.sqrt(np.mean((teacher[2].astype(np.float64) - labels) ** 2)))
    assert test.scores["teacher"]["rmse"]["value"] == pytest.approx(expected, abs=1e-5)
    assert facts["size_ratio"] == 1.0  # the same folder stands for both
    assert facts["num_parameters"]["teacher"] > 100_000  # encoders that are referenced count
    assert "1/1 of its parameters" in format_distillation(json.loads(json.dumps(facts)))
