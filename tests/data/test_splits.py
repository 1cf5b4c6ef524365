"""Splits: sizes, seeds, groups and clusters; and what of test stands in training, or repeats with other labels."""

import math
import random
from collections import Counter

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from hf_ext.data import DataArguments, leak_report, split_report
from hf_ext.data import splits as splitting
from hf_ext.data.split_report import describe_repeats, repeat_report
from hf_ext.errors import DataError
from hf_ext.labels import ONE_NUMBER, make_kind

pytestmark = pytest.mark.internals
SIZES = (0.6, 0.2, 0.2)


def split_rows(data, rule=None, sizes=(0.8, 0.1, 0.1), seed=42, divide=splitting.split_rows, **given):
    return divide(data, DataArguments(split=rule, split_sizes=[*sizes], split_seed=seed, **given))


def split_by_column(data, column, **given):
    return split_rows(data, split_column=column, **given)


def split_stream(data, **given):
    return split_rows(data, divide=splitting.split_stream, streaming=True, **given)


def random_sequences(num, length=40, seed=0):
    letters = np.array(list("ACDEFGHIKLMNPQRSTVWY"))
    return ["".join(row) for row in letters[np.random.default_rng(seed).integers(0, 20, (num, length))]]


def table(num=20, **columns):
    return Dataset.from_dict({"sequence": random_sequences(num), "source_row": list(range(2, 2 + num)), **columns})


def rows_of(splits):
    return {name: split["source_row"][:] for name, split in splits.items()}


