"""Loading: typed columns, a report, splits, streams, and what cannot be loaded or asked for."""

import csv
import json
import pickle

import pytest
from datasets import Value

from hf_ext.data import DataArguments, load_data, load_sequences
from hf_ext.errors import ArgumentError, DataError

BASE = "MKTVLACDEFGHIK"


def sequence(number):
    letters = "ACDEFGHIKLMNPQRSTVWY"
    return BASE + letters[number // 20] + letters[number % 20]


def write_csv(path, rows, header=("sequence", "label")):
    with open(path, "w", newline="") as handle:
        csv.writer(handle).writerows([header, *rows])
    return str(path)


def good_rows(num=20):
    return [(sequence(i), i / 10) for i in range(num)]


def load(name, output_dir=None, needs_labels=True, **kwargs):
    return load_data(
        DataArguments(dataset_name=name, **kwargs), output_dir=output_dir, seed=0, needs_labels=needs_labels
    )


def fault(name, **kwargs):
    with pytest.raises(DataError) as error:
        load(name, **kwargs)
    return str(error.value)


def all_rows(splits):
    return sorted((row for split in splits.values() for row in split), key=lambda row: row["source_row"])


def test_loading_gives_typed_columns_and_a_json_report(tmp_path):
    rows = [(f"id{i}", sequence(i).lower() if i < 3 else sequence(i), i / 10, f"g{i % 4}") for i in range(20)]
    path = write_csv(tmp_path / "a.csv", rows, ("name", "sequence", "label", "group"))
    data = load(path, id_column="name", group_column="group")
    train = data.splits["train"]
    assert train.features == {
        "sequence": Value("string"),
        "label": Value("float64"),
        "group": Value("string"),
        "name": Value("string"),
        "source_row": Value("int64"),
    }
    loaded = all_rows(data.splits)
    assert [row["sequence"] for row in loaded] == [sequence(i) for i in range(20)]
    assert [row["label"] for row in loaded] == [i / 10 for i in range(20)]
    assert [row["source_row"] for row in loaded] == list(range(2, 22))
    assert data.report["changes"] == {"sequence": {"upper_cased": 3}}
    assert data.report["sizes"] == {"train": 16, "validation": 2, "test": 2}
    assert (data.report["rows_read"], data.report["rows_rejected"]) == (20, 0)
    assert data.report["leaks"]["compared"] == "test"
    assert json.loads(json.dumps(data.report, allow_nan=False)) == data.report


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (("", 1), "row 4, column 'sequence', value '': the sequence is missing"),
        (("MK-TVL", 1), "gap '-' at position 3 of 6. Take gaps out"),
        ((BASE, "strong"), "row 4, column 'label', value 'strong': the label is not a number"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_bad_row_stops_the_run_with_file_row_column_value_and_rule(tmp_path, bad, message, streaming):
    rows = good_rows()
    rows[2] = bad
    path = write_csv(tmp_path / "a.csv", rows)
    with pytest.raises(DataError) as error:
        all_rows(load(path, streaming=streaming, output_dir=tmp_path / "out").splits)
    assert f"  {path}, row 4, " in str(error.value)
    assert message in str(error.value)
    assert "--bad_rows drop" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_dropped_rows_are_listed_in_a_file_and_counted(tmp_path):
    rows = good_rows()
    rows[0], rows[5] = ("MK7VL", "x"), ("", 1)
    path = write_csv(tmp_path / "a.csv", rows)
    data = load(path, bad_rows="drop", output_dir=tmp_path / "out")
    assert [row["source_row"] for row in all_rows(data.splits)] == [3, 4, 5, 6, *range(8, 22)]
    assert data.report["rows_rejected"] == 2
    assert sum(data.report["rejected_by_rule"].values()) == 3
    assert data.report["rejected_by_rule"]["the sequence is missing"] == 1
    with open(tmp_path / "out" / "rejected_rows.csv", newline="") as handle:
        listed = list(csv.DictReader(handle))
    assert [(row["row"], row["column"], row["value"]) for row in listed] == [
        ("2", "sequence", "MK7VL"),
        ("2", "label", "x"),
        ("7", "sequence", ""),
    ]
    assert all(row["rule"] and row["remedy"] and row["file"] == path for row in listed)
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["rejected_rows.csv"]


def test_dropping_every_row_or_without_a_folder_is_an_error(tmp_path):
    path = write_csv(tmp_path / "a.csv", [("MK7VL", 1), ("", 2)])
    assert "would leave no row" in fault(path, bad_rows="drop", output_dir=tmp_path)
    path = write_csv(tmp_path / "b.csv", [("MK7VL", 1), *good_rows()])
    with pytest.raises(ArgumentError, match=r"needs an output folder for rejected_rows\.csv"):
        load(path, bad_rows="drop")
    with pytest.raises(ArgumentError, match="dataset_name is missing"):
        load(None)


def test_bounds_appear_only_where_something_is_censored(tmp_path):
    rows = [(sequence(i), f"<={i}" if i < 3 else f">{i}" if i > 17 else i) for i in range(20)]
    data = load(write_csv(tmp_path / "a.csv", rows), split_sizes=[1.0, 0.0, 0.0])
    assert data.splits["train"]["bound"][:] == [-1] * 3 + [0] * 15 + [1] * 2
    assert data.splits["train"].features["bound"] == Value("int8")
    rows = [(sequence(i), i, 0) for i in range(20)]
    path = write_csv(tmp_path / "b.csv", rows, ("sequence", "label", "censored"))
    assert "bound" not in load(path, censor_column="censored").splits["train"].column_names
    rows[19] = (sequence(19), 19, 1)
    path = write_csv(tmp_path / "c.csv", rows, ("sequence", "label", "censored"))
    assert load(path, censor_column="censored", split_sizes=[1, 0, 0]).splits["train"]["bound"][:] == [0] * 19 + [-1]


def test_group_split_keeps_groups_and_refuses_rows_without_one(tmp_path):
    rows = [(sequence(i), i, f"g{i % 5}") for i in range(20)]
    path = write_csv(tmp_path / "a.csv", rows, ("sequence", "label", "lab"))
    data = load(path, split="group:lab", split_sizes=[0.6, 0.2, 0.2])
    places = [set(split["lab"][:]) for split in data.splits.values()]
    assert sorted(map(len, places)) == [1, 1, 3]
    assert len(set.union(*places)) == 5
    rows[1] = (*rows[1][:2], "")
    path = write_csv(tmp_path / "b.csv", rows, ("sequence", "label", "lab"))
    assert "row 3, column 'lab', value '': the group is missing" in fault(path, split="group:lab")


def test_training_subset_is_seeded_and_reported(tmp_path):
    args = DataArguments(dataset_name=write_csv(tmp_path / "a.csv", good_rows()), max_train_samples=5)
    first, again, other = (load_data(args, output_dir=None, seed=seed) for seed in (1, 1, 2))
    assert len(first.splits["train"]) == 5
    assert first.splits["train"][:] == again.splits["train"][:] != other.splits["train"][:]
    assert first.splits["test"][:] == other.splits["test"][:]
    assert first.report["train_subset"] == {"num_rows": 5, "of": 16}


def test_folder_files_are_the_splits_and_faults_name_their_file(tmp_path):
    for name, start in (("train", 0), ("test", 10)):
        write_csv(tmp_path / f"{name}.csv", [(sequence(i), i) for i in range(start, start + 10)])
    data, stream = load(str(tmp_path)), load(str(tmp_path), streaming=True, max_train_samples=3)
    assert data.report["split"]["rule"] == "files"
    assert {name: len([*split]) for name, split in stream.splits.items()} == {"train": 3, "test": 10}
    assert data.report["sizes"] == {"train": 9, "validation": 1, "test": 10}
    assert "became it" in data.report["split"]["notes"][0]
    assert load(str(tmp_path), split="random").report["sizes"] == {"train": 16, "validation": 2, "test": 2}
    (tmp_path / "alone").mkdir()
    write_csv(tmp_path / "alone" / "train.csv", good_rows())
    alone = load(str(tmp_path / "alone"))
    assert alone.report["sizes"] == {"train": 16, "validation": 2, "test": 2}  # one file says nothing of splits
    assert alone.splits["train"].column_names == ["sequence", "label", "source_row"]
    path = write_csv(tmp_path / "test.csv", [("MK7VL", 1)])
    assert f"{path}, row 2, column 'sequence'" in fault(str(tmp_path))


@pytest.mark.parametrize("bad_rows", ["error", "drop"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_that_names_no_split_is_refused_and_never_dropped(tmp_path, streaming, bad_rows):
    rows = [(sequence(i), i, "train" if i else "holdout") for i in range(20)]
    path = write_csv(tmp_path / "a.csv", rows, ("sequence", "label", "part"))
    options = {"split_column": "part", "bad_rows": bad_rows, "streaming": streaming, "output_dir": tmp_path}
    with pytest.raises(DataError, match=r"row 2, column 'part', value 'holdout': names no split\. Use train, valid"):
        all_rows(load(path, **options).splits)


def test_stream_labels_and_drops_like_a_table(tmp_path):
    rows = [(sequence(i), f"<={i}" if i == 4 else i) for i in range(20)]
    rows[7] = ("MK7VL", 7)
    path = write_csv(tmp_path / "a.csv", rows)
    table = load(path, output_dir=tmp_path / "t", bad_rows="drop")
    stream = load(path, output_dir=tmp_path / "s", streaming=True, bad_rows="drop")
    assert all_rows(stream.splits) == all_rows(table.splits)
    sent = pickle.loads(pickle.dumps(stream.splits))  # as to the workers of a data loader
    assert all_rows(sent) == all_rows(table.splits)
    assert [row["source_row"] for row in all_rows(stream.splits)] == [*range(2, 9), *range(10, 22)]
    assert (tmp_path / "s" / "rejected_rows.csv").read_text() != ""


def test_sequences_for_prediction_keep_their_order_and_need_no_labels(tmp_path):
    path = write_csv(tmp_path / "a.csv", [("MKTVL", "b"), ("acdef", "a")], ("sequence", "name"))
    expected = [
        {"sequence": "MKTVL", "name": "b", "source_row": 2},
        {"sequence": "ACDEF", "name": "a", "source_row": 3},
    ]
    for streaming in (False, True):
        loaded = load_sequences(DataArguments(dataset_name=path, id_column="name", streaming=streaming))
        assert list(loaded.table) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bad_rows": "ignore"}, "bad_rows='ignore': allowed are error, drop"),
        ({"max_residues": 0}, "max_residues=0: must be at least 1"),
        ({"sequence_columns": ["a", "a"]}, "each once"),
        ({"split": "random", "split_column": "part"}, "drop --split and --split_sizes"),
        ({"split_sizes": [0.5, 0.2, 0.3], "split_column": "part"}, "drop --split and --split_sizes"),
        *(({"split": rule}, "use random, group:COLUMN or cluster") for rule in ("group", "group:", "random:x")),
        *(({"split_sizes": sizes}, "give three shares") for sizes in ([0.8, 0.2], [0.8, 0.1, 0.2], [1.2, -0.1, -0.1])),
        ({"cluster_column": "sequence"}, "only acts with --split cluster"),
        ({"missing_chains": ["sequence"]}, "some of several sequence columns"),
        ({"split": "cluster", "cluster_column": "light"}, "one of sequence"),
        ({"split": "cluster", "streaming": True}, "drop --streaming"),
        ({"cluster_identity": 0.8}, "cluster_identity only acts with --split cluster"),
        ({"split": "cluster", "cluster_identity": 0.5}, "use 0.7 to 1, the share of identical residues. For less,"),
        ({"split": "cluster", "cluster_file": "x.tsv"}, "say with --id_column"),
        ({"split": "cluster", "cluster_file": "x", "id_column": "a", "cluster_identity": 0.9}, "finished clusters"),
        ({"group_column": "label"}, "column 'label' is one that loading writes"),
        ({"sequence_columns": ["source_row"]}, "column 'source_row' is one that loading writes"),
    ],
)
def test_malformed_or_contradicting_arguments_are_refused(values, message):
    with pytest.raises(ArgumentError) as error:
        DataArguments(**values)
    assert message in str(error.value)
