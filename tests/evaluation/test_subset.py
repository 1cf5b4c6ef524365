"""The rows of a cheap evaluation: exact in number, the same every time, labels and groups in proportion."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pytest

from hf_ext.errors import ArgumentError
from hf_ext.evaluation import choose_rows
from hf_ext.evaluation.row_metrics import choose_subset

pytestmark = pytest.mark.internals
PINNED = [6, 20, 36, 37, 51, 58]  # what a run from another day or machine must find again


def counts_of(values: Any, rows: np.ndarray) -> dict[Any, int]:
    return dict(Counter(np.asarray(values)[rows].tolist()))


def test_classes_keep_their_shares_of_any_kind() -> None:
    for names in (["low", "mid", "high"], [1.5, 2.5, 9.0]):
        labels = np.repeat(names, [60, 30, 10])
        assert [*counts_of(labels, choose_subset(labels, size=10)).values()] == [6, 3, 1]
    assert counts_of([True] * 30 + [False] * 70, choose_subset([True] * 30 + [False] * 70, size=10)) == {
        True: 3,
        False: 7,
    }
    assert len(choose_subset([6.0] * 50, size=7)) == 7


def one_per_decade(choose: Callable[[np.ndarray, int], np.ndarray]) -> bool:
    labels = np.random.default_rng(0).permutation(100).astype(float)
    return all(counts_of(labels // 10, choose(labels, seed)) == dict.fromkeys(range(10), 1) for seed in range(5))


def test_numbers_are_stratified_and_the_check_notices_rows_at_random() -> None:
    assert one_per_decade(lambda labels, seed: choose_subset(labels, size=10, seed=seed))
    assert not one_per_decade(lambda labels, seed: np.random.default_rng(seed).choice(len(labels), 10, replace=False))


def test_groups_keep_their_shares_and_labels_within_them() -> None:
    labels, groups = ["weak", "strong"] * 50, ["a"] * 80 + ["b"] * 20
    cells = [f"{group} {label}" for group, label in zip(groups, labels)]
    found = counts_of(cells, choose_subset(labels, groups, size=20))
    assert found == {"a weak": 8, "a strong": 8, "b weak": 2, "b strong": 2}
    generator = np.random.default_rng(3)
    labels, groups = generator.normal(size=2000), generator.choice(list("abcd"), 2000, p=[0.5, 0.3, 0.15, 0.05])
    for seed in range(10):
        rows = choose_subset(labels, groups, size=100, seed=seed)
        for group, num_rows in Counter(groups.tolist()).items():
            assert abs(counts_of(groups, rows)[group] - num_rows / 20) < 1
        assert abs(labels[rows].mean() - labels.mean()) < 0.1  # of rows at random this spreads by 0.1


def test_the_same_seed_gives_the_same_rows_on_every_machine() -> None:
    labels, groups = [float(i % 7) for i in range(60)], [i % 4 for i in range(60)]
    rows = choose_subset(labels, groups, size=6, seed=42)
    assert (rows.tolist(), rows.dtype) == (PINNED, np.int64)
    assert choose_subset(labels, [str(group) for group in groups], size=6, seed=42).tolist() == PINNED
    assert choose_subset(labels, groups, size=6, seed=43).tolist() != PINNED


def test_size_is_a_count_or_a_share() -> None:
    for size, expected in ((1, 1), (13, 13), (50, 50), (999, 50), (0.05, 2), (0.07, 4), (0.5, 25), (1.0, 50)):
        rows = choose_subset(np.arange(50.0), size=size)
        assert len(rows) == len(set(rows.tolist())) == expected
        assert rows.tolist() == sorted(rows)
    for wrong in (0, -3, 0.0, -0.1, 1.5, float("nan"), True, "5%", 0.009):
        with pytest.raises(ArgumentError, match="size="):
            choose_subset(np.arange(50.0), size=wrong)


LABELS = [float(i % 7) for i in range(60)]
GROUPS = [f"antibody {i % 4}" for i in range(60)]
TABLE = datasets.Dataset.from_dict({"sequence": ["A"] * 60, "label": LABELS, "antibody": GROUPS})


def stream_of(rows) -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(lambda: iter(rows))


def test_rows_are_those_of_choose_subset_whatever_holds_them():
    expected = choose_subset(LABELS, GROUPS, size=6, seed=1).tolist()
    plain = [dict(row) for row in TABLE]
    for dataset in (TABLE, plain, stream_of(plain), TABLE.rename_column("label", "labels").with_format("torch")):
        assert choose_rows(dataset, size=6, group_column="antibody", seed=1).rows.tolist() == expected
    assert choose_rows(TABLE, size=6, seed=1).rows.tolist() != expected


def test_the_chosen_rows_of_a_stream_are_kept_in_order():
    chosen = choose_rows(stream_of([dict(row) for row in TABLE]), size=0.1)
    assert [row["label"] for row in chosen.kept] == [LABELS[i] for i in chosen.rows]
    assert choose_rows(TABLE, size=0.1).kept is None
    assert not choose_rows(TABLE, size=0.1).are_all
    assert choose_rows(TABLE, size=60).are_all
