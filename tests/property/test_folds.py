"""Folds and seeds: which rows are tested by which run, what the runs give together, and that nothing else is fitted."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from datasets import Dataset

from hf_ext.checkpoints import find_members, find_model
from hf_ext.data import DataArguments, Fold, find_folds, find_whole, splits
from hf_ext.doctor import estimates
from hf_ext.errors import ArgumentError, DataError
from hf_ext.finished import predict
from hf_ext.hardware import detect_hardware
from hf_ext.labels import average
from hf_ext.plan import make_plan
from hf_ext.property import TASK, AffinityArguments, AffinityPredictor, repeats
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals
LETTERS = np.array([*"ACDEFGHIKLMNPQRSTVWY"])
QUICK = (
    "--num_train_epochs 2 --learning_rate 0.01 --per_device_train_batch_size 16 --head_sizes 8 --head_dropout 0 "
    "--layer last --disable_tqdm true --use_cpu true --without encoder_precision --split_sizes 0.7 0.2 0.1 "
    "--label_column label"
)


def make_rows(num: int = 96) -> pd.DataFrame:
    """Proteins of 8 to 11 residues, which decide the label, of 12 families at three sites, in no order."""
    generator = np.random.default_rng(0)
    numbers = [generator.integers(0, 20, 8 + i % 4) for i in range(num)]
    family = generator.permutation(num) % 12
    rows = {"sequence": ["".join(LETTERS[one]) for one in numbers], "label": [np.mean(one) for one in numbers]}
    return pd.DataFrame({**rows, "family": [f"f{i}" for i in family], "site": [*np.array([*"abc"])[family % 3]]})


def as_rows(args: dict[str, Any], rows: pd.DataFrame) -> tuple[DataArguments, Dataset]:
    by, tested = args.pop("fold")
    data_args = DataArguments("rows.csv", **args)
    data_args.fold = Fold(by, tested)
    return data_args, Dataset.from_pandas(rows)


# --- which rows are tested ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [None, "group:family", "cluster"])
@pytest.mark.parametrize("by", ["site", "3"])
def test_each_row_is_tested_once_and_no_group_is_on_two_sides(by, split):
    rows = make_rows()
    args, data = as_rows({"split": split, "fold": (by, None)}, rows)
    groups = find_whole(data, args)
    folds = find_folds(data, args, groups)
    tested: list[str] = []
    for fold in sorted({*folds}):
        args.fold = Fold(by, fold)
        found, report = splits.split_rows(data, args)
        assert report["rule"] == f"folds:{by}"
        sides = {name: {*found[name]["sequence"]} for name in ("train", "validation", "test")}
        assert sum(map(len, sides.values())) == len(rows)
        assert len(sides["validation"]) == pytest.approx((len(rows) - len(sides["test"])) / 9, abs=4)
        family = {name: {*found[name]["family"]} for name in sides}
        if split == "group:family":
            assert family["train"] & family["validation"] == set()
            assert family["test"] & (family["train"] | family["validation"]) == set()
        tested += found["test"]["sequence"]
    assert sorted(tested) == sorted(rows["sequence"])
    args.fold = Fold(by)
    found, _ = splits.split_rows(data, args)
    assert {*found} == {"train", "validation"}
    assert sum(map(len, found.values())) == len(rows)


def test_columns_and_numbers_that_are_no_folds_are_refused():
    rows = make_rows()
    rows["one"] = "x"
    rows["many"] = [*map(str, range(len(rows)))]
    for by, said in {"one": "1 folds", "many": "96 folds", "97": "97: there are 96 rows", "1": "1 folds"}.items():
        args, data = as_rows({"fold": (by, None)}, rows)
        with pytest.raises(DataError, match=said):
            find_folds(data, args, find_whole(data, args))
    args, data = as_rows({"fold": ("site", "a")}, rows.assign(_split_file="train"))
    with pytest.raises(DataError, match="one file"):
        splits.split_rows(data, args)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--folds site --streaming", "--folds site does not go with --streaming"),
        ("--folds site --split_column part", "--split_column"),
        ("--num_seeds 2 --loss ranking", "--num_seeds 2 does not go with --loss ranking"),
        ("--folds 3 --init_head_from x", "whose head has seen rows that are tested"),
        ("--folds 3 --distill_from x", "whose teacher has seen rows"),
        ("--num_seeds 2 --final_model all", "--final_model all is for --folds"),
        ("--num_seeds 2 --resume checkpoint-3", "a checkpoint, which is of one run"),
        ("--num_seeds 0", "num_seeds"),
    ],
)
def test_what_does_not_go_with_several_runs_is_said_at_once(words, said, tmp_path):
    given = f"--dataset_name {tmp_path}/rows.csv --output_dir {tmp_path}/out {words}"
    with pytest.raises(ArgumentError, match=said):
        TASK.main(given.split())
    assert not (tmp_path / "out").exists()


# --- numbers --------------------------------------------------------------------------------------------------------


def test_spreads_are_those_worked_out_by_hand():
    assert repeats.find_spread(np.array([[1.0, 3.0]])) == {
        "mean": 2,
        "std_folds": None,
        "std_seeds": 2**0.5,
        "std": 2**0.5,
    }
    assert repeats.find_spread(np.array([[1.0], [3.0]])) == {
        "mean": 2,
        "std_folds": 2**0.5,
        "std_seeds": None,
        "std": 2**0.5,
    }
    # Means 2 and 6, variance 8; seeds within folds 2: 8 - 2 / 2 of folds, and 2 of seeds.
    both = repeats.find_spread(np.array([[1.0, 3.0], [5.0, 7.0]]))
    assert both == pytest.approx({"mean": 4, "std_folds": 8**0.5, "std_seeds": 2**0.5, "std": 3})
    assert repeats.find_spread(np.array([[1.0, np.nan]])) == {}


def test_means_of_predictions_and_sums_of_counts():
    assert average([np.array([[0.2, 0.8]]), np.array([[0.6, 0.4]])]).tolist() == [[0.4, 0.6000000000000001]]
    short, long = average([[np.array([1.0]), np.array([2.0, 4.0])], [np.array([3.0]), np.array([4.0, 8.0])]])
    assert (short.tolist(), long.tolist()) == ([2.0], [3.0, 6.0])
    one = {"num": 1, "near": [{"identity": 0.9, "num_rows": 2}], "compared": "test", "repeated": [[1, 2]]}
    two = {"num": 4, "near": [{"identity": 0.9, "num_rows": 3}], "compared": "test", "repeated": [[5, 6]]}
    summed = {"num": 5, "near": [{"identity": 0.9, "num_rows": 5}], "compared": "test", "repeated": [[1, 2], [5, 6]]}
    assert repeats.add_up([one, two]) == summed
    phases = [{"train": {"wall_s": 1.5}}, {"train": {"wall_s": 2.0}, "encode": {"wall_s": 0.5}}]  # the second encodes
    assert repeats.add_up(phases) == {"train": {"wall_s": 3.5}, "encode": {"wall_s": 0.5}}


def test_a_group_that_lies_in_several_folds_is_one():
    folds = [repeats.Part(f"fold_{name}/seed_0", Fold("site", name), 0) for name in "ab"]
    columns = {
        "family": ["f1", "f2", "f1"],
        "held_out: group": ["fold_a/seed_0 0", "fold_a/seed_0 1", "fold_b/seed_0 0"],
    }
    assert repeats.find_resampled(pa.table(columns), folds, {"family"}).num_groups == 2
    assert repeats.find_resampled(pa.table(columns), folds, {"cluster"}).num_groups == 3  # numbers of a run


# --- a whole command ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command(tmp_path_factory, demo_encoders) -> list[str]:
    root = tmp_path_factory.mktemp("folds")
    make_rows().to_csv(root / "rows.csv", index=False)
    given = f"--dataset_name {root}/rows.csv --encoders {demo_encoders[1]} --embedding_cache_dir {root}/cache"
    return [
        *given.split(),
        *QUICK.split(),
        *f"--folds 2 --split group:family --num_seeds 2 --output_dir {root}/out".split(),
    ]


@pytest.fixture(scope="module")
def done(command) -> tuple[dict[str, Any], Path]:
    return TASK.main([*command, "--head", "mlp"]), Path(command[-1])


RUNS = ("fold_1/seed_42", "fold_1/seed_43", "fold_2/seed_42", "fold_2/seed_43")


def test_each_model_of_a_folder_reads_numbers_as_its_own_training_rows_have_them(tmp_path, demo_encoders):
    rows = make_rows(48)
    rows["amount"] = np.arange(48) * rows["site"].map({"a": 1, "b": 100, "c": 10_000})
    rows.to_csv(tmp_path / "rows.csv", index=False)
    given = f"--dataset_name {tmp_path}/rows.csv --embedding_cache_dir {tmp_path}/cache".split()
    words = (
        f"--encoders {demo_encoders[1]} --numeric_columns amount --folds site --head mlp --output_dir {tmp_path}/out"
    )
    TASK.main([*given, *words.split(), *QUICK.split()])
    found = {}
    for name in ("", "fold_a/seed_42", "fold_b/seed_42", "fold_c/seed_42"):
        output = ["--model", str(tmp_path / "out" / name), "--output", str(tmp_path / "new.csv"), "--use_cpu", "true"]
        predict.main([*given, *output])
        found[name] = pd.read_csv(tmp_path / "new.csv")["prediction"]
    whole = found.pop("")
    assert np.allclose(whole, sum(found.values()) / 3, atol=1e-5)
    assert np.std([*found.values()], axis=0).max() > 1e-3


def test_all_rows_are_predicted_in_their_order_by_the_mean_of_models_that_had_not_seen_them(done):
    results, folder = done
    rows = make_rows()
    found = pd.read_csv(folder / "predictions.csv")
    assert [*found["source_row"]] == [*range(2, 2 + len(rows))]
    assert [*found["sequence"]] == [*rows["sequence"]]
    assert np.allclose(found["label"], rows["label"], atol=1e-5)
    of_runs = [pd.read_csv(folder / run / "predictions.csv").set_index("source_row") for run in RUNS]
    for fold, pair in (("1", of_runs[:2]), ("2", of_runs[2:])):
        mean = (pair[0]["prediction"] + pair[1]["prediction"]) / 2
        own = found[found["fold"].astype(str) == fold].set_index("source_row")["prediction"]
        assert [*own.index] == sorted(mean.index)
        assert np.allclose(own, mean.loc[own.index])
    rmse = results["test"]["scores"]["model"]["rmse"]
    assert rmse["value"] == pytest.approx(np.sqrt(np.mean((found["prediction"] - found["label"]) ** 2)), rel=1e-5)
    assert (rmse["interval_by"], rmse["num_units"], rmse["n"]) == ("family", 12, 96)
    assert results["verdict"]["num_rows"] == 96
    assert "ridge on embeddings" in results["test"]["baselines"]
    assert results["data"]["leaks"]["row"]["num_test_rows"] == 96


def test_results_report_and_card_have_each_fold_and_seed_and_their_spread(done):
    results, folder = done
    found = results["repeats"]
    of_runs = [json.loads((folder / run / "all_results.json").read_text())["test"]["scores"]["model"] for run in RUNS]
    table = np.array([one["rmse"]["value"] for one in of_runs]).reshape(2, 2)
    assert found["spread"]["rmse"]["mean"] == pytest.approx(table.mean())
    assert found["spread"]["rmse"]["std_seeds"] == pytest.approx(np.sqrt(table.var(1, ddof=1).mean()))
    assert [one["seed"] for one in found["seeds"]] == [42, 43]
    assert [(one["fold"], one["num_rows"]) for one in found["folds"]] == [("1", 48), ("2", 48)]
    assert "RMSE of one model" in (folder / "README.md").read_text()
    assert "Each fold" in (folder / "report.html").read_text()


def test_the_time_of_each_run_is_its_own_and_that_of_all_is_their_sum(done):
    results, folder = done
    costs = [json.loads((folder / run / "all_results.json").read_text())["costs"] for run in RUNS]
    walls = [one["wall_s"] for one in costs]
    spent = [sum(phase["wall_s"] for phase in one["phases"].values()) for one in costs]
    assert walls == pytest.approx(spent, abs=0.1)
    assert max(walls[1:]) < 0.45 * sum(walls)  # counted from the start of the process, the last had most of it
    assert results["costs"]["wall_s"] == pytest.approx(sum(walls), abs=0.4)
    assert sum(phase["wall_s"] for phase in results["costs"]["phases"].values()) == pytest.approx(sum(walls), abs=0.4)


def test_final_models_are_a_phase_of_their_own(done, command, tmp_path):
    tested, folder = done
    out = Path(shutil.copytree(folder, tmp_path / "out"))
    state = json.loads((out / "repeats.json").read_text())
    for seed in ("seed_42", "seed_43"):  # as if these were of all rows
        shutil.copytree(out / "fold_1" / seed, out / "final" / seed)
        state["finished"].append(f"final/{seed}")
    (out / "repeats.json").write_text(json.dumps(state))
    costs = TASK.main([*command[:-1], str(out), "--head", "mlp", "--final_model", "all"])["costs"]
    final = sum(json.loads((folder / run / "all_results.json").read_text())["costs"]["wall_s"] for run in RUNS[:2])
    assert costs["phases"].pop("final model")["wall_s"] == pytest.approx(final, abs=0.1)
    assert costs["wall_s"] == pytest.approx(tested["costs"]["wall_s"] + final)
    assert costs["phases"] == tested["costs"]["phases"]


def test_frozen_encoders_run_once_for_all_runs(done):
    _, folder = done
    plans = [json.loads((folder / run / "plan.json").read_text())["decisions"] for run in RUNS]
    evidence = [next(one["evidence"] for one in plan if one["name"] == "embedding_cache") for plan in plans]
    assert [one["num_encoded"] for one in evidence] == [96, 0, 0, 0]


def test_the_folder_predicts_the_mean_and_a_model_that_was_changed_is_refused(done, command, tmp_path):
    _, folder = done
    rows = make_rows(5)[["sequence"]]
    predictor = AffinityPredictor.from_pretrained(folder)
    alone = [AffinityPredictor.from_pretrained(folder / run) for run in RUNS]
    assert np.allclose(predictor.predict(rows), np.mean([one.predict(rows) for one in alone], axis=0), atol=1e-6)
    assert len({id(one.model.encoders["0"]) for one in (predictor, *predictor.others)}) == 1
    with pytest.raises(ArgumentError, match="4 models, whose mean predicts"):
        find_model(folder)
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    weights = copied / RUNS[1] / "model.safetensors"
    saved = weights.read_bytes()
    weights.write_bytes(saved[:-1] + bytes([saved[-1] ^ 1]))
    with pytest.raises(ArgumentError, match="is not what was saved"):
        TASK.main([*command[:-1], str(copied), "--head", "mlp"])
    weights.write_bytes(saved)
    assert [one.relative_to(copied).as_posix() for one in find_members(copied)] == [*RUNS]
    shutil.copy(copied / RUNS[1] / "model_manifest.json", copied / RUNS[0] / "model_manifest.json")
    with pytest.raises(ArgumentError, match="fold_1/seed_42: not what was saved"):
        find_members(copied)
    listed = json.loads((copied / "members.json").read_text())
    (copied / "members.json").write_text(json.dumps({**listed, "members": {"../../elsewhere": "0"}}))
    with pytest.raises(ArgumentError, match="not what was saved"):
        find_members(copied)


def test_finished_runs_are_kept_and_other_arguments_refused(done, command):
    _, folder = done
    before = {path: path.stat().st_mtime_ns for run in RUNS for path in (folder / run).rglob("*")}
    content = (folder / "predictions.csv").read_bytes()
    TASK.main([*command, "--head", "mlp"])
    assert {path: path.stat().st_mtime_ns for run in RUNS for path in (folder / run).rglob("*")} == before
    assert (folder / "predictions.csv").read_bytes() == content
    with pytest.raises(ArgumentError, match=r"4 finished runs of another command: --learning_rate was 0.01, is 0.02"):
        TASK.main([*command, "--head", "mlp", "--learning_rate", "0.02"])
    with pytest.raises(ArgumentError, match="it leaves out fold_1/seed_43, fold_2/seed_43"):
        TASK.main([*command, "--head", "mlp", "--num_seeds", "1"])
    with pytest.raises(ArgumentError, match="holds the runs of --folds or --num_seeds"):
        TASK.main([*command[: command.index("--folds")], "--output_dir", str(folder), "--head", "mlp"])


def test_the_doctor_counts_all_runs_and_encodes_once(command, demo_encoders):
    folder = Path(command[-1]).parent
    data = {"dataset_name": str(folder / "rows.csv"), "embedding_cache_dir": str(folder / "cache")}
    stages = []
    for flags in ({}, {"folds": "3", "num_seeds": 2, "final_model": "all"}):
        args = FastTrainingArguments(output_dir=str(folder / "never"), speedups=["all"], report_to="none")
        model_args = AffinityArguments(encoders=[demo_encoders[1]], **flags)
        dry_run = TASK.dry_run([model_args, DataArguments(data["dataset_name"])], args, detect_hardware("cpu"))
        assert dry_run.problems == []
        stages += dry_run.stages
    assert [stage.num_runs for stage in stages] == [1, 8]
    assert [stage.parts[0].num_distinct for stage in stages] == [96, 96]
    rate = estimates.Rate(1e9, 1e9, "")
    seconds = []
    for stage in stages:
        plan = make_plan(stage.args, stage.model, stage.rows, stage.inputs, detect_hardware("cpu"))
        schedule = estimates.make_schedule(plan, stage)
        seconds.append(dict(estimates.sum_seconds(plan, stage, schedule, [rate])))
    (one_once, one), (eight_once, eight) = (found.values() for found in seconds)
    assert eight_once == pytest.approx(one_once, rel=0.2)  # by the mean length of training rows
    per_step = [span[0] / estimates.make_schedule(plan, stage).steps for span, stage in zip((one, eight), stages)]
    assert per_step[1] == pytest.approx(8 * per_step[0], rel=0.2)
