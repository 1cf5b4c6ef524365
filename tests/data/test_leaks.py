import random

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from hf_ext.data.leaks import leak_report


def random_sequences(num, length=100, seed=0):
    letters = np.array(list("ACDEFGHIKLMNPQRSTVWY"))
    return ["".join(row) for row in letters[np.random.default_rng(seed).integers(0, 20, (num, length))]]


A, B, C, D = random_sequences(4)
NEAR_A = A[:50] + ("W" if A[50] != "W" else "Y") + A[51:]  # 99 % identical
FAR_A = A[:75] + D[75:]  # 75 to 77 %


def splits(train, test, name="test"):
    parts = {"train": train, name: test}
    return DatasetDict(
        {
            key: Dataset.from_dict({"heavy": [h for h, _ in rows], "light": [x for _, x in rows]})
            for key, rows in parts.items()
        }
    )


def near(at_90, at_70):
    return [
        {"identity": 0.9, "num_rows": at_90, "is_lower_bound": False},
        {"identity": 0.7, "num_rows": at_70, "is_lower_bound": False},
    ]


def test_leak_numbers_equal_those_counted_by_hand():
    report = leak_report(
        splits(
            train=[(A, B), (A, C), (B, B)],
            test=[(A, B), (A, B), (NEAR_A, B), (FAR_A, C), (B, C), (D, C)],
        ),
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
        "near": near(3, 4),  # both (A, B) and (near A, B); and (far A, C). Not (B, C): no training row has B with C
    }


@pytest.mark.parametrize(
    ("length", "num", "at_90", "at_70"),
    [
        *[(9, 1, 0, 1), (15, 1, 1, 1), (20, 1, 1, 1), (46, 1, 1, 1), (53, 1, 1, 1), (60, 2, 1, 1), (120, 12, 1, 1)],
        *[(250, 25, 1, 1), (250, 26, 0, 1), (250, 75, 0, 1), (250, 100, 0, 0)],
    ],
)
def test_mutants_of_training_sequences_are_near_copies_at_every_length(length, num, at_90, at_70):
    rng = random.Random(length + num)
    train, test = random_sequences(50, length), []
    for sequence in train:
        places = rng.sample(range(length), num)
        test.append("".join("CA"[x == "C"] if i in places else x for i, x in enumerate(sequence)))
    data = DatasetDict(train=Dataset.from_dict({"s": train}), test=Dataset.from_dict({"s": test}))
    assert leak_report(data, ["s"])["row"]["near"] == near(50 * at_90, 50 * at_70)


def test_one_column_row_equals_its_column():
    data = DatasetDict(train=Dataset.from_dict({"s": [A, B]}), test=Dataset.from_dict({"s": [A, C]}))
    report = leak_report(data, ["s"])
    assert report["row"] == report["columns"]["s"]
    assert report["row"]["num_test_rows_in_train"] == 1


def test_sample_of_test_rows_is_seeded_and_reported():
    others = random_sequences(30, seed=3)
    data = DatasetDict(train=Dataset.from_dict({"s": [A]}), test=Dataset.from_dict({"s": [*others, *[NEAR_A] * 30]}))
    assert leak_report(data, ["s"])["row"]["near"] == near(30, 30)
    sampled = leak_report(data, ["s"], max_checked=20, seed=4)["row"]
    assert sampled["num_checked"] == 20
    assert 5 <= sampled["near"][0]["num_rows"] <= 15
    assert sampled == leak_report(data, ["s"], max_checked=20, seed=4)["row"]


def test_a_search_that_would_take_too_long_is_a_lower_bound():
    sequences = random_sequences(60)
    data = DatasetDict(
        train=Dataset.from_dict({"s": [NEAR_A, *sequences]}), test=Dataset.from_dict({"s": [A, C, "W" * 9]})
    )
    cut = leak_report(data, ["s"], identities=[0.7], max_work=0)["row"]["near"]
    whole = leak_report(data, ["s"], identities=[0.7])["row"]["near"]
    assert cut == [{"identity": 0.7, "num_rows": 2, "is_lower_bound": True}]  # A and C stand in train
    assert whole == [{"identity": 0.7, "num_rows": 2, "is_lower_bound": False}]


def test_validation_stands_in_for_a_missing_test_and_nothing_for_both():
    assert leak_report(splits([(A, B)], [(A, C)], "validation"), ["heavy"])["compared"] == "validation"
    assert leak_report(DatasetDict(train=Dataset.from_dict({"s": [A]})), ["s"]) == {}


def test_rows_of_train_are_named_by_their_row_in_the_file_and_five_at_most():
    data = splits([(A, B), (B, B)], [(B, B)] * 7 + [(D, C)])
    for name, part in data.items():
        data[name] = part.add_column("source_row", [10 * i for i in range(len(part))])
    assert leak_report(data, ["heavy", "light"])["repeated"] == [[0, 10], [10, 10], [20, 10], [30, 10], [40, 10]]
    assert leak_report(splits([(A, B)], [(D, C)]), ["heavy", "light"])["repeated"] == []
