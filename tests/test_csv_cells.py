"""Text that a spreadsheet would run is written as text, and read back as it was."""

import csv
import random

import pytest

from hf_ext.csv_cells import read_cell, write_cell
from hf_ext.data.arguments import DataArguments
from hf_ext.data.loading import load_sequences


@pytest.mark.parametrize(
    "text",
    [
        *("=cmd|'/C calc'!A0", "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "-", "--1", "+"),
        *("\uff1d1", "\uff0b1", "\uff0d1", "\uff201", "'=1", "''=1", "-inf", "-1.5e", "- 1", "-1_0", "-\u0663"),
    ],
)
def test_a_formula_gets_a_quote_in_front(text):
    assert write_cell(text) == "'" + text
    assert read_cell(write_cell(text)) == text


@pytest.mark.parametrize("value", ["-1.5", "+2", "-.5", "-1e-3", "r1", "", "'", "'a", "3'-end", " =1", -1.5, 7, None])
def test_numbers_and_other_text_stay_as_they_are(value):
    assert write_cell(value) == value
    assert not isinstance(value, str) or read_cell(value) == value


def test_no_two_texts_are_written_alike():
    rng = random.Random(0)
    texts = {"".join(rng.choices("'=-+1a.", k=rng.randint(0, 5))) for _ in range(5000)}
    assert len({write_cell(text) for text in texts}) == len(texts)
    assert all(read_cell(write_cell(text)) == text for text in texts)


def test_rejected_rows_hold_no_formula(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"=a": "MKTVL"}\n{"=a": "=cmd|\'/C calc\'!A0"}\n{"=a": "-1.5"}\n')
    args = DataArguments(dataset_name=str(path), sequence_columns=["=a"], bad_rows="drop")
    assert len(load_sequences(args, output_dir=tmp_path).table) == 1
    with (tmp_path / "rejected_rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["row"], row["column"], row["value"]) for row in rows] == [
        ("2", "'=a", "'=cmd|'/C calc'!A0"),
        ("3", "'=a", "-1.5"),
    ]
