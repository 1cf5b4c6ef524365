"""`hf-ext train --stock_trainer`: transformers.Trainer itself, the control of `hf-ext compare --baseline stock`."""

import json
from pathlib import Path

import commands
import pytest
from inside import CompareArguments, make_sides
from mistakes import make_sequence
from recipe_runs import ALONE, run

from hf_ext.errors import ArgumentError
from hf_ext.property import TASK

QUICK = "--num_train_epochs 2 --disable_tqdm true --use_cpu true --split_sizes 0.6 0.2 0.2 --logging_strategy epoch"


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """80 rows, labelled by how many alanines they have."""
    rows = [make_sequence(i, 15 + i % 20) for i in range(80)]
    path = tmp_path_factory.mktemp("stock") / "rows.csv"
    path.write_text("sequence,label\n" + "".join(f"{row},{row.count('A') / len(row):.4f}\n" for row in rows))
    return path


def train(table: Path, encoder: str, folder: Path, words: str) -> dict:
    return TASK.main(
        f"--dataset_name {table} --encoders {encoder} --output_dir {folder} {QUICK} --preset baseline {words}".split()
    )


def logged(folder: Path) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [log[name] for log in history for name in ("loss", "eval_loss") if name in log]


@pytest.mark.parametrize("words", ["", "--use_peft true --lora_r 2"], ids=["frozen", "lora"])
def test_the_ordinary_trainer_learns_from_the_same_start_what_ours_learns(words, table, demo_encoders, tmp_path):
    found = train(table, demo_encoders[1], tmp_path / "stock", f"{words} --stock_trainer true")
    ours = train(table, demo_encoders[1], tmp_path / "ours", words)
    assert found["trainer"] == "transformers.trainer.Trainer"
    assert logged(tmp_path / "stock") == pytest.approx(logged(tmp_path / "ours"), rel=1e-4)
    assert found["model"]["head_sizes"] == ours["model"]["head_sizes"]
    assert {*found["test"]["scores"]} == {*ours["test"]["scores"]}  # the same baselines
    assert json.loads((tmp_path / "stock" / "throughput.json").read_text())["unit"] == "residues"
    given = f"--model {tmp_path}/stock --dataset_name {table} --output {tmp_path}/p.csv --use_cpu true"
    assert len(commands.predict(given.split()).read_text().splitlines()) == 81


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--early_stopping_patience 2", "--stock_trainer has none of early_stopping_patience"),
        ("--save_strategy steps --save_steps 5", "--save_strategy epoch"),
    ],
)
def test_what_the_ordinary_trainer_cannot_do_is_refused(words, says, table, demo_encoders, tmp_path):
    with pytest.raises(ArgumentError, match=says):
        train(table, demo_encoders[1], tmp_path, f"{words} --stock_trainer true")


def test_a_generator_has_no_stock_side_and_that_is_said_before_the_first_run():
    with pytest.raises(ArgumentError, match="give --baseline baseline"):
        make_sides(CompareArguments(recipe="generate", baseline=["stock"]))


@pytest.mark.nightly
def test_compare_says_how_many_times_as_fast_as_the_ordinary_trainer(table, demo_encoders, tmp_path):
    shared = f"--dataset_name {table} --encoders {demo_encoders[1]} {QUICK} --num_train_epochs 8"
    words = "--baseline stock --optimized max_speed --rounds 1 --output_dir out --"
    done = run("compare", tmp_path, *words.split(), *shared.split(), launcher=ALONE)
    assert "max_speed / stock:" in done.stdout
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["against"]["stock"]["ratio"]["value"] > 0
