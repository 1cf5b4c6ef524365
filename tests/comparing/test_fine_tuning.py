"""`hf-ext compare --sides`: which way to train encoders pays; runs made by hand, and three that are trained."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from inside import ChildFailed, CompareArguments, Side, SideRun
from scipy.stats import spearmanr

from hf_ext.comparing.fine_tuning import answer, format_trainings, make_training_sides, score_runs
from hf_ext.errors import ArgumentError, DataError
from hf_ext.labels import LABEL, PREDICTION
from hf_ext.property import PREDICTIONS, baseline_file, write_predictions

pytestmark = pytest.mark.internals
LETTERS = "ACDEFGHIKLMNPQRSTVWY"
RNG = np.random.default_rng(0)
LABELS = np.round(RNG.normal(7, 1, 60), 4)
FAR, NEAR, NEARER = (LABELS + RNG.normal(0, noise, 60) for noise in (0.8, 0.4, 0.1))
AS_NEAR = NEAR + RNG.normal(0, 0.02, 60)
RIDGE, ONE_HOT = "ridge on embeddings", "one-hot ridge"
SETTINGS = {"sequence_columns": ["sequence"], "missing_chains": [], "label_column": "y", "group_column": None}


def write_run(
    root: Path, name: str, predictions: Any, ridge: Any = FAR, first: int = 0, seconds: float = 10
) -> SideRun:
    """What a run leaves that predicts so for 60 test rows, whose sequences are numbered from `first`."""
    from datasets import Dataset

    folder = root / name
    folder.mkdir()
    sequences = ["".join(LETTERS[i // 20**k % 20] for k in range(4)) for i in range(first, first + 60)]
    rows = Dataset.from_dict({"sequence": sequences, "source_row": range(2, 62), "label": LABELS})
    write_predictions(folder / PREDICTIONS, [(rows, {LABEL: LABELS, PREDICTION: predictions}, None)])
    baselines = {"training mean": np.full(60, 7.0), ONE_HOT: FAR + 5, RIDGE: ridge}
    scores = {}
    for one, values in baselines.items():
        baseline_file(folder, one).parent.mkdir(exist_ok=True)
        numbers = rows.select_columns(["source_row"])
        write_predictions(baseline_file(folder, one), [(numbers, {PREDICTION: values}, None)])
        rho = None if one == "training mean" else float(spearmanr(values, LABELS).statistic)
        scores[one] = {"rmse": {"value": float(np.sqrt(np.mean((values - LABELS) ** 2)))}, "spearman": {"value": rho}}
    verdict = {"comparison": {"metric": "rmse"}}
    test = {"scores": scores, "interval_by": None, "baselines": {one: {} for one in baselines}}
    results = {
        **{"format": 1, "task": "affinity", "verdict": verdict, "page": None, "test": test},
        **{"costs": {"peak_memory_gib": 0.5}, "model": {"num_trainable": 1234}},
        "settings": {**SETTINGS, "binder_threshold": None, "seed": 42},
    }
    (folder / "all_results.json").write_text(json.dumps(results))
    role: Any = name.partition("#")[0]
    return SideRun(Side(name, role, ()), 0, seconds, results=results, cpu_seconds=2 * seconds, folder=folder)


@pytest.mark.parametrize(
    ("ridge", "frozen", "lora", "said"),
    [
        (FAR, NEAR, NEARER, r"lora is better than frozen: RMSE 0.1\d+ against 0.\d+ \(imp.*60 rows\), in 8.3 times"),
        (
            FAR,
            NEAR,
            AS_NEAR,
            "Fine-tuning was not shown to pay on these 60 rows: no difference between lora and frozen",
        ),
        (FAR, NEARER, NEAR, "Fine-tuning was not shown to pay on these 60 rows: lora is worse than frozen: RMSE"),
        (NEARER, NEAR, FAR, f"Nothing was shown to be better than {RIDGE} on these 60 rows: frozen is worse than"),
        (NEAR, FAR, NEARER, rf"lora is better than {RIDGE}: RMSE .* 60 rows\)\.$"),
    ],
)
def test_the_answer_is_what_beats_all_that_costs_less(ridge, frozen, lora, said, tmp_path):
    runs = [write_run(tmp_path, "frozen", frozen, ridge), write_run(tmp_path, "lora", lora, seconds=83)]
    found = score_runs(runs)
    assert found["baseline"] == RIDGE  # and not the one-hot ridge, which is 5 off
    text = answer(found, runs)
    assert re.match(said, text), text
    assert text.count(". ") == 0  # one sentence


def test_all_pairs_are_compared_and_the_table_has_scores_differences_and_costs(tmp_path):
    given = {"frozen": NEAR, "lora": NEARER, "full": AS_NEAR}
    runs = [write_run(tmp_path, name, values) for name, values in given.items()]
    found = score_runs(runs)
    outcomes = {name: {than: one["outcome"] for than, one in row.items()} for name, row in found["verdicts"].items()}
    assert outcomes == {
        "frozen": {RIDGE: "better"},
        "lora": {RIDGE: "better", "frozen": "better"},
        "full": {RIDGE: "better", "frozen": "no difference", "lora": "worse"},
    }
    sides = {"frozen": {"wall_seconds": 61.0, "cpu_seconds": 100.0, "peak_memory_gib": 0.5, "num_trainable": 1234}}
    page = format_trainings({**found, "answer": "So.", "sides": sides, "failed": {"x": "log\nno disk"}})
    (row,) = [line for line in page.splitlines() if line.startswith("| frozen")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    rmse = np.sqrt(np.mean((NEAR - LABELS) ** 2))
    gain = np.sqrt(np.mean((FAR - LABELS) ** 2)) - rmse
    assert cells[1].startswith(f"{rmse:.3f} [")
    assert cells[2].startswith(f"{found['scores']['frozen']['spearman']['value']:.3f} [")
    assert cells[3].startswith(f"{gain:.3f} [")
    assert cells[4:] == ["1 min 1 s", "1 min 40 s", "0.500", "1,234"]
    assert "- x FAILED: no disk" in page


def test_a_likelihood_has_no_head_to_begin_with_and_is_compared_by_the_order_of_rows(tmp_path):
    sides = make_training_sides(CompareArguments(sides=["likelihood --use_peft true", "lora", "frozen"]), [])
    assert sides[-1].arguments == ("--objective", "likelihood", "--use_peft", "true")
    runs = [write_run(tmp_path, "frozen", NEAR), write_run(tmp_path, "likelihood", 50 + 9 * NEARER, seconds=83)]
    found = score_runs(runs)
    assert found["metric"] == "spearman"
    assert any("likelihood: The loss ranks rows" in note for note in found["notes"])
    assert answer(found, runs).startswith("likelihood is better than frozen: Spearman 0.9")


def test_predictions_of_other_rows_are_not_compared(tmp_path):
    runs = [write_run(tmp_path, "frozen", NEAR), write_run(tmp_path, "lora", NEARER, first=60)]
    with pytest.raises(DataError, match="60 lines have another sequence than the rows that are scored"):
        score_runs(runs)


def test_sides_train_as_they_usually_do_unless_flags_or_their_own_words_say_otherwise(tmp_path):
    (tmp_path / "mine.yaml").write_text("num_train_epochs: 9\n")
    args = CompareArguments(sides=["full", "lora --lora_r 4", "frozen", "lora --num_train_epochs 2"])
    sides = make_training_sides(args, ["--config", str(tmp_path / "mine.yaml"), "--per_device_train_batch_size", "4"])
    assert {side.name: side.arguments for side in sides} == {
        "frozen": ("--tower_training", "frozen", "--use_peft", "false"),
        "lora": ("--tower_training", "lora", "--use_peft", "true", "--encoder_learning_rate=0.001", "--lora_r", "4"),
        "lora#2": (
            *("--tower_training", "lora", "--use_peft", "true", "--encoder_learning_rate=0.001"),
            *("--num_train_epochs", "2"),
        ),
        "full": ("--tower_training", "full", "--use_peft", "false", "--encoder_learning_rate=0.0001"),
    }
    plain = make_training_sides(CompareArguments(sides=["lora", "full"]), [])
    assert all("--num_train_epochs=6" in side.arguments for side in plain)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sides frozen lorra", "--sides 'lorra': unknown, did you mean 'lora'.* Sides are frozen, lora, full"),
        ("--sides frozen", "--sides 'frozen': give two or more that differ"),
        ("--sides lora lora", "--sides 'lora' 'lora': give two or more that differ"),
        ("--sides frozen lora --recipe mlm", "--sides with --recipe mlm: only train has encoders"),
        (
            "--sides frozen lora --rounds 2",
            "--sides goes with --recipe, --output_dir, --seed alone: leave out --rounds",
        ),
        ("--sides frozen lora -- --use_peft", "--use_peft after --: every side of --sides has its own"),
        (
            "--sides frozen lora -- --tower-training full",
            "--tower_training after --: every side of --sides has its own",
        ),
        (
            "--sides frozen lora -- --learning_rat 1",
            "unknown argument '--learning_rat', did you mean '--learning_rate'",
        ),
        ("--sides frozen lora -- --streaming", "leave --streaming out"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(words, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        commands.compare(["--output_dir", str(tmp_path / "out"), *words.split()])
    assert not [*(tmp_path / "out").glob("*/")]


def test_a_side_that_would_read_other_rows_is_refused():
    with pytest.raises(ArgumentError, match="so --seed, --split stands after --, for all"):
        make_training_sides(CompareArguments(sides=["frozen", "lora --split cluster --seed 1"]), [])


@pytest.mark.nightly
def test_three_sides_run_and_one_that_fails_does_not_cost_the_others(tmp_path, monkeypatch, demo_encoders, capfd):
    """Labels are a sum over residues with noise: a ridge finds it at once, and two epochs of fine-tuning do not."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    letters = generator.integers(0, 20, (240, 12))
    labels = 7 + np.linspace(-1, 1, 20)[letters].sum(1) + generator.normal(0, 0.3, 240)
    with open("rows.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sequence", "part", "y"])
        for row, part, label in zip(letters, ["train"] * 120 + ["valid"] * 60 + ["test"] * 60, labels):
            writer.writerow(["".join(LETTERS[letter] for letter in row), part, f"{label:.4f}"])
    shared = ["--dataset_name", "rows.csv", "--label_column", "y", "--split_column", "part", "--use_cpu", "true"]
    shared += ["--encoders", demo_encoders[1], "--num_train_epochs", "2"]
    words = ["--output_dir", "out", "--sides", "full --encoders nowhere", "lora", "frozen", "--", *shared]
    assert commands.compare(words) == 1
    result = json.loads(Path("out/comparison.json").read_text())
    assert re.match(r"(Fine-tuning was not shown to pay|Nothing was shown to be better than)", result["answer"])
    assert {one["outcome"] for one in result["verdicts"]["lora"].values()} == {"worse"}
    assert list(result["sides"]) == ["frozen", "lora"]
    assert "nowhere" in result["failed"]["full"]
    assert all(side["cpu_seconds"] > 0.5 for side in result["sides"].values())
    frozen, lora = (json.loads(Path(f"out/{name}/all_results.json").read_text()) for name in ("frozen", "lora"))
    assert lora["settings"]["init_head_from"].endswith("out/frozen")
    assert result["scores"]["frozen"]["rmse"]["value"] == frozen["test"]["scores"]["model"]["rmse"]["value"]
    best = frozen["test"]["scores"][result["baseline"]]["rmse"]["value"]
    assert result["scores"][result["baseline"]]["rmse"]["value"] == pytest.approx(best, abs=1e-6)
    assert any("`hf-ext compare --sides frozen lora --`" in line for line in lora["advice"])
    assert "| lora " in Path("out/comparison.md").read_text()

    capfd.readouterr()
    assert commands.compare(words) == 1
    said = capfd.readouterr().out
    assert "frozen, round 0: measured before, kept" in said
    assert "lora, round 0: measured before, kept" in said
    with pytest.raises(ChildFailed, match="no column 'absent'"):
        commands.compare(["--output_dir", "stopped", *words[2:], "--label_column", "absent"])
    assert [path.name for path in Path("stopped").glob("*/")] == ["frozen"]
