"""Baselines that could win: data in which each of them must, and what leaves one out."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.affinity.baselines import Baselines, fit_baselines, pooled_features
from hf_ext.affinity.building import build_collator, build_model
from hf_ext.affinity.calibrating import calibrate_model, describe_calibration
from hf_ext.affinity.partners import find_partner
from hf_ext.affinity.predictor import AffinityPredictor
from hf_ext.affinity.scoring import score_split
from hf_ext.affinity.stacking import fit_ridge
from hf_ext.data.arguments import DataArguments
from hf_ext.errors import ArgumentError
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

HEAVY = ("EVQLVESGG", "QVQLQQWGA")
LETTERS = "ACDEFGHIKLMNPQRSTVWY"
COLUMNS = ["heavy", "light", "antigen"]


@pytest.fixture(scope="module")
def folders(demo_encoders, tmp_path_factory) -> list[str]:
    """Copies of both encoders, which a test may take away."""
    root = tmp_path_factory.mktemp("copies")
    return [str(shutil.copytree(folder, root / f"{i}")) for i, folder in enumerate(demo_encoders)]


@pytest.fixture(scope="module")
def make_trainer(folders, tmp_path_factory):
    def make(*training: str) -> FastTrainer:
        torch.manual_seed(0)
        model = build_model(
            AffinityArguments(
                encoders=folders,
                tower_inputs=["heavy,light", "antigen"],
                tower_training=list(training or ("frozen", "frozen")),
                head_sizes=[8],
            ),
            COLUMNS,
        )
        args = FastTrainingArguments(
            str(tmp_path_factory.mktemp("run")), use_cpu=True, report_to="none", disable_tqdm=True, seed=5
        )
        return FastTrainer(model, args, build_collator(model, DataArguments(sequence_columns=COLUMNS)))

    return make


def random_rows(num_rows: int, seed: int, heavy=HEAVY) -> dict[str, list[str]]:
    """Antigens of 8 to 14 random residues, against few heavy chains."""
    generator = np.random.default_rng(seed)
    return {
        "heavy": [heavy[i] for i in generator.integers(0, len(heavy), num_rows)],
        "light": ["DIQMTQ"] * num_rows,
        "antigen": ["".join(generator.choice(list(LETTERS), generator.integers(8, 15))) for _ in range(num_rows)],
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
        sign = np.where(np.array(rows["heavy"]) == HEAVY[0], 1, -1)
        splits[name] = Dataset.from_dict({**rows, "label": (8 + sign * 5 * (values @ weights)).tolist()})
    return splits


def test_ridge_on_embeddings_per_heavy_wins_where_each_heavy_reads_the_embedding_its_own_way(make_trainer, embedded):
    fitted = fit_baselines(make_trainer(), embedded, "test", None)
    name, errors = best(fitted, embedded["test"])
    assert name == "ridge on embeddings per heavy"
    assert errors[name] < 0.1 * min(error for other, error in errors.items() if other != name)
    assert fitted.facts[name]["num_partners"] == 2
    assert fitted.notes == []


@pytest.mark.nightly
def test_of_an_encoder_that_trained_the_pretrained_embeddings_are_the_baseline(make_trainer, embedded):
    frozen = fit_baselines(make_trainer(), embedded, "test", None)
    trainer, asked = make_trainer("frozen", "full"), embedded["test"]["antigen"][:3]
    published = trainer.encode_distinct("antigen", asked)
    with torch.no_grad():  # as if it had been trained far away from what it was
        for parameter in trainer.model.encoders["1"].parameters():
            parameter.add_(torch.full_like(parameter, 0.3) * parameter.requires_grad)
    before, own = torch.random.get_rng_state(), trainer.encode_distinct("antigen", asked)
    fitted = fit_baselines(trainer, embedded, "test", None)
    for name in ("ridge on embeddings", "ridge on embeddings per heavy"):
        np.testing.assert_allclose(fitted.predictions[name], frozen.predictions[name], atol=1e-3)
    assert fitted.notes == ["Ridge on embeddings reads the encoders as they were before training."]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(trainer.encode_distinct("antigen", asked), own)
    assert not torch.allclose(own, published, atol=0.1)  # the broken twin: its own embeddings are others


def test_an_encoder_that_cannot_be_read_again_leaves_its_ridge_out_with_the_reason(make_trainer, embedded, folders):
    trainer = make_trainer("frozen", "full")
    shutil.move(folders[1], folders[1] + "-away")
    try:
        scored = score_split(trainer, embedded, "test", None, None)
    finally:
        shutil.move(folders[1] + "-away", folders[1])
    assert not any("embeddings" in name for name in scored.scores)
    assert "one-hot ridge" in scored.scores or "3-mer ridge" in " ".join(scored.scores)
    (note,) = [note for note in scored.notes if note.startswith("No ridge on embeddings was fitted")]
    assert folders[1] in note
    assert note in scored.table().splitlines()


def test_nearest_neighbours_win_where_families_share_a_value_that_no_sum_of_residues_gives(make_trainer):
    generator = np.random.default_rng(0)
    parents = ["".join(generator.choice(list("ACDE"), 12)) for _ in range(60)]
    values = generator.normal(8, 2, 60)

    def family_rows(num_rows: int, seed: int) -> Dataset:
        draw = np.random.default_rng(seed)
        family = draw.integers(0, 60, num_rows)
        mutated = [list(parents[i]) for i in family]
        for one in mutated:
            one[draw.integers(0, 12)] = draw.choice(list("ACDE"))
        rows = {"heavy": [HEAVY[0]] * num_rows, "light": ["DIQMTQ"] * num_rows, "antigen": map("".join, mutated)}
        return Dataset.from_dict({**rows, "antigen": list(rows["antigen"]), "label": values[family].tolist()})

    splits = {"train": family_rows(400, 1), "validation": family_rows(80, 2), "test": family_rows(100, 3)}
    fitted = fit_baselines(make_trainer(), splits, "test", None)
    name, errors = best(fitted, splits["test"])
    assert name == "nearest neighbours"
    assert errors[name] < 0.5 * errors["one-hot ridge"]
    assert not any(" per " in other for other in errors)  # one column varies: there is no partner, and nothing to say
    assert fitted.notes == []


def test_too_few_rows_for_each_partner_leave_its_ridges_out_and_say_so(make_trainer):
    heavy = tuple(f"EVQLV{letter}SGG" for letter in "ACDEF")
    parts = (("train", 400, 1), ("validation", 60, 2), ("test", 60, 3))
    splits = {}
    for name, num_rows, seed in parts:
        rows = random_rows(num_rows, seed, heavy)
        splits[name] = Dataset.from_dict({**rows, "label": [float(one.count("A")) for one in rows["antigen"]]})
    fitted = fit_baselines(make_trainer(), splits, "test", None)
    assert not any(" per " in name for name in fitted.predictions)
    assert fitted.notes == [
        "No baseline by partner was fitted: 5 partners or more over 400 training rows; at most 50 with 100 rows each "
        "on average are needed."
    ]


def test_partners_are_antigens_where_antibodies_are_many_and_both_chains_where_they_are_few() -> None:
    num_rows = 600
    many = [[f"H{i}" for i in range(num_rows)], [f"L{i // 2}" for i in range(num_rows)]]
    antigen = [f"A{i % 3}" for i in range(num_rows)]
    partner, why = find_partner([*many, antigen])
    assert partner is not None
    assert (partner.columns, partner.main, partner.num_partners, why) == ((2,), (0, 1), 3, "")
    few = [[f"H{i % 2}" for i in range(num_rows)], [f"L{i % 2}" for i in range(num_rows)]]
    partner, _ = find_partner([*few, many[0]])
    assert partner is not None
    assert (partner.columns, partner.main, partner.num_partners) == ((0, 1), (2,), 2)
    assert find_partner([many[0], many[1]])[1].startswith("300 partners or more over 600 training rows")
    assert find_partner([many[0], ["L"] * num_rows]) == (None, "")


def stacked(trainer, splits):
    facts = calibrate_model(trainer, "stack", splits["validation"], ridge=fit_ridge(trainer, splits))
    return facts["calibration"], describe_calibration(facts)[0], score_split(trainer, splits, "test", None, None)


@pytest.mark.nightly
def test_a_ridge_per_heavy_that_wins_is_what_the_model_keeps_and_saves(make_trainer, embedded, tmp_path):
    trainer = make_trainer()
    calibration, said, scored = stacked(trainer, embedded)
    assert calibration["partners"] == {"inputs": ["heavy"], "number": 2}
    assert "a ridge on its embeddings, one for each of 2 values of heavy" in said
    assert not scored.verdict.is_better
    values = {name: one["rmse"]["value"] for name, one in scored.scores.items()}
    assert values["model"] == pytest.approx(values["ridge on embeddings per heavy"], rel=0.05)
    assert values["model"] < 0.1 * values["ridge on embeddings"]
    trainer.save_model(str(tmp_path))
    predictor = AffinityPredictor.from_pretrained(tmp_path, device="cpu")
    np.testing.assert_allclose(predictor.predict(embedded["test"]), scored.predictions, atol=1e-3)
    # An antibody that training has not seen is predicted by the ridge of all rows.
    strangers = embedded["test"].select(range(5)).map(lambda row: {"heavy": "EVQLVQSGG"})
    pooled = fit_ridge(trainer, embedded).pooled.predict(pooled_features(trainer, strangers))
    np.testing.assert_allclose(predictor.predict(strangers), pooled, atol=1e-3)


@pytest.mark.nightly
def test_a_partner_that_validation_lacks_has_weights_of_its_own_where_its_training_rows_are_many(
    make_trainer, embedded
):
    """Of the second heavy chain no row is in validation: its penalty is the first one's."""
    rows = embedded["validation"]
    first = rows.select([i for i, heavy in enumerate(rows["heavy"]) if heavy == HEAVY[0]])
    fitted = fit_baselines(make_trainer(), {**embedded, "validation": first}, "test", None)
    errors = best(fitted, embedded["test"])[1]
    assert errors["ridge on embeddings per heavy"] < 0.2 * errors["ridge on embeddings"]


def test_a_form_of_head_that_the_weights_are_not_of_is_refused(make_trainer, embedded, tmp_path):
    trainer = make_trainer()
    trainer.model.set_head("product", [4], 0.0)
    trainer.save_model(str(tmp_path))
    (tmp_path / "model_manifest.json").unlink(missing_ok=True)
    AffinityPredictor.from_pretrained(tmp_path, device="cpu")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_form": None}))
    with pytest.raises(ArgumentError, match="describes another head than the weights are of"):
        AffinityPredictor.from_pretrained(tmp_path, device="cpu")
