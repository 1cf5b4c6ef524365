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
        ("pKd > 6 and pKd <= 7.5", [0, 4]),
        ("antibody != 'S309'", [1, 3, 4]),
        ('antibody == "S\\x33\\u00309"', [0, 2]),
        ("antibody == 'S309 and CB6'", []),
        ("antibody == ''", [3]),
        ("pKd != ''", [0, 1, 3, 4]),
        ("pKd > -1", [0, 1, 3, 4]),
        ("pKd<=+.75e1", [0, 1, 4]),
        ("year != 2019", [1, 2, 3, 4]),
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
        ("__import__('os')", "'(' is not allowed"),
        ("__import__('os').system('id') == 0", "'(' is not allowed"),
        ("pKd.__class__ == 1", "'.' is not allowed"),
        ("[x for x in pKd] == 1", "'[' is not allowed"),
        ("(lambda: 1) == pKd", "'(' is not allowed"),
        ("pKd[0] > 1", "'[' is not allowed"),
        ("pKd + 1 > 7", "'+' is not allowed"),
        ("9 ** 9 ** 9 > pKd", "'*' is not allowed"),
        ("f'{pKd}' == 'x'", "is not a comparison"),
        ("(pKd := 3) > 1", "'(' is not allowed"),
        ("pKd is None", "'is' is not allowed"),
        ("pKd == None", "'None' is neither a number nor quoted text"),
        ("pKd == True", "'True' is neither a number nor quoted text"),
        ("pKd > ~1", "'~' is not allowed"),
        ("pKd", "'pKd' is not a comparison"),
        ("pKd >", "'pKd >' is not a comparison"),
        ("pKd > 7 and", "'nothing' is not a comparison"),
        ("import os", "'import os' is not a comparison"),
        ("", "'nothing' is not a comparison"),
        ("antibody == S309", "neither a number nor quoted text such as 'S309'"),
        ("antibody == 'S309", "the quote before 'S309' is not closed"),
        ("antibody == 'a' and \"b c", "the quote before 'b c' is not closed"),
        ("pKd > 0x10", "'0x10' is not allowed"),
        ("pKd>1and pKd<2", "'1and' is not allowed"),
        ("pkd > 7", "Did you mean 'pKd'?"),
        ("1 < 2", "'1 < 2' is not a comparison"),
        ("'a' < 2 < pKd", "is not a comparison"),
        ("7 < pKd", "'7 < pKd' is not a comparison"),
        ("pKd = 7", "'=' is not allowed"),
        ("pKd > 1_000", "is not allowed"),
        ("pKd > '7'", "leave out the quotes to compare numbers"),
        ("pKd > -'a'", "'-' is not allowed"),
        ("pKd > 1" + "0" * 400, "too large"),
        ("antibody == '\\x'", "escape. Write COLUMN"),
        ("pKd > 1 and " * 200, "at most 2000"),
        ("pKd > " + "-" * 1900 + "1", "'-' is not allowed"),
        ("pKd > 1\x00", "is not allowed"),
    ],
)
def test_anything_but_comparisons_is_refused_by_name(text, message):
    with pytest.raises(ArgumentError) as error:
        parse_filter(text, TABLE)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("year == 2019 or pKd == 6", "'or'"),
        ("not pKd > 7", "'not'"),
        ("antibody in ['S309', 'CB6']", "'in'"),
        ("antibody not in ('S309',)", "'not'"),
        ("(pKd > 7) and year > 2019", "'('"),
        ("6 < pKd <= 7.5", "'6 < pKd <= 7.5'"),
        ("year > pKd", "'pKd'"),
    ],
)
def test_what_was_allowed_once_says_what_to_do_instead(text, word):
    with pytest.raises(ArgumentError) as error:
        parse_filter(text, TABLE)
    assert word in str(error.value)
    assert "Write COLUMN OP VALUE" in str(error.value)
    assert "filter the file beforehand, or make a run for each part" in str(error.value)


def test_text_in_a_column_compared_with_a_number_names_file_row_and_value():
    predicate = parse_filter("pKd > 7")
    with pytest.raises(DataError, match=r"a\.csv, row 5, column 'pKd', value '<=7': the filter compares"):
        predicate.mask({"pKd": ["8", "<=7"]}, rows=[4, 5], path="a.csv")


def test_missing_marks_in_a_number_column_match_nothing():
    assert parse_filter("pKd > 7").mask({"pKd": ["8", "NA", "nan", None]}).tolist() == [True, False, False, False]
