"""What is read from a cell, and what is refused with which words: seen through loading."""

import csv
import json
import math
import random

import pytest

from hf_ext.data import DataArguments, load_sequences

ALL = "ACDEFGHIKLMNPQRSTVWYXUZOBJ"


def protein(number: int, length: int = 40) -> str:
    return "".join(random.Random(number).choices(ALL[:20], k=length))


def load(folder, rows, **given):
    """Rows, dicts, as JSON Lines, from which row 1 is the first; those that are refused as {(row, column): rule}."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"label_column": "pKd", "bad_rows": "drop", **given}
    args = DataArguments(dataset_name=str(path), **options)
    loaded = load_sequences(args, rejected=folder / "rejected_rows.csv", needs_labels="pKd" in rows[0])
    if not loaded.report["rows_rejected"]:
        return loaded, {}
    with open(folder / "rejected_rows.csv", newline="") as file:
        listed = list(csv.DictReader(file))
    assert all(row["remedy"].endswith(".") and row["file"] == str(path) for row in listed)
    return loaded, {(int(row["row"]), row["column"]): row["rule"] for row in listed}


def load_cells(folder, cells, **given):
    loaded, refused = load(folder, [{"sequence": cell} for cell in cells], **given)
    return loaded, {row: rule for (row, _), rule in refused.items()}


REFUSED = {
    **dict.fromkeys(("", "   ", None, "NA", "nan"), "the sequence is missing"),
    "*": "the sequence is a stop codon alone",
    "MK*VLA": "stop codon '*' inside the sequence, at position 3 of 6",
    "MKTV**": "stop codon '*' inside the sequence, at position 5 of 6",
    "MK-TV": "gap '-' at position 3 of 5",
    "MKT7V": "digit '7' at position 4 of 5",
    "MK TV": "white space inside the sequence, at position 3 of 5",
    "MK:TV": "':' at position 3 of 5 is not a residue",
    "MK\u00d1TV": "'\\xd1' at position 3 of 5 is not a residue",
    "mkt\u00df": "'\\xdf' at position 4 of 4 is not a residue",  # upper() makes residues of it
    "ACGT" * 6: "the sequence reads as DNA, its 24 letters are all of ACGTN",
    "acgu" * 6: "the sequence reads as RNA, its 24 letters are all of ACGUN",
    "ACGT-ACGT." * 3: "the sequence reads as DNA, its 24 letters are all of ACGTN",  # aligned
}
ACCEPTED = [ALL, "MKTVLAG", "ACGT" * 5 + "ACG", "ACGACG" * 5, "ACGT" * 6 + "W", "ACGTACGU" * 4, "M" * 5000]


def test_each_unusable_cell_is_refused_with_its_rule_and_others_are_read(tmp_path):
    loaded, refused = load_cells(tmp_path, [*REFUSED, *ACCEPTED])
    assert refused == dict(enumerate(REFUSED.values(), 1))
    assert loaded.table["sequence"][:] == ACCEPTED
    assert loaded.report["changes"] == {}


def test_changes_are_made_and_counted_in_rows(tmp_path):
    cells = ["mktv", " MKTV\n", "mktv", "MKTVL*", "mktv *", "MKTVLA"]
    loaded, refused = load_cells(tmp_path, cells, max_residues=5, too_long="error")
    assert loaded.table["sequence"][:] == ["MKTV", "MKTV", "MKTV", "MKTVL"]
    changes = {"upper_cased": 2, "whitespace_stripped": 1, "stop_codon_trimmed": 1}
    assert loaded.report["changes"] == {"sequence": changes}
    assert refused == {
        5: "white space inside the sequence, at position 5 of 6",
        6: "6 residues are more than max_residues=5",
    }
    loaded, refused = load_cells(tmp_path, cells[-1:], max_residues=5)
    assert (refused, loaded.table["sequence"][:]) == ({}, ["MKTVLA"])  # whoever reads it cuts it


LABELS = {
    "": "the label is missing",
    "NA": "the label is missing",
    "strong": "the label is not a number",
    "7,3": "the label is not a number",
    "1_000": "the label is not a number",
    "nan": "the label is missing",
    "-Infinity": "the label is not a number",
    "1e400": "the label is larger than 1e30",
    "1e38": "the label is larger than 1e30",
    "-1e38": "the label is larger than 1e30",
    "1\u0663.5": "the label is not a number",  # float() takes it
    "<=\uff17": "the label is not a number",
    "0x10": "the label is not a number",
}
NUMBERS = {None: "the label is missing", math.nan: "the label is missing", math.inf: "1e30", 1e38: "1e30"}


def load_labels(folder, labels, marks=None, **given):
    rows = [{"sequence": "MKTVL", "pKd": label, "mark": mark} for label, mark in zip(labels, marks or labels)]
    return load(folder, rows, censor_column="mark" if marks else None, **given)


def test_numbers_and_signs_become_values_and_bounds(tmp_path):
    table = load_labels(tmp_path, ["7.3", "<=7", "> 10.5", "<-2", "=4", "8", " 1e-3 ", ">=9", "\u22646", "+.5", "7."])[
        0
    ].table
    assert table["label"][:] == [7.3, 7.0, 10.5, -2.0, 4.0, 8.0, 0.001, 9.0, 6.0, 0.5, 7.0]
    assert table["bound"][:] == [0, -1, 1, -1, 0, 0, 0, 1, -1, 0, 0]


@pytest.mark.parametrize("labels", [LABELS, NUMBERS])
def test_each_unusable_label_is_refused(tmp_path, labels):
    refused = load_labels(tmp_path, [*labels, *([5.0, 6.0] if labels is NUMBERS else ["5", "6"])])[1]
    assert [row for row, _ in refused] == [*range(1, len(labels) + 1)]
    assert all(rule in found for rule, found in zip(labels.values(), refused.values()))


def test_marks_give_the_bound_and_one_means_at_or_below(tmp_path):
    marks = ["<", "<=", ">", ">=", "=", "", None, "0", "1", "1.0", "FALSE", "\uff1c", "0", "1", ""]
    labels = ["7"] * 11 + ["7", "<=7", ">7", "<=7"]
    loaded, refused = load_labels(tmp_path, labels, marks)
    assert loaded.table["bound"][:] == [-1, -1, 1, 1, 0, 0, 0, 0, -1, -1, 0, -1]
    contradiction = "the censoring mark contradicts the sign written in the label"
    assert refused == {(12, "mark"): "not a censoring mark", (13, "mark"): contradiction, (14, "mark"): contradiction}


@pytest.mark.parametrize(
    ("labels", "rows"),
    [
        ([7.1, 8.2, 6.5, -999], [4]),
        ([7.1, 8.2, 6.5, 9999.0, -99], [4, 5]),
        ([0.0, 20000.0, 15.0, -999], [4]),  # no concentration is negative
        ([-3.0, 2.5, 0.1, -99], [4]),
        ([0.1, 12.0, 40.0, 999], []),  # Kd in nM: 999 may be measured
        ([-90.0, 80.0, 10.0, -99], []),  # in the range of its neighbours
        ([-3.0, 2.5, 0.1, 9], []),  # a single 9 is a label as any
        ([7.1, 8.2, -999], []),  # two labels say little about where labels lie
        (["7.1", "8.2", "6.5", ">99"], []),  # a limit that was measured
    ],
)
def test_nines_are_refused_where_they_cannot_be_measured(tmp_path, labels, rows):
    assert [row for row, _ in load_labels(tmp_path, labels)[1]] == rows
