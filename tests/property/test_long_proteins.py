"""Proteins longer than an encoder takes: read in windows, or cut with one line that says what is lost, or refused."""

import csv
from collections.abc import Callable
from pathlib import Path

import commands
import pytest
from mistakes import make_sequence

from hf_ext.errors import ArgumentError, DataError
from hf_ext.property import TASK, AffinityPredictor
from hf_ext.tasks import find_task

LONG, OTHER = make_sequence(1, 40), make_sequence(2, 50)  # the run below reads 30
SPLITS = ("train", "train", "validation", "test")
CUT = "--max_length 32 --too_long truncate"
QUICK = "--num_train_epochs 1 --head_sizes 8 --disable_tqdm true --use_cpu true --split_column split"
# 4 rows of 40 and 1 of 50 residues lose 10 each and 20, of 35 * 20 + 4 * 40 + 50.
LOST = (
    "sequence: longer than the 30 residues that --max_length 32 allows: 2 of 37 sequences (5 of 40 rows). Their ends "
    "are cut off; 60 residues, 6.59% of all, are not read. Instead: cut them into domains, take an encoder for longer "
    "ones, or refuse them with --too_long error."
)
TrainedBy = Callable[..., Path]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """40 rows: one long protein in every split, and a second one."""
    path = tmp_path_factory.mktemp("long") / "rows.csv"
    sequences = [make_sequence(i, 20) for i in range(40)]
    for row in (0, 1, 2, 3):
        sequences[row] = LONG
    sequences[4] = OTHER
    with path.open("w", newline="") as file:
        rows = [(one, i % 7 / 2, SPLITS[i % 4]) for i, one in enumerate(sequences)]
        csv.writer(file).writerows([("sequence", "label", "split"), *rows])
    return path


@pytest.fixture(scope="module")
def train(table, tmp_path_factory, demo_encoders) -> TrainedBy:
    """Trains by these words, once; the folder."""
    done: dict[str, Path] = {}

    def trained(words: str) -> Path:
        if words not in done:
            done[words] = tmp_path_factory.mktemp("run")
            given = f"--dataset_name {table} --encoders {demo_encoders[1]} --output_dir {done[words]} {QUICK} {words}"
            TASK.main(given.split())
        return done[words]

    return trained


def read_predictions(path: Path) -> list[float]:
    with path.open(newline="") as file:
        return [float(row["prediction"]) for row in csv.DictReader(file)]


def test_a_run_cuts_them_and_says_once_how_many_how_much_and_what_to_do_instead(train):
    folder = train(CUT)
    log = (folder / "run.log").read_text()
    assert log.count(LOST) == log.count("longer than the") == 1
    for page in ("report.html", "README.md"):
        assert "longer than the 30 residues that --max_length 32 allows" in (folder / page).read_text(), page


def test_a_model_predicts_long_proteins_as_it_was_trained_and_says_so(train, table, tmp_path, capfd):
    folder, output = train(CUT), tmp_path / "predictions.csv"
    given = f"--model {folder} --dataset_name {table} --output {output} --use_cpu true --disable_tqdm true"
    commands.predict(given.split())
    said = "sequence: longer than the 30 residues that this model reads: 2 of 37 sequences (5 of 40 rows)"
    assert "".join(capfd.readouterr()).count(said) == 1
    predictor = AffinityPredictor.from_pretrained(folder, device="cpu")
    assert read_predictions(output)[0] == pytest.approx(predictor.predict([{"sequence": LONG[:30]}])[0], abs=1e-4)
    commands.predict([*given.split(), "--max_residues", "10"])
    shorter = predictor.predict([{"sequence": LONG[:10]}])[0]
    assert read_predictions(output)[0] == pytest.approx(shorter, abs=1e-4)
    with pytest.raises(DataError, match="5 rows are too long"):
        commands.predict([*given.split(), "--too_long", "error"])


