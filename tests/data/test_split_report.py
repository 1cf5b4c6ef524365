"""What of test stands in training, and repeats with other labels, counted by hand."""

import math
import random

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from hf_ext.data.split_report import describe_repeats, leak_report, repeat_report


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
        {"identity": 0.9, "num_rows": at_90},
        {"identity": 0.7, "num_rows": at_70},
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
        "near": near(4, 5),  # of (B, C) too each sequence is there, though no training row has B with C
    }


@pytest.mark.parametrize(
    ("length", "num", "at_90", "at_70"),
    [
        *[(9, 1, 0, 1), (20, 1, 1, 1), (120, 12, 1, 1), (250, 26, 0, 1), (250, 75, 0, 1), (250, 100, 0, 0)],
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


def test_rows_of_train_are_named_by_their_row_in_the_file_and_five_at_most():
    data = splits([(A, B), (B, B)], [(B, B)] * 7 + [(D, C)])
    for name, part in data.items():
        data[name] = part.add_column("source_row", [10 * i for i in range(len(part))])
    assert leak_report(data, ["heavy", "light"])["repeated"] == [[0, 10], [10, 10], [20, 10], [30, 10], [40, 10]]
    assert leak_report(splits([(A, B)], [(D, C)]), ["heavy", "light"])["repeated"] == []


def labelled(train, test, **columns):
    """Rows of (heavy, light, label)."""
    parts = {"train": train, "test": test}
    return DatasetDict(
        {
            name: Dataset.from_dict({**dict(zip(("heavy", "light", "label"), map(list, zip(*rows)))), **columns})
            for name, rows in parts.items()
        }
    )


ROWS = [("A", "C", 6.0), ("A", "D", 8.0), ("A", "C", 7.0), ("K", "C", 5.0)], [("K", "C", 5.0), ("W", "W", 9.0)]


def test_noise_and_ceiling_by_hand():
    report = repeat_report(labelled(*ROWS), ["heavy", "light"])
    # (A, C) has 6 and 7, (K, C) twice 5: squares of 0.5 with 2 degrees of freedom; labels 6 8 7 5 5 9 vary by 20 / 9.
    noise = math.sqrt(0.5 / 2)
    share = 0.25 / (20 / 9)
    assert {key: value for key, value in report.items() if key != "rows"} == pytest.approx(
        {
            "num_all": 6,
            "num_rows": 4,
            "num_groups": 2,
            "num_disagreeing": 1,
            "noise": noise,
            "share": share,
            "max_pearson": math.sqrt(1 - share),
            "max_spearman": 6 / math.pi * math.asin(math.sqrt(1 - share) / 2),
        }
    )
    assert report["rows"] == [[{"split": "train", "row": 1, "label": 6.0}, {"split": "train", "row": 3, "label": 7.0}]]
    assert "1 of 2 sequences that occur more than once (4 rows)" in describe_repeats(report)
    assert "train row 1 6, train row 3 7" in describe_repeats(report)


def test_bounds_are_no_measurements_that_could_disagree():
    data = labelled([("A", "C", 6.0), ("A", "C", 7.0)], [("K", "C", 5.0), ("K", "K", 8.0)], bound=[-1, 0])
    assert repeat_report(data, ["heavy", "light"])["num_rows"] == 0
    data = labelled([("A", "C", 6.0), ("A", "C", 7.0)], [("K", "C", 5.0), ("K", "K", 8.0)], bound=[0, 0])
    assert repeat_report(data, ["heavy", "light"])["num_rows"] == 2
