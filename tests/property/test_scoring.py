"""Score tables: the verdict first, baselines that fit the data, rows that are new apart, and what is left out said."""

import json

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets
from inside import score_split
from transformers.trainer_utils import PredictionOutput

from hf_ext.baselines import Baselines
from hf_ext.baselines.fitted import fit_baselines
from hf_ext.data import STANDARD
from hf_ext.evaluation import ResamplingGroups
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals
ANTIBODIES = ("EVQLVESGG", "QVQLQQWGA")
LETTERS = "ACDEFGHI"


def make_rows(num_rows: int, seed: int, antibodies=ANTIBODIES) -> Dataset:
    """Labels are a sum over antigen positions whose sign depends on the antibody: linear for each, not for both."""
    generator = np.random.default_rng(seed)
    effects = np.random.default_rng(7).normal(size=(6, len(LETTERS)))
    antibody = generator.integers(0, len(antibodies), num_rows)
    letters = generator.integers(0, len(LETTERS), (num_rows, 6))
    values = effects[np.arange(6), letters].sum(1) * np.where(antibody == 0, 1, -1)
    return Dataset.from_dict(
        {
            "heavy": [antibodies[i] for i in antibody],
            "light": ["DIQMTQ"] * num_rows,
            "antigen": ["".join(LETTERS[i] for i in row) for row in letters],
            "name": [f"ab{i}" for i in antibody],
            "label": (8.0 + values + 0.5 * (antibody == 0)).tolist(),
        }
    )


@pytest.fixture(scope="module")
def splits():
    test = make_rows(80, 3, (*ANTIBODIES, "WWWWWWWWW"))
    return {"train": make_rows(400, 1), "validation": make_rows(60, 2), "test": test}


@pytest.fixture(scope="module")
def make_trainer(make_affinity, tmp_path_factory):
    def make(cls=FastTrainer, **settings):
        model, collator = make_affinity(**settings)
        folder = tmp_path_factory.mktemp("scored")
        args = FastTrainingArguments(str(folder), use_cpu=True, report_to="none", disable_tqdm=True, seed=5)
        return cls(model, args, collator)

    return make


@pytest.fixture(scope="module")
def scored(make_trainer, splits):
    return score_split(make_trainer(), splits, "test", 9.0, "name")


def test_every_baseline_that_the_data_allow_stands_beside_the_model_and_the_verdict_first(scored):
    read = ["one-hot ridge", "nearest one-hot", "one-hot kernel ridge", "one-hot ridge per heavy"]
    embedded = ["ridge on embeddings", "nearest embeddings", "kernel ridge on embeddings"]
    alone = [f"{name} per heavy" for name in embedded[:2]]
    assert [*scored.scores] == ["model", "training mean", "mean by name", *read, *embedded, *alone]
    assert scored.scores["training mean"]["spearman"]["value"] is None
    facts = scored.baselines
    assert facts["one-hot ridge"]["num_rows"] == 400
    assert facts["one-hot ridge per heavy"]["num_partners"] == facts["mean by name"]["num_groups"] == 2
    first = scored.table().splitlines()[0]
    assert first == scored.verdict.text == scored.to_dict()["verdict"]["text"]
    assert first.startswith("No better than a constant: RMSE ")
    assert scored.verdict.is_better is False
    record = scored.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert (record["interval_by"], record["num_units"], record["num_effective_units"]) == (None, 80, 80)
    assert {"num_rows", "verdict", "scores", "baselines", "collapse", "slices", "notes"} < record.keys()


def test_near_rows_that_would_take_minutes_are_left_out_and_that_is_said(make_trainer, splits, monkeypatch):
    monkeypatch.setattr("hf_ext.baselines.fitted.MAX_PRODUCTS", 1.0)
    scored = score_split(make_trainer(), splits, "test", None, None)
    assert not any(name.startswith("nearest") for name in scored.scores)
    said = [note for note in scored.notes if note.startswith("No nearest ")]
    assert [note.split(":")[0] for note in said] == ["No nearest one-hot", "No nearest embeddings"]
    assert all(note.endswith(" multiply-adds, more than 1.") for note in said)


def test_rows_with_a_new_antibody_are_scored_apart(make_trainer, splits):
    test = make_rows(140, 3, (*ANTIBODIES, "WWWWWWWWW"))
    scored = score_split(make_trainer(), {**splits, "test": test}, "test", None, None)
    is_new = np.array([heavy not in ANTIBODIES for heavy in test["heavy"]])
    (one,) = [part for part in scored.slices if part["name"] == "rows whose heavy is not in training"]
    assert one["num_rows"] == is_new.sum()
    assert one["scores"].keys() == scored.scores.keys()
    rmse = np.sqrt(np.mean((scored.outputs - scored.labels)[is_new] ** 2))
    assert one["scores"]["model"]["rmse"]["value"] == pytest.approx(rmse)
    lines = scored.table().splitlines()
    assert f"Rows whose heavy is not in training ({is_new.sum()}):" in lines
    assert any(", 0 in light (all have the same), " in line for line in lines)
    values = [part["model"]["spearman"]["value"] for part in (scored.scores, one["scores"])]
    new = f"{values[1]:.3f} on the {is_new.sum()} rows whose heavy is not in training."
    assert f"Spearman {values[0]:.3f} on all 140 rows, {new}" in lines
    assert not any("recall" in line for line in lines)


