import numpy as np
import pytest

from hf_ext.data.filters import parse_filter
from hf_ext.errors import ArgumentError, DataError

TABLE = {
    "pKd": ["7.5", "6", "", "10", "7"],
    "antibody": ["S309", "CB6", "S309", None, "CB6"],
    "year": [2019, 2020, 2021, 2022, None],
}


def kept(text):
    return np.flatnonzero(parse_filter(text, TABLE).mask(TABLE)).tolist()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("pKd > 7", [0, 3]),
        ("pKd >= 7 and antibody == 'CB6'", [4]),
        ("6 < pKd <= 7.5", [0, 4]),
        ("not pKd > 7", [1, 2, 4]),
        ("antibody in ['S309', 'REGN']", [0, 2]),
        ("antibody not in ('S309',)", [1, 3, 4]),
        ("antibody == ''", [3]),
        ("pKd != ''", [0, 1, 3, 4]),
        ("year in [2019, 2022] or pKd == 6", [0, 1, 3]),
        ("pKd > -1", [0, 1, 3, 4]),
        ("year != 2019", [1, 2, 3, 4]),
        ("year > pKd", [0, 1, 3]),
    ],
)
def test_filter_keeps_the_rows_worked_out_by_hand(text, rows):
    assert kept(text) == rows


def test_filter_gives_the_same_answer_row_by_row_and_on_columns():
    predicate = parse_filter("pKd > 7 and antibody == 'S309'", TABLE)
    rows = [dict(zip(TABLE, cells)) for cells in zip(*TABLE.values())]
    assert [predicate(row) for row in rows] == [True, False, False, False, False]
    assert predicate.mask(TABLE).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__import__('os')", "Call is not allowed"),
        ("__import__('os').system('id') == 0", "Call is not allowed"),
        ("pKd.__class__ == 1", "Attribute is not allowed"),
        ("[x for x in pKd] == 1", "ListComp is not allowed"),
        ("(lambda: 1) == pKd", "Lambda is not allowed"),
        ("pKd[0] > 1", "Subscript is not allowed"),
        ("pKd + 1 > 7", "BinOp is not allowed"),
        ("9 ** 9 ** 9 > pKd", "BinOp is not allowed"),
        ("f'{pKd}' == 'x'", "JoinedStr is not allowed"),
        ("(pKd := 3) > 1", "NamedExpr is not allowed"),
        ("pKd is None", "is not allowed"),
        ("pKd == None", "Constant is not allowed"),
        ("pKd == True", "Constant is not allowed"),
        ("pKd > ~1", "UnaryOp is not allowed"),
        ("pKd", "for example pKd == 1"),
        ("pKd >", "is not an expression"),
        ("import os", "is not an expression"),
        ("", "is not an expression"),
        ("antibody == S309", "there is no column 'S309'"),
        ("pkd > 7", "Did you mean 'pKd'?"),
        ("1 < 2", "names no column"),
        ("'a' < 2 < pKd", "names no column"),
        ("pKd > '7'", "leave out the quotes to compare numbers"),
        ("antibody in 'S309'", "needs a list"),
        ("antibody in ['S309', 3]", "only numbers or only quoted text"),
        ("antibody in []", "only numbers or only quoted text"),
        ("3 in [3, 4]", "must be a column"),
        ("pKd > -'a'", "minus before text"),
        ("pKd > 1" + "0" * 400, "too large"),
        ("not " * 400 + "pKd > 1" + " " * 2000, "at most 2000"),
        ("pKd > " + "-" * 1900 + "1", "cannot be read"),
        ("pKd > 1\x00", "filter"),
    ],
)
def test_anything_but_comparisons_is_refused_by_name(text, message):
    with pytest.raises(ArgumentError) as error:
        parse_filter(text, TABLE)
    assert message in str(error.value)


def test_text_in_a_column_compared_with_a_number_names_file_row_and_value():
    predicate = parse_filter("pKd > 7")
    with pytest.raises(DataError, match=r"a\.csv, row 5, column 'pKd', value '<=7': the filter compares"):
        predicate.mask({"pKd": ["8", "<=7"]}, rows=[4, 5], path="a.csv")


def test_missing_marks_in_a_number_column_match_nothing():
    assert parse_filter("pKd > 7").mask({"pKd": ["8", "NA", "nan", None]}).tolist() == [True, False, False, False]
