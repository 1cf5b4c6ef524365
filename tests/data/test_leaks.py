import numpy as np
from datasets import Dataset, DatasetDict

from hf_ext.data.leaks import leak_report


def random_sequences(num, length=100, seed=0):
    letters = np.array(list("ACDEFGHIKLMNPQRSTVWY"))
    return ["".join(row) for row in letters[np.random.default_rng(seed).integers(0, 20, (num, length))]]


A, B, C, D = random_sequences(4)
NEAR_A = A[:50] + ("W" if A[50] != "W" else "Y") + A[51:]  # 5 of 96 5-mers differ: similarity 91/96 = 0.948
FAR_A = A[:40] + D[40:]


def splits(train, test, name="test"):
    parts = {"train": train, name: test}
    return DatasetDict(
        {
            key: Dataset.from_dict({"heavy": [h for h, _ in rows], "light": [x for _, x in rows]})
            for key, rows in parts.items()
        }
    )


def test_leak_numbers_equal_those_counted_by_hand():
    report = leak_report(
        splits(
            train=[(A, B), (A, C), (B, B)],
            test=[(A, B), (A, B), (NEAR_A, B), (FAR_A, C), (B, C)],
        ),
        ["heavy", "light"],
    )
    assert (report["compared"], report["threshold"], report["k"]) == ("test", 0.9, 5)
    assert report["columns"]["heavy"] == {
        "num_test_rows": 5,
        "num_test_sequences": 4,  # A, near A, far A, B
        "num_test_rows_in_train": 3,  # A, A, B
        "num_test_sequences_in_train": 2,  # A, B
        "num_checked": 2,
        "num_near_duplicates": 1,  # near A
        "is_lower_bound": False,
    }
    assert report["columns"]["light"] == {
        "num_test_rows": 5,
        "num_test_sequences": 2,
        "num_test_rows_in_train": 5,
        "num_test_sequences_in_train": 2,
        "num_checked": 0,
        "num_near_duplicates": 0,
        "is_lower_bound": False,
    }
    assert report["row"] == {
        "num_test_rows": 5,
        "num_test_sequences": 4,
        "num_test_rows_in_train": 2,  # (A, B) twice
        "num_test_sequences_in_train": 1,
        "num_checked": 3,
        # near A, B: 91 of 96 and all of B. B, C against B, B: all 96 5-mers of the smaller one. Not far A, C
        "num_near_duplicates": 2,
        "is_lower_bound": False,
    }


def test_one_column_row_equals_its_column():
    data = DatasetDict(train=Dataset.from_dict({"s": [A, B]}), test=Dataset.from_dict({"s": [A, C]}))
    report = leak_report(data, ["s"])
    assert report["row"] == report["columns"]["s"]
    assert report["row"]["num_test_rows_in_train"] == 1


def test_sample_of_test_sequences_is_seeded_and_reported():
    others = random_sequences(30, seed=3)
    data = DatasetDict(train=Dataset.from_dict({"s": [A]}), test=Dataset.from_dict({"s": [*others, NEAR_A]}))
    assert leak_report(data, ["s"])["row"]["num_near_duplicates"] == 1
    sampled = leak_report(data, ["s"], max_checked=10, seed=4)["row"]
    assert sampled["num_checked"] == 10
    assert sampled == leak_report(data, ["s"], max_checked=10, seed=4)["row"]


def test_validation_stands_in_for_a_missing_test_and_nothing_for_both():
    assert leak_report(splits([(A, B)], [(A, C)], "validation"), ["heavy"])["compared"] == "validation"
    assert leak_report(DatasetDict(train=Dataset.from_dict({"s": [A]})), ["s"]) == {}