def test_censored_labels_and_ranking_losses_are_judged_as_such(make_trainer, splits):
    bounded = splits["test"].add_column("bound", [-1] * 40 + [0] * 40)
    scored = score_split(make_trainer(), {**splits, "test": bounded}, "test", None, None)
    assert "(limits counted from their wrong side only)" in scored.verdict.text
    ranking = score_split(make_trainer(loss="ranking"), splits, "test", None, None)
    assert "RMSE" not in ranking.verdict.text
    assert ranking.notes[0].startswith("The loss ranks rows: predictions have no unit")
    assert not any("ranks rows" in note for note in scored.notes)


def test_a_stream_is_judged_against_the_mean_that_scaled_the_model(make_trainer, splits):
    trainer = make_trainer()
    trainer.train_dataset = splits["train"].to_iterable_dataset()
    trainer.fit_scaling()
    scored = score_split(trainer, {**splits, "train": trainer.train_dataset}, "test", None, None)
    assert [*scored.scores] == ["model", "training mean"]
    assert scored.baselines["training mean"]["mean"] == pytest.approx(np.mean(splits["train"]["label"]))
    assert "constant" in scored.verdict.text
    assert scored.notes[0].startswith("Training rows are a stream")
    assert scored.notes[0] in scored.table().splitlines()


@pytest.mark.nightly
def test_intervals_by_antigen_say_of_how_many_in_table_notes_verdict_and_json(make_trainer, splits):
    repeated = {**splits, "test": concatenate_datasets([splits["test"].select(range(20))] * 4)}
    groups = ResamplingGroups.of("antigen", repeated["test"]["antigen"][:])
    few = ResamplingGroups.of("antigen", [f"{i % 5}" for i in range(80)])
    trainer = make_trainer()
    by_row, by_group, of_few = (
        score_split(trainer, repeated, "test", None, None, groups=by) for by in (None, groups, few)
    )
    facts = by_group.to_dict()
    assert (facts["interval_by"], facts["num_units"]) == ("antigen", 20)
    assert facts["scores"]["one-hot ridge"]["rmse"]["num_units"] == 20
    assert by_group.verdict.text.endswith("Intervals resample 20 values of antigen.")
    assert any("from only 5 values of antigen is not to be trusted" in line for line in of_few.table().splitlines())
    assert not any("Intervals resample" in line for line in by_row.table().splitlines())
    # Four copies of each row: intervals by row are those of four times as many rows, half as wide.
    width = [one.scores["model"]["rmse"] for one in (by_row, by_group)]
    assert 1.6 < (width[1]["high"] - width[1]["low"]) / (width[0]["high"] - width[0]["low"]) < 3


class KnowsTheLabels(FastTrainer):
    def predict(self, test_dataset, *args, **kwargs):
        labels = np.asarray(test_dataset["label"][:])
        return PredictionOutput(labels + 0.01, labels, {})


def test_a_verdict_on_one_held_out_value_claims_nothing_about_others(make_trainer, splits):
    trainer = make_trainer(KnowsTheLabels)
    one = ResamplingGroups.of("clone", ["c"] * len(splits["test"]))
    plain, alone = (score_split(trainer, splits, "test", None, None, groups=by) for by in (None, one))
    assert plain.verdict.outcome == "better"
    assert (alone.verdict.outcome, alone.verdict.is_better) == ("undecided", None)
    assert alone.verdict.text.endswith("All rows have the same clone: no interval can be had from one.")


def random_rows(num_rows: int, seed: int, heavy=ANTIBODIES) -> dict[str, list[str]]:
    """Antigens of 8 to 14 random residues, against few heavy chains."""
    generator = np.random.default_rng(seed)
    return {
        "heavy": [heavy[i] for i in generator.integers(0, len(heavy), num_rows)],
        "light": ["DIQMTQ"] * num_rows,
        "antigen": ["".join(generator.choice(list(STANDARD), generator.integers(8, 15))) for _ in range(num_rows)],
    }


def best(fitted: Baselines, rows: Dataset) -> tuple[str, dict[str, float]]:
    """Name of the baseline with the smallest RMSE, and the RMSE of each."""
    labels = np.array(rows["label"][:])
    errors = {name: float(np.sqrt(np.mean((one - labels) ** 2))) for name, one in fitted.predictions.items()}
    return min(errors, key=lambda name: errors[name]), errors


@pytest.fixture(scope="module")
def embedded(make_trainer):
    """Labels are linear in the antigen's embedding, by the frozen encoder, with a sign that the heavy chain decides."""
    trainer = make_trainer()
    splits = {}
    for name, num_rows, seed in (("train", 400, 1), ("validation", 100, 2), ("test", 100, 3)):
        rows = random_rows(num_rows, seed)
        values = trainer.encode_distinct("antigen", rows["antigen"]).double().numpy()
        weights = np.random.default_rng(7).normal(size=values.shape[1])
        sign = np.where(np.array(rows["heavy"]) == ANTIBODIES[0], 1, -1)
        splits[name] = Dataset.from_dict({**rows, "label": (8 + sign * 5 * (values @ weights)).tolist()})
    return splits


def test_ridge_on_embeddings_per_heavy_wins_where_each_heavy_reads_the_embedding_its_own_way(make_trainer, embedded):
    fitted = fit_baselines(make_trainer(), embedded, "test", None)
    name, errors = best(fitted, embedded["test"])
    assert name == "ridge on embeddings per heavy"
    assert errors[name] < 0.1 * min(error for other, error in errors.items() if other != name)
    assert fitted.facts[name]["num_partners"] == 2
    assert fitted.notes == []
