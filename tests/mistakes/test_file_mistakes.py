"""Files that are not what their names say, columns that are not there, and all of it in one go."""

import gzip
from pathlib import Path

import pytest
from mistakes import BASE, NUM_ROWS, Case, Mistake, check_mistake, check_twin, parametrized

from hf_ext.data.arguments import DataArguments
from hf_ext.data.loading import load_data
from hf_ext.errors import DataError

ROWS = [f"{sequence},{label}" for sequence, label in zip(*BASE.values())]
CHAINS = {"heavy": BASE["sequence"], "light": BASE["sequence"][::-1]}


def content(*lines: str, separator: str = ",", words: str = "") -> Case:
    return Case(text="\n".join(lines).replace(",", separator) + "\n", words=words)


def other_name(folder: Path) -> Path:
    (folder / "pairs.csv").write_text("sequence,pKd\n")
    return folder / "pair.csv"


def cut_gzip(folder: Path) -> Path:
    path = folder / "a.csv.gz"
    path.write_bytes(gzip.compress("\n".join(["sequence,pKd", *ROWS]).encode())[:-20])
    return path


def whole_gzip(folder: Path) -> Path:
    path = folder / "a.csv.gz"
    path.write_bytes(gzip.compress("\n".join(["sequence,pKd", *ROWS]).encode()))
    return path


def spreadsheet(folder: Path) -> Path:
    path = folder / "a.csv"
    path.write_bytes(b"PK\x03\x04" + bytes(60))
    return path


MISTAKES = [
    Mistake("a mistyped file", Case(make=other_name), ("{folder}/pair.csv: file not found", "pairs.csv")),
    Mistake("a folder without train", Case(make=lambda folder: folder), ("{folder}: no train file",)),
    Mistake("a spreadsheet", Case(make=spreadsheet), ("{folder}/a.csv", "Excel")),
    Mistake("half a download", Case(make=cut_gzip), ("{folder}/a.csv.gz",), Case(make=whole_gzip)),
    Mistake(
        "a web page",
        content("<html><body>Please log in</body></html>"),
        ("{file}", "Columns: <html><body>Please log in"),
    ),
    Mistake("a header alone", content("sequence,pKd"), ("{file}: the file has only a header",)),
    Mistake("an empty file", Case(text=""), ("{file}: the file is empty",)),
    Mistake("semicolons", content("sequence,pKd", *ROWS, separator=";"), ("{file}, row 1", "semicolon-separated")),
    Mistake(
        "a column in other case",  # was: "Did you mean 'kd'?"
        Case(columns={"kd": BASE["pKd"]}, words="--label_column pkd"),
        ("{file}: there is no column 'pkd'. Did you mean 'pKd'?",),
        Case(columns={"kd": BASE["pKd"]}, words="--label_column kd"),
        before="misleading",
    ),
    *(
        Mistake(
            f"columns with '{sign}' in between",  # was: "Did you mean 'light'?"
            Case(columns=CHAINS, words=f"--sequence_columns heavy{sign}light"),
            (
                f"there is no column 'heavy{sign}light'",
                "with a blank between: --sequence_columns heavy light. Columns:",
            ),
            Case(columns=CHAINS, words="--sequence_columns heavy light"),
            before="misleading",
        )
        for sign in (",", "+")
    ),
    Mistake(
        "a column with a blank for an underscore",
        Case(columns={"p_kd_mean": BASE["pKd"], "pKd_mea": BASE["pKd"]}, words="--label_column pKd-mean"),
        ("Did you mean 'p_kd_mean'?",),
        before="misleading",
    ),
    Mistake(
        "several columns that are not there",  # was: one at each attempt
        Case(columns={"Antibody": BASE["sequence"]}, words="--label_column pkd --group_column antibody --id_column nr"),
        ("there are no columns", "'pkd' (did you mean 'pKd'?)", "'antibody' (did you mean 'Antibody'?)", "'nr'"),
        before="misleading",
    ),
    Mistake("a mistyped column", Case(words="--sequence_columns sequense"), ("Did you mean 'sequence'?",)),
    Mistake(
        "a column twice", content("sequence,pKd,pKd", *(f"{row},1" for row in ROWS)), ("'pKd' occurs more than once",)
    ),
    Mistake(
        "ragged rows",  # was: one at each attempt
        content("sequence,pKd", ROWS[0], f"{ROWS[1]},x", *ROWS[2:6], "MKTVL", *ROWS[6:]),
        ("{file}: the header has 2 fields, but row 3 has 3, row 8 has 1.",),
        content("sequence,pKd", *ROWS, ""),
        before="misleading",
    ),
    Mistake(
        "stray quotes",
        content("note,sequence,pKd", f"x,{ROWS[0]}", f'"y,{ROWS[1]}', f"z,{ROWS[2]}", f'x",{ROWS[3]}', f"x,{ROWS[4]}"),
        ("{file}, rows 3 to 5: two quotes make one record",),
    ),
    Mistake(
        "a quote that never ends",
        content("sequence,pKd", *ROWS, '"MKT,7', *ROWS),
        ("{file}: the header has 2 fields, but row 62 has 1.", "close each quote"),
    ),
    Mistake(
        "two files joined",
        content("sequence,pKd", *ROWS, "sequence,pKd", *ROWS),
        ("{file}, row 62: the header again",),
        content("sequence,pKd", *ROWS),
    ),
    Mistake(
        "a header below a title and a remark",
        content("Binding data", "of 2024", "sequence,pKd", *ROWS),
        ("{file}: there are no columns", "Row 3 has them: sequence, pKd"),
    ),
    Mistake(
        "a filter that keeps nothing",
        Case(words="--filter pKd>20"),
        ("filter 'pKd>20' leaves none of 60 rows of {file}",),
        Case(words="--filter pKd>5"),
    ),
    Mistake("a filter with 'or'", Case(words="--filter pKd>9or"), ("filter 'pKd>9or'",), Case(words="--filter pKd>5")),
    Mistake("an unknown format", Case(make=lambda folder: write(folder / "a.pdb")), ("a.pdb: unknown format", ".csv")),
]


