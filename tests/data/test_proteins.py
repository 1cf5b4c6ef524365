import pytest

from hf_ext.data.proteins import RARE, STANDARD, Problem, ResiduePolicy, clean_sequences, format_located, shorten
from hf_ext.errors import ArgumentError

REFUSE = ResiduePolicy()
LENIENT = ResiduePolicy(stop_codon="trim", gaps="remove")


def clean_one(value, policy=REFUSE):
    return clean_sequences([value], "heavy", policy, [7])


def test_all_standard_and_rare_letters_pass_unchanged():
    result = clean_one(STANDARD + "X" + RARE)
    assert result.sequences == ["ACDEFGHIKLMNPQRSTVWYXUZOBJ"]
    assert result.problems == []
    assert result.changes == {}


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("", "the sequence is empty"),
        ("   ", "the sequence is empty"),
        (None, "the sequence is missing"),
        (float("nan"), "the sequence is missing"),
        ("NA", "'NA' reads as a missing value"),
        ("N/A", "'N/A' reads as a missing value"),
        ("NULL", "'NULL' reads as a missing value"),
        ("NaN", "'NaN' reads as a missing value"),
        ("nan", "'nan' reads as a missing value"),
        ("None", "'None' reads as a missing value"),
        ("MKT*", "stop codon '*' at position 4 of 4"),
        ("MK-TV", "gap '-' at position 3 of 5"),
        ("MK.TV", "gap '.' at position 3 of 5"),
        ("MKT7V", "digit '7' at position 4 of 5"),
        ("MK TV", "white space inside the sequence, at position 3 of 5"),
        ("MK\u00d1TV", "non-ASCII character U+00D1 at position 3"),
        ("MK:TV", "':' at position 3 of 5 is not a residue"),
        (17, "a sequence must be text, not int"),
    ],
)
def test_unusable_value_is_refused_with_its_rule_and_a_remedy(value, rule):
    result = clean_one(value)
    assert result.sequences == [""]
    (problem,) = result.problems
    assert (problem.row, problem.column, problem.rule) == (7, "heavy", rule)
    assert problem.remedy.endswith(".")


def test_non_ascii_letters_that_upper_case_into_residues_are_refused():
    assert [clean_one(value).problems[0].rule for value in ("mkt\u00df", "mk\u0131t", "m\ufb01k")] == [
        "non-ASCII character U+00DF at position 4",
        "non-ASCII character U+0131 at position 3",
        "non-ASCII character U+FB01 at position 2",
    ]


def test_lower_case_and_outer_white_space_are_changed_and_counted_per_row():
    result = clean_sequences(["mktv", "MKTV", " MKTV\n", "mKtv ", "mktv"], "s", REFUSE, [2, 3, 4, 5, 6])
    assert result.sequences == ["MKTV"] * 5
    assert result.changes == {"upper_cased": 3, "whitespace_stripped": 2}


def test_trim_removes_one_trailing_stop_and_refuses_one_inside():
    result = clean_sequences(["MKTVL*", "MK*VLA", "MKTV**"], "s", ResiduePolicy(stop_codon="trim"), [2, 3, 4])
    assert result.sequences == ["MKTVL", "", ""]
    assert result.changes == {"stop_codon_trimmed": 1}
    assert [problem.rule for problem in result.problems] == [
        "stop codon '*' at position 3 of 6, not at the end",
        "stop codon '*' at position 5 of 5, not at the end",
    ]


def test_remove_takes_gaps_out_and_refuses_what_was_only_gaps():
    result = clean_sequences(["M-K.TV*-", "--.-"], "s", LENIENT, [2, 3])
    assert result.sequences == ["MKTV", ""]
    assert result.changes == {"gaps_removed": 1, "stop_codon_trimmed": 1}
    assert result.problems[0].rule == "no residues are left after removing gaps and the stop codon"


def test_five_thousand_residues_pass_without_a_limit_and_are_refused_above_it():
    assert clean_one("M" * 5000).sequences == ["M" * 5000]
    result = clean_one("M" * 5000, ResiduePolicy(max_residues=1022))
    assert result.problems[0].rule == "5000 residues are more than max_residues=1022"
    assert result.problems[0].value == "M" * 37 + "..."


@pytest.mark.parametrize("too_long", ["truncate", "window"])
def test_long_sequences_left_to_the_tokenizer_are_counted(too_long):
    result = clean_one("M" * 5000, ResiduePolicy(max_residues=1022, too_long=too_long))
    assert result.sequences == ["M" * 5000]
    assert result.changes == {"longer_than_max_residues": 1}


def test_length_limit_counts_residues_after_cleaning():
    assert clean_one(" MKTVL* ", ResiduePolicy(stop_codon="trim", max_residues=5)).problems == []


def test_problem_list_names_everything_and_stops_after_twenty():
    problems = [Problem(row, "heavy", "MK7", "digit '7' at position 3 of 3", "Remove it.") for row in range(2, 25)]
    lines = format_located(("a.csv", problem) for problem in problems).splitlines()
    assert lines[0] == "23 values cannot be used:"
    assert lines[1] == "  a.csv, row 2, column 'heavy', value 'MK7': digit '7' at position 3 of 3. Remove it."
    assert len(lines) == 22
    assert lines[-1] == "  ... and 3 more"


def test_shown_values_are_short_and_ascii():
    assert shorten("M" * 41) == "M" * 37 + "..."
    assert shorten("a\tb\u00d1") == "a\\tb\\xd1"
    assert shorten(None) == ""


def test_policy_refuses_unknown_choices():
    with pytest.raises(ArgumentError, match="stop_codon='keep': use one of refuse, trim"):
        ResiduePolicy(stop_codon="keep")
    with pytest.raises(ArgumentError, match="max_residues=0"):
        ResiduePolicy(max_residues=0)


def test_values_and_rows_must_align():
    with pytest.raises(ValueError, match="2 values but 1 rows"):
        clean_sequences(["MKTVL", "MKTVL"], "s", REFUSE, [2])
