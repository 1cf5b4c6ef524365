"""`hf-ext train` on each kind of label: what it took the column for, what it leaves behind, and what chance leaves."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commands
import numpy as np
import pandas as pd
import pytest

from hf_ext.errors import ArgumentError, DataError, RequirementsFailed
from hf_ext.heads import resolve_head
from hf_ext.labels import ONE_NUMBER, make_kind
from hf_ext.property import TASK, AffinityArguments
from hf_ext.property.building import resolve_residue_steps
from hf_ext.reporting import read_run

pytestmark = pytest.mark.internals
LETTERS = np.array([*"ACDEFGHIKLMNPQRSTVWY"])
QUICK = (
    "--num_train_epochs 12 --learning_rate 0.01 --per_device_train_batch_size 16 --head_sizes 16 --head_dropout 0 "
    "--disable_tqdm true --use_cpu true --without encoder_precision --split_sizes 0.5 0.2 0.3"
)
CLASSES = ("low", "middle", "high")
FLAGS = {"numbers": "--label_column warm cold", "residues": "--mask_column seen", "sets": "--task multilabel"}


def make_table(kind: str, path: Path, is_shuffled: bool = False) -> None:
    """240 proteins of 8 to 15 residues; which residues they have decides the label."""
    generator = np.random.default_rng(0)
    numbers = [generator.integers(0, 20, 8 + i % 8) for i in range(240)]
    strength = np.array([np.mean(one) for one in numbers]) - 9.5
    rows: dict[str, Any] = {"sequence": ["".join(LETTERS[one]) for one in numbers]}
    if kind == "classes":
        rows["label"] = [CLASSES[i] for i in np.digitize(strength, [-0.7, 0.7])]
    elif kind == "numbers":
        rows["warm"] = strength
        rows["cold"] = [None if i % 4 == 0 else 1000 - 50 * value for i, value in enumerate(strength)]
    elif kind == "lists":
        rows["label"] = [[round(value, 3), round(5 - value, 3)] for value in strength]
    elif kind == "quoted":
        chosen = [["big; or, so"], ["small", "big; or, so"], ["small"]]
        rows["label"] = [chosen[i] for i in np.digitize(strength, [-0.7, 0.7])]
    elif kind == "sets":
        is_late = [np.mean(one >= 15) > 0.25 for one in numbers]
        named = [{"big": big, "late": late} for big, late in zip(strength > 0, is_late)]
        rows["label"] = [";".join(name for name, has in one.items() if has) or "-" for one in named]
    elif kind == "residues":
        rows["label"] = ["".join(np.array([*"HEC"])[one % 3]) for one in numbers]
        rows["seen"] = ["0" + "1" * (len(one) - 1) for one in numbers]
    else:
        rows["label"] = [" ".join(f"{value:.1f}" for value in one / 2) for one in numbers]
    table = pd.DataFrame(rows)
    if is_shuffled:
        orders = {length: [*of.index] for length, of in table.groupby(table["sequence"].str.len())}
        order = np.concatenate([generator.permutation(of) for of in orders.values()])
        table.loc[np.concatenate([*orders.values()]), "sequence"] = table["sequence"][order].to_numpy()
    table.to_csv(path, index=False)


@pytest.fixture(scope="module")
def train(tmp_path_factory, demo_encoders) -> Callable[..., tuple[dict[str, Any], Path]]:
    """Trains once on a table of this kind; its results, and its folder."""
    root, done = tmp_path_factory.mktemp("kinds"), {}

    def trained(kind: str, words: str = "", is_shuffled: bool = False) -> tuple[dict[str, Any], Path]:
        key = kind, words, is_shuffled
        if key not in done:
            folder = tmp_path_factory.mktemp("run")
            make_table(kind, table := root / f"{kind}{is_shuffled}.csv", is_shuffled)
            own = f"--dataset_name {table} --output_dir {folder} --encoders {demo_encoders[1]}"
            given = f"{own} --embedding_cache_dir {root}/cache {QUICK} {FLAGS.get(kind, '')} {words}"
            done[key] = (TASK.main(given.split()), folder)
        return done[key]

    return trained


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def are_close(one: str, other: str) -> bool:
    """Cells with the same text, or with numbers that differ by rounding."""
    try:
        return bool(np.allclose([*map(float, one.split())], [*map(float, other.split())], 1e-3, 1e-3))
    except ValueError:
        return one == other


def scores_of(results: dict[str, Any]) -> dict[str, float]:
    return {name: score["value"] for name, score in results["test"]["scores"]["model"].items()}


DECIDED_BY = {"classes": "mcc", "numbers": "nrmse", "sets": "f1_max", "residues": "accuracy", "profile": "rmse"}
READ_AS = {
    "classes": "(high, low, middle) (--task multilabel if a cell may name several, separated by ;)",
    "numbers": "is read as 2 numbers",
    "sets": "Training labels: big in",
    "residues": "is read as one of 3 classes (C, E, H) for each residue",
    "profile": "is read as a number for each residue",
}


@pytest.mark.parametrize("kind", DECIDED_BY)
def test_a_run_says_what_it_took_the_label_for_and_is_compared_in_the_metric_of_that_kind(kind, train):
    results, folder = train(kind)
    log = (folder / "run.log").read_text()
    assert READ_AS[kind] in log
    assert f"verdict in {DECIDED_BY[kind]}" in log
    assert results["verdict"]["outcome"] != "undefined"
    assert "constant" not in results["verdict"]["text"]
    assert results["verdict"]["comparison"]["metric"] == DECIDED_BY[kind]
    model = results["test"]["scores"]["model"]
    assert model[DECIDED_BY[kind]]["low"] <= model[DECIDED_BY[kind]]["value"] <= model[DECIDED_BY[kind]]["high"]
    assert len(results["test"]["baselines"]) >= 2
    assert results["verdict"]["text"] in (folder / "README.md").read_text().replace("\\", "")
    assert "<svg" in (folder / "report.html").read_text()


@pytest.mark.parametrize("kind", ["classes", "residues"])
def test_shuffled_labels_are_not_better_than_what_is_trivial(kind, train):
    results, _ = train(kind, "--num_train_epochs 2", is_shuffled=True)
    assert results["verdict"]["is_better"] is not True
    assert results["verdict"]["text"].startswith(("No better than", "Not shown to be better"))


def test_predictions_of_classes_are_names_and_probabilities_and_the_report_shows_which_is_taken_for_which(train):
    results, folder = train("classes")
    rows = read(folder / "predictions.csv")
    columns = [f"probability_{name}" for name in ("high", "low", "middle")]
    assert [*rows[0]] == ["sequence", "source_row", "label", "prediction", *columns]
    for row in rows:
        shares = {name: float(row[f"probability_{name}"]) for name in CLASSES}
        assert row["prediction"] == max(shares, key=shares.__getitem__)
        assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
    right = np.mean([row["prediction"] == row["label"] for row in rows])
    assert scores_of(results)["accuracy"] == pytest.approx(right)
    assert results["test"]["classes"]["low"]["support"] == sum(row["label"] == "low" for row in rows)
    hits = sum(row["label"] == row["prediction"] == "low" for row in rows)
    called = sum(row["prediction"] == "low" for row in rows)
    assert results["test"]["classes"]["low"]["precision"] == pytest.approx(hits / called)
    assert (folder / "confusion.png").is_file()
    assert not (folder / "scatter.png").exists()
    report, card = (folder / "report.html").read_text(), (folder / "README.md").read_text()
    assert "Measured classes and what was predicted for them" in report
    assert "All 3 classes" in report
    assert "- text-classification" in card
    assert "confusion.png" in card


def test_predictions_of_other_kinds_are_columns_sets_letters_and_numbers(train):
    rows = read(train("numbers")[1] / "predictions.csv")
    assert [*rows[0]][2:] == ["label_warm", "label_cold", "prediction_warm", "prediction_cold"]
    assert {row["label_cold"] == "" for row in rows} == {True, False}
    assert abs(np.mean([float(row["prediction_cold"]) for row in rows]) - 1000) < 50
    rows = read(train("sets")[1] / "predictions.csv")
    assert {row["label"] for row in rows} == {"-", "big", "late", "big;late"}
    for row in rows:
        named = [name for name in ("big", "late") if float(row[f"probability_{name}"]) > 0.5]
        assert row["prediction"] == (";".join(named) or "-")
    rows = read(train("lists")[1] / "predictions.csv")
    assert [*rows[0]][2:] == ["label_label_1", "label_label_2", "prediction_label_1", "prediction_label_2"]
    assert float(rows[0]["label_label_1"]) + float(rows[0]["label_label_2"]) == pytest.approx(5)
    rows = read(train("quoted")[1] / "predictions.csv")
    assert {row["label"] for row in rows} == {"small", '["big; or, so"]', '["big; or, so", "small"]'}
    rows = read(train("residues")[1] / "predictions.csv")
    assert all(len(row["prediction"]) == len(row["sequence"]) == len(row["label"]) for row in rows)
    assert {row["label"][0] for row in rows} == {"?"}
    assert {*"".join(row["prediction"] for row in rows)} == {*"HEC"}
    rows = read(train("profile")[1] / "predictions.csv")
    assert all(len(row["prediction"].split()) == len(row["sequence"]) for row in rows)
    assert float(rows[0]["label"].split()[0]) in {number / 2 for number in range(20)}


@pytest.mark.parametrize("kind", [*DECIDED_BY, "lists", "quoted"])
def test_a_model_predicts_and_is_scored_as_its_run_did(kind, train, tmp_path):
    results, folder = train(kind)
    listed = read_run(folder).predictions
    assert listed is not None
    ran = read(folder / "predictions.csv")
    pd.DataFrame({"sequence": [row["sequence"] for row in ran]}).to_csv(tmp_path / "new.csv", index=False)
    given = f"--model {folder} --dataset_name {tmp_path}/new.csv --output {tmp_path}/out.csv --use_cpu true"
    commands.predict(given.split())
    for row, again in zip(ran, read(tmp_path / "out.csv"), strict=True):
        for name in again.keys() - {"sequence", "source_row"}:
            assert are_close(again[name], row[name])
    both = commands.evaluate(f"--models {folder} {folder}/predictions.csv --test_of {folder} --use_cpu true".split())
    for name, value in scores_of(results).items():
        assert both["scores"][folder.name][name]["value"] == pytest.approx(value, rel=1e-3, abs=1e-3)
    assert both["verdicts"]["predictions.csv"]["outcome"] == "no difference"


def test_metrics_of_the_kind_choose_the_checkpoint_and_are_required(train):
    results, _ = train("classes", "--metric_for_best_model accuracy --early_stopping_patience 2 --require mcc>=0.1")
    assert results["verdict"]["comparison"]["metric"] == "accuracy"
    assert "accuracy" in results["best"]
    assert [one["passed"] for one in results["requirements"]] == [True]
    with pytest.raises(RequirementsFailed, match="mcc is"):
        train("classes", "--num_train_epochs 1 --require mcc>=0.999")
    with pytest.raises(ArgumentError, match=r"metric_for_best_model='spearman': allowed are .*mcc"):
        train("classes", "--metric_for_best_model spearman")


@pytest.mark.parametrize("words", ["--loss tobit", "--binder_threshold 9"])
def test_what_is_for_one_number_per_row_is_refused(words, train, tmp_path):
    with pytest.raises(ArgumentError, match=words.split()[0]):
        train("classes", words)


def test_several_numbers_are_judged_by_a_metric_that_a_constant_lacks(train):
    results, _ = train("numbers", "--metric_for_best_model spearman --num_train_epochs 1")
    assert "Spearman" in results["verdict"]["text"]


def test_columns_are_those_of_the_model_in_any_order_and_lines_of_a_csv_are_found_by_an_id(train, tmp_path):
    _, folder = train("numbers")
    make_table("numbers", tmp_path / "rows.csv")
    rows = pd.read_csv(tmp_path / "rows.csv").assign(id=[f"p{i}" for i in range(240)])
    rows.to_csv(tmp_path / "rows.csv", index=False)
    commands.predict(
        f"--model {folder} --dataset_name {tmp_path}/rows.csv --output {tmp_path}/out.csv --use_cpu true".split()
    )
    out = pd.read_csv(tmp_path / "out.csv")[["id", "prediction_warm", "prediction_cold"]]
    out.sample(frac=1, random_state=0).to_csv(tmp_path / "other.csv", index=False)
    given = f"--models {folder} {tmp_path}/other.csv --dataset_name {tmp_path}/rows.csv --use_cpu true --id_column id"
    scores = [
        commands.evaluate([*given.split(), "--label_column", *names])["scores"]
        for names in (["warm", "cold"], ["cold", "warm"])
    ]
    for names in scores:
        mine, other = (one["nrmse"]["value"] for one in names.values())
        assert mine == pytest.approx(other, rel=1e-3)
    assert scores[0] == scores[1]


def test_an_interval_around_a_class_is_refused(train, tmp_path):
    _, folder = train("classes")
    (tmp_path / "new.csv").write_text("sequence\nMKTAYIAK\n")
    given = f"--model {folder} --dataset_name {tmp_path}/new.csv --output {tmp_path}/out.csv --interval 0.9"
    with pytest.raises(ArgumentError, match="a model of one number per row"):
        commands.predict(given.split())


def test_models_of_other_labels_are_not_compared(train):
    folders = [train(kind)[1] for kind in ("classes", "residues")]
    with pytest.raises(ArgumentError, match="compare models of the same labels"):
        commands.evaluate(f"--models {folders[0]} {folders[1]} --test_of {folders[0]}".split())


def test_a_csv_with_the_probabilities_of_some_classes_alone_is_refused(train, tmp_path):
    _, folder = train("classes")
    table = pd.read_csv(folder / "predictions.csv").drop(columns="probability_low")
    table.to_csv(tmp_path / "some.csv", index=False)
    with pytest.raises(DataError, match="columns of some outputs alone; probability_low are missing"):
        commands.evaluate(f"--models {tmp_path}/some.csv --test_of {folder}".split())


def test_residues_behind_what_a_model_reads_are_not_scored_as_if_they_were_predicted(train, tmp_path):
    results, folder = train("residues", "--max_length 12 --too_long truncate")
    make_table("residues", tmp_path / "new.csv")
    table = pd.read_csv(tmp_path / "new.csv", dtype=str)
    table.apply(lambda column: column.str[:10]).to_csv(tmp_path / "cut.csv", index=False)
    whole, cut = (
        commands.evaluate(
            f"--models {folder} --dataset_name {tmp_path}/{name}.csv --label_column label --mask_column seen "
            "--use_cpu true".split()
        )
        for name in ("new", "cut")
    )
    assert whole["scores"] == cut["scores"]
    both = commands.evaluate(f"--models {folder} {folder}/predictions.csv --test_of {folder} --use_cpu true".split())
    for model in both["models"]:
        for name, value in scores_of(results).items():
            assert both["scores"][model][name]["value"] == pytest.approx(value, rel=1e-3, abs=1e-3)


def test_the_record_is_json_and_names_the_kind(train):
    _, folder = train("sets")
    kind = json.loads((folder / "all_results.json").read_text())["label_kind"]
    assert kind == {"task": "multilabel", "columns": ["label"], "names": ["big", "late"]}


@pytest.mark.parametrize(
    ("num_rows", "explicit", "rows", "epochs"),
    [
        (10_000, (), 16, 3),
        (1_600, (), 16, 15),  # 1,500 steps
        (100, (), 16, 30),
        (None, (), 16, 30),
        (10_000, ("num_train_epochs",), 16, 30),
        (16_000, ("per_device_train_batch_size",), 32, 3),
        (1_600, ("effective_batch_size",), 32, 4),  # of 4 rows a step
        (10_000, ("frozen",), 16, 10),  # 6,000 steps
    ],
)
def test_residues_train_in_small_batches_for_few_epochs_unless_asked_otherwise(num_rows, explicit, rows, epochs):
    settings = {"num_train_epochs": 30, "per_device_train_batch_size": 32, "cached_batch_size": 1024}
    args = SimpleNamespace(**settings, gradient_accumulation_steps=1, world_size=1, explicit_fields={*explicit})
    trains = "frozen" not in explicit
    args.use_peft = False
    args.effective_batch_size = 4 if "effective_batch_size" in explicit else None
    assert resolve_residue_steps(args, ONE_NUMBER, num_rows, trains) == ""
    assert settings.items() <= vars(args).items()
    resolve_residue_steps(args, make_kind("residue_classification", ("label",), ("C", "H")), num_rows, trains)
    assert (args.per_device_train_batch_size, args.num_train_epochs) == (rows, epochs)


@pytest.mark.parametrize(
    ("how", "explicit", "sizes"),
    [("frozen", set(), [256]), ("lora", set(), [1024, 512, 256, 128]), ("frozen", {"head_sizes"}, [7])],
)
def test_residues_of_frozen_encoders_have_a_small_network_unless_asked_otherwise(how, explicit, sizes):
    given = {"head_sizes": [7]} if explicit else {}
    args = AffinityArguments(encoders=["one"], tower_training=[how], **given)
    training = SimpleNamespace(metric_for_best_model="mcc", world_size=1)
    kind = make_kind("residue_classification", ("label",), ("C", "H"))
    assert resolve_head(args, training, explicit, False, kind).startswith("Head: ")
    assert (args.head, args.head_sizes) == ("mlp", sizes)