def write(path: Path) -> Path:
    path.write_text("ATOM\n")
    return path


@parametrized(MISTAKES)
def test_mistake_is_named(mistake, tmp_path, demo_encoders):
    check_mistake(mistake, tmp_path, demo_encoders[1])


@pytest.mark.sampled(16)
@parametrized(MISTAKES)
def test_its_innocent_twin_passes(mistake, tmp_path, demo_encoders):
    check_twin(mistake, tmp_path, demo_encoders[1])


def fault(case: Case, folder: Path, **arguments) -> str:
    given = DataArguments(dataset_name=str(case.write(folder)), label_column="pKd", **arguments)
    with pytest.raises(DataError) as error:
        load_data(given, output_dir=folder / "out", seed=0)
    return str(error.value)


MANY = Case(
    {
        **{(row, "sequence"): "" for row in range(2, 32)},
        (40, "sequence"): "MetAlaGlySer",
        (41, "pKd"): "-999",
        (42, "pKd"): "7,3",
        (43, "antibody"): " ",
        (44, "split"): "hold-out",
    },
    columns={"antibody": ["a"] * NUM_ROWS, "split": ["train"] * 40 + ["test"] * 20},
)


def test_all_that_is_wrong_with_a_file_is_said_at_once(tmp_path):
    text = fault(MANY, tmp_path, group_column="antibody", split_column="split")
    assert text.startswith("35 values cannot be used, of 6 kinds:")
    for words in (
        "row 2, column 'sequence', value '': the sequence is empty",
        "  ... and 27 more in column 'sequence': the sequence is empty",  # 20 lines for 6 kinds are 3 each
        "row 40, column 'sequence', value 'MetAlaGlySer': the sequence reads as three-letter codes",
        "row 41, column 'pKd', value '-999': the label reads as a missing value",
        "row 42, column 'pKd', value '7,3': the label is not a number",
        "row 43, column 'antibody', value ' ': the group is missing",
        "row 44, column 'split', value 'hold-out': names no split. Use train, valid",
    ):
        assert words in text, words
    assert "row 5, column 'sequence'" not in text


def test_a_mended_file_of_that_kind_loads(tmp_path):
    whole = Case(columns=MANY.columns)
    name = str(whole.write(tmp_path))
    arguments = DataArguments(dataset_name=name, label_column="pKd", group_column="antibody", split_column="split")
    assert load_data(arguments, output_dir=None, seed=0).report["rows_rejected"] == 0


def test_dropping_bad_rows_never_drops_rows_of_an_unknown_split(tmp_path):
    text = fault(MANY, tmp_path, split_column="split", bad_rows="drop")
    assert text.startswith("1 value cannot be used:\n")
    assert "row 44, column 'split', value 'hold-out': names no split" in text