def test_without_a_flag_they_are_read_in_windows_and_later_too_and_it_is_said_what_that_costs(
    train, table, tmp_path, capfd, caplog
):
    folder = train("--max_length 32")
    # Windows of 30 that begin at 0 and 10, and at 0 and 20: 20 more residues of 40, 10 more of 50.
    said = "2 of 37 sequences (5 of 40 rows). They are read in windows that overlap by 7 residues or more, 9.89% more"
    assert (folder / "run.log").read_text().count(said) == 1
    assert "not read" not in (folder / "run.log").read_text()
    for page in ("report.html", "README.md"):
        assert "They are read in windows" in (folder / page).read_text(), page
    output = tmp_path / "predictions.csv"
    given = f"--model {folder} --dataset_name {table} --output {output} --use_cpu true --disable_tqdm true"
    commands.predict(given.split())
    assert said in "".join(capfd.readouterr())
    predictor = AffinityPredictor.from_pretrained(folder, device="cpu")
    whole, cut = predictor.predict([{"sequence": LONG}, {"sequence": LONG[:30]}])
    assert read_predictions(output)[0] == pytest.approx(whole, abs=1e-4)
    assert abs(whole - cut) > 1e-3
    assert "too long" not in caplog.text
    commands.predict([*given.split(), "--too_long", "truncate"])
    assert read_predictions(output)[0] == pytest.approx(cut, abs=1e-4)
    commands.evaluate(f"--models {folder} --dataset_name {table} --use_cpu true --disable_tqdm true".split())
    assert said in "".join(capfd.readouterr())


def test_the_doctor_counts_windows_of_a_model_whose_positions_end(table, demo_encoders, tmp_path, capsys):
    given = f"--dataset_name {table} --encoders {demo_encoders[0]} --output_dir {tmp_path} {QUICK} --use_peft"
    assert commands.examine([*given.split(), "--max_length", "32"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "read in windows that overlap by 7 residues or more" in said


def test_masked_language_models_refuse_windows_that_they_do_not_read(table, tmp_path):
    given = f"--dataset_name {table} --model_size demo --output_dir {tmp_path} --too_long window --max_steps 1"
    with pytest.raises(ArgumentError, match="crops long sequences at random"):
        find_task("masked_lm").main(given.split())


def test_python_cuts_with_a_warning(train, caplog):
    AffinityPredictor.from_pretrained(train(CUT), device="cpu").predict([{"sequence": OTHER}])
    assert "1 of 1 sequences (1 of 1 rows)" in caplog.text


def test_models_are_scored_on_cut_proteins_with_one_line_for_each(train, table, capfd):
    folder = train(CUT)
    commands.evaluate(f"--models {folder} --dataset_name {table} --use_cpu true --disable_tqdm true".split())
    assert "".join(capfd.readouterr()).count("longer than the 30 residues that this model reads") == 1


def test_error_refuses_them_in_training_and_later_predictions(train, table, tmp_path):
    with pytest.raises(DataError, match=r"has 50 residues; --max_length 32 allows 30\. Use --too_long window") as error:
        train("--max_length 32 --too_long error")
    assert "5 rows are too long: row 2 of train (40 residues)" in str(error.value)
    folder, output = train("--max_length 52 --too_long error"), tmp_path / "predictions.csv"
    (tmp_path / "new.csv").write_text(f"sequence\n{make_sequence(3, 20)}\n{make_sequence(4, 60)}\n")
    given = f"--model {folder} --dataset_name {tmp_path}/new.csv --output {output} --use_cpu true --disable_tqdm true"
    with pytest.raises(DataError, match="has 60 residues; this model reads 50"):
        commands.predict(given.split())
    commands.predict(f"{given} --max_residues 50 --bad_rows drop".split())
    assert len(read_predictions(output)) == 1
    commands.predict(f"{given} --too_long truncate".split())
    assert len(read_predictions(output)) == 2


def test_the_doctor_says_what_the_run_will_say(table, demo_encoders, tmp_path, capsys):
    given = f"--dataset_name {table} --encoders {demo_encoders[1]} --output_dir {tmp_path} {QUICK} {CUT}"
    assert commands.examine(given.split()) == 0
    assert LOST in " ".join(capsys.readouterr().out.split())


def test_masked_language_models_read_windows_and_say_what_these_leave_out(table, tmp_path):
    given = f"--dataset_name {table} --model_size demo --max_residues 30 --output_dir {tmp_path} --max_steps 1"
    find_task("masked_lm").main(given.split())
    log = (tmp_path / "run.log").read_text()
    assert log.count("longer than the 30 residues that --max_residues allows: 2 of 37 sequences (5 of 40 rows)") == 1
    assert "A window of each is read, drawn anew in every epoch; 60 residues" in log


def test_generators_refuse_them_as_before():
    assert find_task("generation").parse([]).data_args.too_long == "error"
