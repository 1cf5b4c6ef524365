"""What is read from a cell, what is refused with which words, and what a filter keeps: seen through loading."""

import csv
import json
import math
import random

import pytest

from hf_ext.data.arguments import DataArguments
from hf_ext.data.loading import load_sequences
from hf_ext.errors import ArgumentError, DataError

ALL = "ACDEFGHIKLMNPQRSTVWYXUZOBJ"


def protein(number: int, length: int = 40) -> str:
    return "".join(random.Random(number).choices(ALL[:20], k=length))


def load(folder, rows, **given):
    """Rows, dicts, as JSON Lines, from which row 1 is the first; those that are refused as {(row, column): rule}."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"label_column": "pKd", "bad_rows": "drop", **given}
    args = DataArguments(dataset_name=str(path), **options)
    loaded = load_sequences(args, output_dir=folder, needs_labels="pKd" in rows[0])
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
    "": "the sequence is empty",
    "   ": "the sequence is empty",
    None: "the sequence is missing",
    "NA": "'NA' reads as a missing value",
    "nan": "'nan' reads as a missing value",
    "TRUE": "'TRUE' reads as a truth value",
    "MKT*": "stop codon '*' at position 4 of 4",
    "MK-TV": "gap '-' at position 3 of 5",
    "MKT7V": "digit '7' at position 4 of 5",
    "MK TV": "white space inside the sequence, at position 3 of 5",
    "MK:TV": "':' at position 3 of 5 is not a residue",
    "MK\u00d1TV": "non-ASCII character U+00D1 at position 3",
    "mkt\u00df": "non-ASCII character U+00DF at position 4",  # upper() makes residues of it
    "ACGT" * 6: "the sequence reads as DNA, its 24 letters are all of ACGTN",
    "acgu" * 6: "the sequence reads as RNA, its 24 letters are all of ACGUN",
    "ACGT-ACGT." * 3: "the sequence reads as DNA, its 24 letters are all of ACGTN",  # aligned
    "Met Ala Gly Ser": "the sequence reads as three-letter codes (Ala Gly Ser)",
    "alaglyserthr": "the sequence reads as three-letter codes (Ala Gly Ser)",
}
ACCEPTED = [
    ALL,
    "MKTVLAG",
    "ACGT" * 5 + "ACG",
    "ACGACG" * 5,
    "ACGT" * 6 + "W",
    "ACGTACGU" * 4,
    "ALAGLYSERTHRK",
    "M" * 5000,
]


def test_each_unusable_cell_is_refused_with_its_rule_and_others_are_read(tmp_path):
    loaded, refused = load_cells(tmp_path, [*REFUSED, *ACCEPTED])
    assert refused == dict(enumerate(REFUSED.values(), 1))
    assert loaded.table["sequence"][:] == ACCEPTED
    assert loaded.report["changes"] == {}


def test_changes_that_are_asked_for_are_made_and_counted_in_rows(tmp_path):
    cells = ["mktv", " MKTV\n", "mktv", "MKTVL*", "M-K.TV*-", "MK*VLA", "MKTV**", "--.-", "MKTVLA"]
    options = {"stop_codon": "trim", "gaps": "remove", "max_residues": 5}
    loaded, refused = load_cells(tmp_path, cells, **options)
    assert loaded.table["sequence"][:] == ["MKTV", "MKTV", "MKTV", "MKTVL", "MKTV"]
    changes = {"upper_cased": 2, "whitespace_stripped": 1, "stop_codon_trimmed": 2, "gaps_removed": 1}
    assert loaded.report["changes"] == {"sequence": changes}
    assert refused == {
        6: "stop codon '*' at position 3 of 6, not at the end",
        7: "stop codon '*' at position 5 of 5, not at the end",
        8: "no residues are left after removing gaps and the stop codon",
        9: "6 residues are more than max_residues=5",
    }
    loaded, refused = load_cells(tmp_path, cells[-1:], max_residues=5, too_long="window")
    assert (refused, loaded.report["changes"]["sequence"]) == ({}, {"longer_than_max_residues": 1})


@pytest.mark.parametrize("words", [["WT"], ["unknown"] * 80, ["TBD", "ND", "wildtype", "XXXX"]])
def test_a_word_among_proteins_is_refused_by_name(tmp_path, words):
    loaded, refused = load_cells(tmp_path, [*words, *(protein(i, 40 + i) for i in range(40))])
    assert [refused[row].split(" reads")[0] for row in refused] == [repr(word.upper()) for word in words]
    assert refused[1].endswith("residues (median)")
    assert len(loaded.table) == 40


@pytest.mark.parametrize(
    "cells",
    [
        [protein(i, 2 + i % 8) for i in range(60)],  # short epitopes
        [protein(i, 4 + i) for i in range(60)],  # antimicrobial peptides: of every length
        [protein(i, 3 if i < 2 else 15) for i in range(60)],  # CDR-H3
    ],
)
def test_short_sequences_among_others_alike_pass(tmp_path, cells):
    loaded, refused = load_cells(tmp_path, cells)
    assert (len(loaded.table), refused, loaded.report["warnings"]) == (len(cells), {}, [])


LABELS = {
    "": "the label is missing",
    "NA": "the label is missing",
    "strong": "the label is not a number",
    "7,3": "the label is not a number",
    "1_000": "the label is not a number",
    "nan": "the label is NaN",
    "inf": "the label is infinite",
    "-Infinity": "the label is infinite",
    "1e400": "the label is infinite",
    "1e38": "the label is larger than 1e30",
    "-1e38": "the label is larger than 1e30",
    "1e-400": "the label is too near to 0 to be stored",
    "1\u0663.5": "the label is not a number",  # float() takes it
    "<=\uff17": "the label is not a number",
    "0x10": "the label is not a number",
}
NUMBERS = {None: "the label is missing", math.nan: "the label is NaN", math.inf: "the label is infinite", 1e38: "1e30"}


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
    assert refused == {
        (12, "mark"): "not a censoring mark",
        (13, "mark"): contradiction,
        (14, "mark"): contradiction,
    }


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


TABLE = [
    {"sequence": protein(row), "pKd": pkd, "antibody": antibody, "year": year}
    for row, (pkd, antibody, year) in enumerate(
        [("7.5", "S309", 2019), ("6", "CB6", 2020), ("", "S309", 2021), ("10", None, 2022), ("7", "CB6", None)]
    )
]


def keep(folder, text, table=TABLE):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    return load_sequences(DataArguments(dataset_name=str(path), filter=text)).table["source_row"][:]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("pKd > 6 and pKd <= 7.5", [1, 5]),
        ("antibody != 'S309'", [2, 4, 5]),
        ('antibody == "S\\x33\\u00309"', [1, 3]),
        ("antibody == ''", [4]),
        ("pKd != ''", [1, 2, 4, 5]),
        ("pKd<=+.75e1", [1, 2, 5]),
        ("year != 2019", [2, 3, 4, 5]),
        ("antibody in ['S309', 'CB6'] and (pKd > 7 or year == 2020)", [1, 2]),
        ("year not in (2019, 2020)", [3, 4, 5]),
    ],
)
def test_filter_keeps_the_rows_worked_out_by_hand(tmp_path, text, rows):
    assert keep(tmp_path, text) == rows


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os').system('id') == 0", "pKd.__class__ == 1", "[x for x in pKd] == 1", "pKd[0] > 1"),
        *("pKd + 1 > 7", "9 ** 9 ** 9 > pKd", "f'{pKd}' == 'x'", "pKd is None", "pKd == True", "pKd > 9 ** 9"),
        *("pKd", "pKd > 7 and", "", "antibody == S309", "pKd>1and pKd<2", "7 < pKd", "pKd > '7'", "year > pKd"),
        *("pKd > 1" + "0" * 400, "pKd > 1 and " * 200, "pKd > " + "-" * 1900 + "1", "pKd > 1\x00", "not pKd > 7"),
        *("6 < pKd <= 7.5", "antibody in 'S309'", "antibody in ['a', 1]", "antibody in []", "antibody == b'S309'"),
    ],
)
def test_anything_but_comparisons_with_values_is_refused(text, tmp_path):
    with pytest.raises(ArgumentError, match=r"^filter .*(Write COLUMN OP VALUE|leave out the quotes|at most)"):
        keep(tmp_path, text)


def test_a_filter_names_the_nearest_column_and_the_cell_that_is_no_number(tmp_path):
    with pytest.raises(DataError, match=r"no column 'pkd'\. Did you mean 'pKd'"):
        keep(tmp_path, "pkd > 7")
    table = [{"sequence": "MKTVL", "pKd": cell} for cell in ("8", "NA", "<=7")]
    with pytest.raises(DataError, match=r"rows\.jsonl, row 3, column 'pKd', value '<=7': the filter compares"):
        keep(tmp_path, "pKd > 7", table)
    assert keep(tmp_path, "pKd > 7", table[:2]) == [1]


HEAVY = "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAK"
LIGHT = "DIQMTQSPSSLSASVGDRVTITCRASQSISSYLNWYQQKPGKAPKLLIYAASSLQSGVPSRFSGSGSGTDFTLTISSLQPEDFATYYCQQSYSTPLT"


def antibodies(num=60, exchanged=(), without_light=()):
    rows = []
    for number in range(num):
        rng = random.Random(number)
        heavy, light = (
            "".join(rng.choice(ALL[:20]) if rng.random() < 0.25 else x for x in one) for one in (HEAVY, LIGHT)
        )
        light = "" if number in without_light else light
        heavy, light = (light, heavy) if number in exchanged else (heavy, light)
        rows.append({"heavy": heavy, "light": light})
    return rows


CHAINS = {"sequence_columns": ["heavy", "light"]}


@pytest.mark.parametrize("exchanged", [[3], [*range(12)]])
def test_rows_with_exchanged_chains_are_warned_of(tmp_path, exchanged, caplog):
    loaded, refused = load(tmp_path, antibodies(exchanged=exchanged), **CHAINS)
    (warning,) = loaded.report["warnings"]
    listed = ", ".join(str(row + 1) for row in exchanged[:10]) + ", ..." * (len(exchanged) > 10)
    assert f"rows {listed} ({len(exchanged)} in all): `heavy` is nearer to other rows' `light`" in warning
    assert warning in caplog.text
    assert refused == {}


@pytest.mark.parametrize(
    "rows",
    [
        antibodies(),
        antibodies(without_light=range(25)),  # nanobodies
        [{"heavy": protein(i % 20, 90), "light": protein(i % 7 + 10, 90)} for i in range(60)],  # any two that bind
        antibodies(2),
    ],
)
def test_chains_in_their_columns_pass_without_a_word(tmp_path, rows):
    loaded, refused = load(tmp_path, rows, missing_chains=["light"], **CHAINS)
    assert (loaded.report["warnings"], refused) == ([], {})
