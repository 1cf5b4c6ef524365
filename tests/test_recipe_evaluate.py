"""`hf-ext evaluate` as users call it: models and given predictions on labelled rows, and on a run's own test rows."""

import csv
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pandas as pd
import pytest
from datasets import Dataset
from locations import ROOT

from hf_ext.errors import ArgumentError, DataError, RequirementsFailed, exit_on_errors
from hf_ext.property import AffinityPredictor, write_predictions

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
GENERATOR = np.random.default_rng(0)
NUM_ROWS = 300
LABELS = np.round(GENERATOR.normal(8, 1, NUM_ROWS), 4)
NOISE = GENERATOR.normal(0, 1, NUM_ROWS)
SEQUENCES = ["".join(LETTERS[i] for i in GENERATOR.integers(0, 20, 12)) for _ in range(NUM_ROWS)]
OLD, NEW = LABELS + 0.8 * NOISE, LABELS + 0.4 * NOISE


def evaluate(*words: Any) -> dict:
    return commands.evaluate([*map(str, words), "--disable_tqdm", "true", "--use_cpu", "true"])


def write(path: Path, **columns: Any) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*(np.asarray(column).tolist() for column in columns.values())))
    return path


@pytest.fixture
def labelled(tmp_path, monkeypatch):
    """Scores files with predictions on a labelled table, both in an empty folder."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.csv", sequence=SEQUENCES, pKd=LABELS)

    def score(*files: Path, words: str = "") -> dict:
        rows = ["--dataset_name", "rows.csv", "--label_column", "pKd"]
        return evaluate("--models", *files, *rows, *words.split())

    return score


def given(name: str, predictions: Any, **columns: Any) -> Path:
    return write(Path(name), source_row=range(2, NUM_ROWS + 2), prediction=predictions, **columns)


def test_the_model_with_half_the_error_is_better_and_the_other_way_round_worse(labelled):
    files = given("old.csv", OLD), given("new.csv", NEW)
    found = labelled(*files)
    assert found["verdicts"]["new.csv"]["outcome"] == "better"
    rmse = found["differences"]["new.csv"]["rmse"]
    assert rmse["improvement"] == pytest.approx(0.4 * np.sqrt(np.mean(NOISE**2)), rel=1e-5)
    assert rmse["is_better"]
    assert labelled(*files[::-1])["verdicts"]["old.csv"]["outcome"] == "worse"


def test_nine_values_are_called_collapsed(labelled, capsys):
    """As one model of users did, of which this was found after its publication."""
    edges = np.quantile(OLD, np.arange(1, 9) / 9)
    nine = np.array([6.5, 6.9, 7.2, 7.6, 8, 8.4, 8.8, 9.2, 9.9])[np.searchsorted(edges, OLD)]
    found = labelled(given("v2.csv", nine), given("new.csv", NEW))
    assert found["collapse"]["v2.csv"]["num_distinct"] == 9
    assert "ALARM, v2.csv: Collapsed: 9 distinct values in 300 predictions" in capsys.readouterr().out
    assert not found["collapse"]["new.csv"]["alarms"]


def test_requirements_are_of_the_later_models_and_fail_with_status_3(labelled, capsys):
    files = given("old.csv", OLD), given("new.csv", NEW)
    found = labelled(*files, words="--binder_threshold 9 --require spearman>=0.80 recall>=0.40 rmse<=0.6")
    assert [one["passed"] for one in found["requirements"]["new.csv"]] == [True, True, True]
    assert "old.csv" not in found["requirements"]
    with pytest.raises(SystemExit) as end, exit_on_errors():
        labelled(*files, words="--require rmse<=0.35 --output all.json")
    assert end.value.code == 3
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith("RequirementsFailed: new.csv: rmse is 0.390 [0.352, 0.426], ")
    assert "RMSE    <=0.35" in printed.out
    assert json.loads(Path("all.json").read_text())["requirements"]["new.csv"][0]["passed"] is False
    with pytest.raises(RequirementsFailed, match=r"^old\.csv: rmse is 0\.780 "):
        labelled(files[0], words="--require rmse<=0.6")


def test_what_cannot_be_scored_is_refused(labelled):
    for words, message in (
        ("--require spearmann>=0.6", "unknown metric 'spearmann'"),
        ("--require recall>=0.4", "recall needs --binder_threshold"),
        ("--metric accuracy", "--metric accuracy: allowed here are spearman, "),
        ("--learning_rate 3", "--learning_rate is a flag of training; evaluate only reads the model"),
    ):
        with pytest.raises((ArgumentError, DataError), match=message):
            labelled(given("old.csv", OLD), words=words)


def test_lines_go_to_the_rows_that_they_name(labelled):
    ordered = labelled(given("old.csv", OLD))["scores"]["old.csv"]
    rows = np.arange(NUM_ROWS)[::-1]
    extra = {"source_row": [*(rows + 2), 999], "prediction": [*OLD[rows], 0.0]}
    assert labelled(write(Path("back.csv"), **extra))["scores"]["back.csv"] == ordered
    assert labelled(write(Path("plain.csv"), prediction=OLD))["scores"]["plain.csv"] == ordered
    assert (
        labelled(write(Path("turned.csv"), prediction=OLD[rows]))["scores"]["turned.csv"] != ordered
    )  # lines are rows


def test_predictions_of_other_rows_are_refused(labelled):
    right = {"source_row": range(2, 302), "prediction": OLD, "score": OLD, "sequence": SEQUENCES, "pKd": LABELS}
    assert labelled(write(Path("right.csv"), **right))
    for columns, message in (
        ({"source_row": range(2, 301), "prediction": OLD[:299]}, r"1 of 300 .* no prediction \(source_row 301\)"),
        ({"source_row": [2, *range(2, 301)], "prediction": OLD}, "source_row does not tell rows apart"),
        ({"prediction": OLD[:299]}, "299 predictions for 300 scored rows, and no column source_row"),
        ({"prediction": OLD, "sequence": [*SEQUENCES[:7], "ACDEF", *SEQUENCES[8:]]}, "1 lines have another sequence"),
        ({"prediction": [*OLD[:-1], "nan"]}, "1 predictions are no finite numbers"),
    ):
        with pytest.raises(DataError, match=message):
            labelled(write(Path("other.csv"), **columns))


def test_what_is_no_model_is_refused(labelled):
    with pytest.raises(DataError, match=r"absent\.csv cannot be read"):
        labelled(Path("absent.csv"))


PARTS = ["train"] * 120 + ["valid"] * 60 + ["test"] * 80
QUICK = "--num_train_epochs 3 --learning_rate 0.003 --per_device_train_batch_size 8 --head_sizes 4 --head_dropout 0"


def write_pairs(path: Path) -> None:
    """Binders and antigens; half of the test rows have an antigen that training has not. The label sums residues."""
    generator = np.random.default_rng(1)
    binders, antigens = generator.integers(0, 20, (len(PARTS), 10)), generator.integers(0, 20, (20, 8))
    chosen = [10 + i % 10 if part == "test" and i % 2 else i % 10 for i, part in enumerate(PARTS)]
    values = np.linspace(-1, 1, 20)
    labels = 7 + values[binders].sum(1) + values[antigens[chosen]].sum(1) + generator.normal(0, 0.2, len(PARTS))
    text = ["".join(LETTERS[letter] for letter in row) for row in binders]
    other = ["".join(LETTERS[letter] for letter in antigens[i]) for i in chosen]
    families = [f"{part}{i % 12}" for i, part in enumerate(PARTS)]
    write(path, binder=text, antigen=other, part=PARTS, family=families, pKd=np.round(labels, 4))


@pytest.fixture(scope="module")
def run(tmp_path_factory, demo_encoders):
    """A tiny run that requires more than it can reach: its folder, and how it ended."""
    root = tmp_path_factory.mktemp("evaluated")
    write_pairs(root / "pairs.csv")
    words = ["--dataset_name", root / "pairs.csv", "--output_dir", root / "run", "--encoders", demo_encoders[1]]
    words += ["--sequence_columns", "binder", "antigen", "--label_column", "pKd", "--split_column", "part"]
    words += ["--group_column", "family", "--binder_threshold", "7"]
    words += ["--embedding_cache_dir", root / "cache", "--disable_tqdm", "true", "--use_cpu", "true"]
    words += ["--require", "spearman>=-1", "rmse<=0.001", *QUICK.split()]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "recipes"))
        with pytest.raises(RequirementsFailed) as ended:
            importlib.import_module("max_speed").main([str(word) for word in words])
    return root / "run", str(ended.value)


def results_of(folder: Path) -> dict:
    return json.loads((folder / "all_results.json").read_text())


@pytest.mark.nightly
def test_a_run_that_does_not_reach_what_it_must_is_whole_and_says_so(run):
    folder, message = run
    assert message.startswith("rmse is ")
    assert message.endswith(f", expected <=0.001. Model and report are whole, in {folder}.")
    assert [one["passed"] for one in results_of(folder)["requirements"]] == [True, False]
    assert "| RMSE" in (folder / "README.md").read_text()
    assert "Required of the final scores" in (folder / "README.md").read_text()
    log = (folder / "run.log").read_text()
    assert log.index("Spearman  >=-1") < log.index("RMSE      <=0.001") < log.index("Report: ")
    AffinityPredictor.from_pretrained(folder, device="cpu")


def test_the_scores_of_a_run_come_back_from_its_list_of_test_rows_to_the_bit(run):
    folder, _ = run
    report, found = (
        results_of(folder)["test"],
        evaluate("--models", folder / "predictions.csv", folder, "--test_of", folder),
    )
    assert found["scores"]["predictions.csv"] == report["scores"]["model"]
    assert (found["interval_by"], found["num_units"]) == (report["interval_by"], report["num_units"]) == ("family", 12)
    again = found["scores"]["run"]["spearman"]  # of the model, in float32
    assert again["value"] == pytest.approx(report["scores"]["model"]["spearman"]["value"], abs=0.01)
    assert found["verdicts"]["run"]["outcome"] != "worse"
    with pytest.raises(ArgumentError, match=r"rows and columns of its own: leave out --dataset_name, --id_column\."):
        evaluate("--models", folder, "--test_of", folder, "--dataset_name", "other.csv", "--id_column", "name")
    with pytest.raises(DataError, match="nowhere: holds no all_results"):
        evaluate("--models", folder, "--test_of", "nowhere")


def test_bounds_come_back_from_the_list_of_test_rows(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "bounded")
    listed = pd.read_csv(folder / "predictions.csv")
    rows = Dataset.from_pandas(listed.drop(columns="prediction").assign(bound=[-1, 0] * (len(listed) // 2)))
    added = {name: listed[name] for name in ("label", "prediction")}
    write_predictions(folder / "predictions.csv", [(rows, added, None)])
    assert pd.read_csv(folder / "predictions.csv", keep_default_na=False)["bound"][:2].tolist() == ["<=", ""]
    found = evaluate("--models", folder / "predictions.csv", folder, "--test_of", folder)
    assert any(note.startswith("The verdict's RMSE counts no error beyond a limit") for note in found["notes"])


def test_a_model_scores_any_labelled_rows_by_what_it_was_trained_on(run, tmp_path, monkeypatch, capsys):
    folder, _ = run
    monkeypatch.chdir(tmp_path)
    lines = (folder.parent / "pairs.csv").read_text().splitlines()
    Path("test.csv").write_text("\n".join([lines[0], *(line for line in lines if ",test," in line)]) + "\n")
    cache = ("--embedding_cache_dir", folder.parent / "cache")
    own = ("--dataset_name", "test.csv", *cache)
    found = evaluate("--models", folder, *own)
    said = "As the model was trained: --label_column pKd, --binder_threshold 7.0.\n"
    assert said in capsys.readouterr().out
    expected = results_of(folder)["test"]["scores"]["model"]["rmse"]["value"]
    assert found["scores"]["run"]["rmse"]["value"] == pytest.approx(expected, rel=1e-2)
    assert found["num_rows"] == 80
    with pytest.raises(ArgumentError, match="run reads binder, antigen; the rows have the sequence columns binder"):
        evaluate("--models", folder, *own, "--sequence_columns", "binder")


@pytest.mark.nightly
def test_as_a_command_it_ends_with_status_3(tmp_path):
    write(tmp_path / "rows.csv", sequence=SEQUENCES, label=LABELS)
    write(tmp_path / "old.csv", prediction=OLD)
    words = ["--models", "old.csv", "--dataset_name", "rows.csv", "--require"]
    for bound, status in (("rmse<=9", 0), ("rmse<=0.1", 3), ("rmse>=9", 1)):
        command = [sys.executable, str(ROOT / "recipes" / "score.py"), *words, bound]
        assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300).returncode == status