def families():
    """20 families of 5: a sequence and four copies, each with one residue exchanged (5 of 36 5-mers)."""
    members = []
    for base in (sequence.replace("W", "A") for sequence in random_sequences(20)):
        members += [base, *(base[:at] + "W" + base[at + 1 :] for at in (10, 15, 20, 25))]
    return Dataset.from_dict({"sequence": members, "family": [i // 5 for i in range(100)]})


def crossing(splits, column):
    """How many values of `column` occur in more than one split."""
    places = Counter(value for split in splits.values() for value in set(split[column][:]))
    return sum(num > 1 for num in places.values())


def test_random_split_has_the_sizes_covers_every_row_once_and_repeats_with_its_seed():
    splits, report = split_rows(table(), sizes=SIZES, seed=1)
    rows = rows_of(splits)
    assert report == {"rule": "random", "seed": 1, "notes": []}
    assert splits.num_rows == {"train": 12, "validation": 4, "test": 4}
    assert sorted(row for part in rows.values() for row in part) == list(range(2, 22))
    assert all(part == sorted(part) for part in rows.values())
    assert rows_of(split_rows(table(), sizes=SIZES, seed=1)[0]) == rows
    assert rows_of(split_rows(table(), sizes=SIZES, seed=2)[0]) != rows


def test_tiny_tables_fill_every_split_or_say_why_not():
    splits, _ = split_rows(table(3), sizes=(0.9, 0.05, 0.05))
    assert {name: len(split) for name, split in splits.items()} == {"train": 1, "validation": 1, "test": 1}
    splits, _ = split_rows(table(2), sizes=(0.5, 0.5, 0.0))
    assert {name: len(split) for name, split in splits.items()} == {"train": 1, "validation": 1}
    with pytest.raises(DataError, match=r"2 rows cannot fill 3 splits .--split_sizes 0.8 0.1 0.1.: add rows"):
        split_rows(table(2))


def test_group_split_never_divides_a_group_and_a_random_split_does():
    groups = [name for name, num in {"a": 10, "b": 6, "c": 4, "d": 4, "e": 3, "f": 3}.items() for _ in range(num)]
    data = table(30, group=groups)
    splits, report = split_rows(data, rule="group:group", sizes=SIZES)
    # wanted 18, 6, 6: a and b to train (16), c and d to validation and test (4 each); all lack 2: e train, f validation
    assert splits.num_rows == {"train": 19, "validation": 7, "test": 4}
    assert report["num_groups"] == 6
    assert crossing(splits, "group") == 0
    assert crossing(split_rows(data, sizes=SIZES)[0], "group") > 0
    splits, _ = split_rows(table(40, antibody=[f"ab{i % 4}" for i in range(40)]), rule="group:antibody")
    assert {name: len(split) for name, split in splits.items()} == {"train": 20, "validation": 10, "test": 10}
    with pytest.raises(DataError, match="2 groups in column 'antibody' cannot fill 3 splits"):
        split_rows(table(10, antibody=["a", "b"] * 5), rule="group:antibody")


def test_cluster_split_keeps_near_duplicates_together_and_a_random_split_does_not():
    data = families()
    splits, report = split_rows(data, rule="cluster", sizes=SIZES)
    assert crossing(splits, "family") == 0
    assert report["num_clusters"] == 20
    assert report["identity"] == 0.8
    assert splits.num_rows == {"train": 60, "validation": 20, "test": 20}
    assert crossing(split_rows(data, sizes=SIZES)[0], "family") > 0


@pytest.mark.parametrize(("length", "num"), [(9, 1), (46, 9), (250, 50)])
def test_no_pair_at_the_cluster_identity_is_divided_and_a_random_split_divides_many(length, num):
    rng = random.Random(length + num)
    bases = random_sequences(60, length)
    data = Dataset.from_dict(
        {"sequence": [*bases, *(substitute(rng, one, num) for one in bases)], "pair": [*range(60)] * 2}
    )
    splits, report = split_rows(data, rule="cluster", sizes=SIZES)
    assert (crossing(splits, "pair"), report["num_clusters"]) == (0, 60)
    assert crossing(split_rows(data, sizes=SIZES)[0], "pair") > 10


def substitute(rng, sequence, num):
    places = rng.sample(range(len(sequence)), num)
    return "".join("A" if i in places and x == "C" else "C" if i in places else x for i, x in enumerate(sequence))


def test_rows_stand_together_where_every_column_is_alike():
    heavy, light = random_sequences(60, 50), random_sequences(60, 30, seed=1)
    rng = random.Random(0)
    alike = [substitute(rng, one, 5) for one in heavy]
    data = Dataset.from_dict({"heavy": heavy + alike, "light": light + light, "pair": [*range(60)] * 2})
    splits, report = split_rows(data, rule="cluster", sizes=SIZES, sequence_columns=["heavy", "light"])
    assert (crossing(splits, "pair"), report["num_clusters"]) == (0, 60)
    data = Dataset.from_dict({"heavy": heavy + alike, "light": light + light[1:] + light[:1], "pair": [*range(60)] * 2})
    report = split_rows(data, rule="cluster", sizes=SIZES, sequence_columns=["heavy", "light"])[1]
    assert report["num_clusters"] == 120  # alike in one chain only
    options = {"rule": "cluster", "sizes": SIZES, "sequence_columns": ["heavy", "light"], "cluster_column": "heavy"}
    assert split_rows(data, **options)[1]["num_clusters"] == 60


def test_clusters_of_another_program_are_kept_together(tmp_path):
    path = tmp_path / "x_cluster.tsv"
    path.write_bytes("".join(f"p{i // 4 * 4}\tp{i}\r\n" for i in range(40)).encode("utf-8-sig"))
    data = table(20, name=[f"p{2 * i}" for i in range(20)], family=[i // 2 for i in range(20)])
    options = {"rule": "cluster", "sizes": SIZES, "cluster_file": str(path), "id_column": "name"}
    splits, report = split_rows(data, **options)
    assert (crossing(splits, "family"), report["num_clusters"]) == (0, 10)
    path.write_text("p0\tp0\n")
    with pytest.raises(DataError, match="19 of 20 rows are in no cluster, for example 'p2'"):
        split_rows(data, **options)
    path.write_text("p0 p0\n")
    with pytest.raises(DataError, match="row 1: 'p0 p0' is not representative, tab, member"):
        split_rows(data, **options)
    with pytest.raises(DataError, match="No such file"):
        split_rows(data, **options | {"cluster_file": str(tmp_path / "none.tsv")})


def test_split_column_accepts_every_spelling_and_is_dropped():
    values = ["train", "Train", "valid", "VALIDATION", "val", "dev", "test", " test "]
    splits, report = split_by_column(table(8, part=values), "part")
    assert rows_of(splits) == {"train": [2, 3], "validation": [4, 5, 6, 7], "test": [8, 9]}
    assert splits["train"].column_names == ["sequence", "source_row"]
    assert report["notes"] == []


def stream(num=400, **columns):
    return table(num, **columns).to_iterable_dataset()


def test_stream_split_covers_every_row_once_and_repeats_with_its_seed():
    splits, report = split_stream(stream(), sizes=SIZES, seed=1)
    rows = {name: [row["source_row"] for row in split] for name, split in splits.items()}
    assert sorted(row for part in rows.values() for row in part) == list(range(2, 402))
    assert 200 < len(rows["train"]) < 280  # 240 expected, standard deviation 10
    assert [row["source_row"] for row in split_stream(stream(), sizes=SIZES, seed=1)[0]["test"]] == rows["test"]
    assert [row["source_row"] for row in split_stream(stream(), sizes=SIZES, seed=2)[0]["test"]] != rows["test"]
    assert isinstance(splits["train"], IterableDataset)
    assert report["notes"]


def test_stream_split_keeps_groups_together():
    splits, _ = split_stream(stream(group=[f"g{i % 40}" for i in range(400)]), rule="group:group", sizes=SIZES)
    seen = [{row["group"] for row in split} for split in splits.values()]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 40


A, B, C, D = random_sequences(4, 100)
NEAR_A = A[:50] + ("W" if A[50] != "W" else "Y") + A[51:]  # 99 % identical
FAR_A = A[:75] + D[75:]  # 75 to 77 %


def two_splits(train, test, name="test"):
    parts = {"train": train, name: test}
    return DatasetDict(
        {
            key: Dataset.from_dict({"heavy": [h for h, _ in rows], "light": [x for _, x in rows]})
            for key, rows in parts.items()
        }
    )


def near(*nums):
    return [{"identity": identity, "num_rows": num} for identity, num in zip((0.9, 0.7), nums)]


def test_fewer_rows_are_checked_beside_very_many_and_their_number_is_told(monkeypatch):
    monkeypatch.setattr(split_report, "MAX_PAIRS", 6)
    rows = two_splits(train=[(A, B), (A, C), (B, B)], test=[(A, B)] * 6)
    assert leak_report(rows, ["heavy", "light"])["row"]["num_checked"] == 3
    monkeypatch.undo()
    assert leak_report(rows, ["heavy", "light"])["row"]["num_checked"] == 6


def test_leak_numbers_equal_those_counted_by_hand():
    report = leak_report(
        two_splits(train=[(A, B), (A, C), (B, B)], test=[(A, B), (A, B), (NEAR_A, B), (FAR_A, C), (B, C), (D, C)]),
        ["heavy", "light"],
    )
    assert report["compared"] == "test"
    assert report["columns"]["heavy"] == {
        "num_test_rows": 6,
        "num_test_sequences": 5,  # A, near A, far A, B, D
        "num_test_rows_in_train": 3,  # A, A, B
        "num_test_sequences_in_train": 2,  # A, B
        "num_checked": 6,
        "near": near(4, 5),  # A, A, near A, B; and far A
    }
    assert report["columns"]["light"] == {
        "num_test_rows": 6,
        "num_test_sequences": 2,
        "num_test_rows_in_train": 6,
        "num_test_sequences_in_train": 2,
        "num_checked": 6,
        "near": near(6, 6),
    }
    assert report["repeated"] == [[1, 1], [2, 1]]  # no source_row: counted from 1
    assert report["row"] == {
        "num_test_rows": 6,
        "num_test_sequences": 5,
        "num_test_rows_in_train": 2,  # (A, B) twice
        "num_test_sequences_in_train": 1,
        "num_checked": 6,
        "near": near(4, 5),  # of (B, C) too each sequence is there, though no training row has B with C
    }


@pytest.mark.parametrize(
    ("length", "num", "at_90", "at_70"),
    [(9, 1, 0, 1), (20, 1, 1, 1), (120, 12, 1, 1), (250, 26, 0, 1), (250, 75, 0, 1), (250, 100, 0, 0)],
)
def test_mutants_of_training_sequences_are_near_copies_at_every_length(length, num, at_90, at_70):
    rng, train = random.Random(length + num), random_sequences(50, length)
    test = [substitute(rng, sequence, num) for sequence in train]
    data = DatasetDict(train=Dataset.from_dict({"s": train}), test=Dataset.from_dict({"s": test}))
    assert leak_report(data, ["s"])["row"]["near"] == near(50 * at_90, 50 * at_70)


def test_rows_of_train_are_named_by_their_row_in_the_file_and_five_at_most():
    data = two_splits([(A, B), (B, B)], [(B, B)] * 7 + [(D, C)])
    for name, part in data.items():
        data[name] = part.add_column("source_row", [10 * i for i in range(len(part))])
    assert leak_report(data, ["heavy", "light"])["repeated"] == [[0, 10], [10, 10], [20, 10], [30, 10], [40, 10]]
    assert leak_report(two_splits([(A, B)], [(D, C)]), ["heavy", "light"])["repeated"] == []


def labelled(train, test, **columns):
    """Rows of (heavy, light, label)."""
    parts = {"train": train, "test": test}
    return DatasetDict(
        {
            name: Dataset.from_dict({**dict(zip(("heavy", "light", "label"), map(list, zip(*rows)))), **columns})
            for name, rows in parts.items()
        }
    )


MEASURED = [("A", "C", 6.0), ("A", "D", 8.0), ("A", "C", 7.0), ("K", "C", 5.0)], [("K", "C", 5.0), ("W", "W", 9.0)]


def test_noise_and_ceiling_by_hand():
    report = repeat_report(labelled(*MEASURED), ["heavy", "light"], ONE_NUMBER)
    # (A, C) has 6 and 7, (K, C) twice 5: squares of 0.5 with 2 degrees of freedom; labels 6 8 7 5 5 9 vary by 20 / 9.
    noise = math.sqrt(0.5 / 2)
    share = 0.25 / (20 / 9)
    assert {key: value for key, value in report.items() if key != "rows"} == pytest.approx(
        {"num_rows": 4, "num_groups": 2, "num_disagreeing": 1, "noise": noise, "share": share}
    )
    assert report["rows"] == [[{"split": "train", "row": 1, "label": 6.0}, {"split": "train", "row": 3, "label": 7.0}]]
    assert "1 of 2 sequences that occur more than once (4 rows)" in describe_repeats(report)
    assert "train row 1 6, train row 3 7" in describe_repeats(report)


def test_bounds_are_no_measurements_that_could_disagree():
    data = labelled([("A", "C", 6.0), ("A", "C", 7.0)], [("K", "C", 5.0), ("K", "K", 8.0)], bound=[-1, 0])
    assert repeat_report(data, ["heavy", "light"], ONE_NUMBER)["num_rows"] == 0
    data = labelled([("A", "C", 6.0), ("A", "C", 7.0)], [("K", "C", 5.0), ("K", "K", 8.0)], bound=[0, 0])
    assert repeat_report(data, ["heavy", "light"], ONE_NUMBER)["num_rows"] == 2


def test_classes_that_disagree_are_counted_and_named():
    classes = make_kind("classification", ("label",), ("low", "high"))
    data = labelled([("A", "C", 0), ("A", "C", 1), ("K", "C", 1)], [("K", "C", 1), ("W", "W", 0)])
    report = repeat_report(data, ["heavy", "light"], classes)
    assert (report["num_rows"], report["num_groups"], report["num_disagreeing"]) == (4, 2, 1)
    text = describe_repeats(report)
    assert "disagree: train row 1 low, train row 2 high. No model gets all of them right." in text
    assert "Noise" not in text
