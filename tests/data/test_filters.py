"""Filters: which rows words keep, what is counted, when they act, and what is refused."""

import csv

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from hf_ext.data import DataArguments, fingerprint, load_data, load_sequences
from hf_ext.errors import ArgumentError, DataError

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
HEADER = ("sequence", "label", "species", "p K (nM)", "split")
# Row i has the label i, but for a bound and an unknown one; species and the second number are empty here and there.
SPECIES = ("human", "mouse", "", " human ")
SPLITS = ("train", "Val", "test", "unused")


def make_rows(num=24):
    rows = []
    for i in range(num):
        label = {5: "<=5", 6: ">6"}.get(i, str(i))
        sequence = f"MKTV{LETTERS[i % 20]}{LETTERS[i // 20]}ACDK"
        rows.append([sequence, label, SPECIES[i % 4], "NA" if i == 8 else f"{i / 2}", SPLITS[i // 4 % 4]])
    return rows


def write_csv(path, rows):
    with open(path, "w", newline="") as handle:
        csv.writer(handle).writerows([HEADER, *rows])
    return str(path)


@pytest.fixture
def table(tmp_path):
    return write_csv(tmp_path / "a.csv", make_rows())


def load(name, **given):
    return load_data(DataArguments(dataset_name=name, **given), output_dir=None, seed=0)


def lines(splits):
    """What stands in line i + 2 of the file is row i."""
    return sorted(row["source_row"] - 2 for split in splits.values() for row in split)


HUMAN = [i for i in range(24) if i % 4 in (0, 3)]
MOUSE = [i for i in range(24) if i % 4 == 1]
EXPECTED = {
    "label > 20": [21, 22, 23],
    "label <= 5 and label != 3": [0, 1, 2, 4, 5],  # a bound is its limit
    "species == 'human'": HUMAN,
    "not species == 'human'": MOUSE,  # of an empty cell neither is known
    "species != 'human' or label in [2, 6.0]": sorted([*MOUSE, 2, 6]),
    "species not in ['human', 'cow']": MOUSE,
    "species is None and label < 11": [2, 6, 10],
    "(species is not None) and (label < 2 or label >= 23)": [0, 1, 23],
    "source_row > 20 and source_row < 99999999999999999999": [19, 20, 21, 22, 23],
    "`p K (nM)` > 3 and `p K (nM)` < 5": [7, 9],
}


def test_rows_are_kept_that_meet_the_words_and_none_of_which_that_is_not_known(table):
    for text, rows in EXPECTED.items():
        args = DataArguments(dataset_name=table, filter=text)
        assert lines({"all": load_sequences(args).table}) == rows, text


def test_rows_are_counted_and_training_rows_can_be_filtered_alone(table):
    data = load(table, filter="species == 'human'", filter_train="label > 2", split_column="split")
    assert data.report["notes"] == [
        f"--filter \"species == 'human'\", {table}: 12 of 24 rows are used; of 6 it is not known, since a cell is "
        "empty",
        "--filter_train 'label > 2', training rows: 3 of 4 rows are used; of 0 it is not known, since a cell is empty",
    ]
    assert data.report["sizes"] == {"train": 3, "validation": 4, "test": 2}
    assert (data.report["rows_read"], data.report["rows_rejected"]) == (24, 0)
    assert lines({"train": data.splits["train"]}) == [3, 16, 19]
    assert data.splits["train"].column_names == ["sequence", "label", "source_row"]


def test_a_split_column_leaves_out_what_it_calls_unused_and_refuses_other_words(table, tmp_path):
    for streaming in (False, True):
        data = load(table, split_column="split", streaming=streaming)
        assert lines(data.splits) == [i for i in range(24) if SPLITS[i // 4 % 4] != "unused"]
    assert (
        "4 rows are left out: column 'split' says unused" in load(table, split_column="split").report["split"]["notes"]
    )
    rows = make_rows()
    rows[1][4] = "spare"
    with pytest.raises(DataError, match=r"row 3, column 'split', value 'spare': names no split.* or unused"):
        load(write_csv(tmp_path / "b.csv", rows), split_column="split")


def test_rows_that_are_left_out_are_not_looked_at(tmp_path):
    rows = make_rows()
    rows[3][1] = "not measured"
    rows[1][0] = "MK1"
    path = write_csv(tmp_path / "b.csv", rows)
    assert len(lines(load(path, filter="species is None").splits)) == 6
    columns = {"sequence": [row[0] for row in make_rows(20)], "label": [i % 3 for i in range(20)], "n": [*range(20)]}
    kinds = {"sequence": Value("string"), "label": ClassLabel(names=["a", "b", "c"]), "n": Value("int64")}
    classes = Dataset.from_dict(columns, features=Features(kinds))
    args = DataArguments(filter="label != 'c' and n < 15")
    data = load_data(args, output_dir=None, seed=0, table=classes)
    assert data.kind.names == ("a", "b")  # classes are those of the rows that are kept
    assert lines(data.splits) == [n - 1 for n in range(15) if n % 3 < 2]  # lines of a table count from 1


def test_predictions_are_of_the_kept_rows_with_all_their_columns(table):
    args = DataArguments(dataset_name=table, filter="`p K (nM)` >= 11")
    found = load_sequences(args, keeps_columns=True)
    assert found.as_read["label"][:] == ["22", "23"]
    assert found.table["source_row"][:] == [24, 25]
    assert "2 of 24 rows are used; of 1 it is not known" in found.report["notes"][0]


def test_files_that_are_splits_are_counted_one_by_one_and_other_rows_are_another_data_set(tmp_path):
    for name in ("train", "valid", "test"):
        write_csv(tmp_path / f"{name}.csv", make_rows())
    data = load(str(tmp_path), filter="label > 10")
    names = [note.split(": ")[0].rsplit("/", 1)[1] for note in data.report["notes"]]
    assert names == ["train.csv", "valid.csv", "test.csv"]
    assert all("13 of 24 rows are used" in note for note in data.report["notes"])
    other = load(str(tmp_path), filter="label > 11")
    assert fingerprint(data.splits["train"]) != fingerprint(other.splits["train"])


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"filter": "specie == 'x'"}, DataError, r"no column 'specie' \(did you mean 'species'\?\). Columns:"),
        ({"filter": "species > 3"}, DataError, "row 2, column 'species', value 'human': --filter 'species > 3' comp"),
        ({"filter": "label > 99"}, DataError, "label > 99.*: 0 of 24 rows are used"),
        ({"filter_train": "label > 99"}, DataError, "--filter_train 'label > 99', training rows: 0 of 20 rows"),
        ({"filter": "species > 'cow'"}, ArgumentError, "\"species > 'cow'\" is no comparison .* Write COLUMN OP VALUE"),
        ({"filter": "label > species"}, ArgumentError, "'label > species' is no comparison of a column with a value"),
        ({"filter": "species in 'human'"}, ArgumentError, "is no comparison"),
        ({"filter": "species in [human, cow]"}, ArgumentError, r"'species in \[human, cow\]' is no comparison"),
        ({"filter": "label == None"}, ArgumentError, "is None or is not None"),
        ({"filter": "__import__('os').abort()"}, ArgumentError, "is no comparison"),
        ({"filter": "label >"}, ArgumentError, "invalid syntax"),
        ({"filter": "p K (nM) > 7"}, ArgumentError, "invalid syntax.* stands in backticks"),
        ({"filter": "species in []"}, ArgumentError, "is no comparison"),
        ({"filter": ""}, ArgumentError, "invalid syntax"),
        ({"filter": "label > 3", "streaming": True}, ArgumentError, "filter the stream, or drop --streaming"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(table, given, error, said):
    with pytest.raises(error, match=said):
        load(table, **given)
