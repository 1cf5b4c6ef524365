"""Rows of datasets and streams are chosen alike: by label and group, the same every time."""

import datasets
import numpy as np
import pytest
import torch

from hf_ext.errors import DataError
from hf_ext.evaluation.dataset_subset import choose_rows
from hf_ext.evaluation.subset import choose_subset

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


def test_whether_the_chosen_rows_are_all_is_known():
    chosen = choose_rows(TABLE, size=7)
    assert len(set(chosen.rows)) == len(chosen.rows) == 7
    assert not chosen.are_all
    assert choose_rows(TABLE, size=60).are_all


@pytest.mark.parametrize(
    "rows",
    [
        [{"sequence": "A"}] * 50,
        [{"labels": [i, i + 1]} for i in range(50)],
        [{"labels": torch.arange(3)} for _ in range(50)],
        [(i, i) for i in range(50)],
    ],
)
def test_without_one_label_per_row_rows_are_drawn_at_random(rows):
    assert choose_rows(rows, size=5).rows.tolist() == choose_subset(np.zeros(50), size=5).tolist()


def test_a_label_in_a_list_of_one_is_a_label():
    rows = [{"label": [value]} for value in LABELS]
    assert choose_rows(rows, size=6).rows.tolist() == choose_subset(LABELS, size=6).tolist()


def test_a_stream_that_can_be_read_only_once_is_refused():
    class Once(torch.utils.data.IterableDataset):
        def __init__(self):
            self.rows = iter([{"label": value} for value in LABELS])

        def __iter__(self):
            return self.rows

    with pytest.raises(DataError, match="6 chosen rows when it was read first and 0 the second"):
        choose_rows(Once(), size=6)


@pytest.mark.parametrize("rows", [[], stream_of([])])
def test_a_set_without_rows_is_refused(rows):
    with pytest.raises(DataError, match="no rows"):
        choose_rows(rows, size=5)


def test_a_group_column_that_is_not_there_is_named():
    with pytest.raises(DataError, match=r"group_column='antigen'.*sequence, label, antibody"):
        choose_rows(TABLE, size=5, group_column="antigen")
