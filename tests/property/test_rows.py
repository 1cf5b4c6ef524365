"""Rows of a run: what was held out together, by hand; which rows are new to training, and are scored apart."""

import csv
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from hf_ext.data import DataArguments, load_data
from hf_ext.property import describe_groups
from hf_ext.property.rows import find_groups, find_slices

pytestmark = pytest.mark.internals
LETTERS = "ACDEFGHIKLMNPQRSTVWY"
BY_PART = {"split_column": "part"}
NEAR_CLONE_9 = {"split_column": "only"}  # leaves antibodies 18 and 19, of one clone, for test


def spell(number: int) -> str:
    """A sequence of its own for each number, unlike that of others."""
    return "".join(LETTERS[(number * 7 + i * (number % 13 + 1)) % 20] for i in range(30)) + LETTERS[number % 20] * 5


@pytest.fixture
def path(tmp_path) -> str:
    """20 antibodies, each with 6 antigens of 6: the first 14 train, 2 validate, 4 test; two are a clone."""
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["heavy", "antigen", "clone", "assay", "part", "only", "label"])
        for antibody in range(20):
            part = "train" if antibody < 14 else "valid" if antibody < 16 else "test"
            for antigen in range(6):
                cells = [spell(antibody), spell(100 + antigen), f"clone{antibody // 2}", f"run{antigen % 2}", part]
                writer.writerow([*cells, "test" if antibody > 17 else "train", antibody + 0.1 * antigen])
    return str(file)


def split(path: str, **settings: Any) -> tuple[DataArguments, Any]:
    args = DataArguments(dataset_name=path, sequence_columns=["heavy", "antigen"], **settings)
    return args, load_data(args, output_dir=None, seed=0).splits


@pytest.mark.parametrize(
    ("settings", "asked", "found"),
    [
        (BY_PART, (), ("heavy", 4)),  # antigens are in training too
        (BY_PART, ("validation",), ("heavy", 2)),
        ({**BY_PART, "group_column": "clone"}, (), ("clone", 2)),  # the wider one
        ({**BY_PART, "group_column": "assay"}, (), ("heavy", 4)),  # in training too
        ({"split": "random"}, (), None),
        ({**NEAR_CLONE_9, "group_column": "clone"}, (), ("heavy", 2)),  # one clone cannot be resampled
    ],
)
def test_what_was_held_out_together_is_found(path, settings, asked, found):
    args, splits = split(path, **settings)
    groups = find_groups(args, splits, *asked)
    assert (groups and (groups.column, groups.num_groups)) == found


def test_a_split_by_group_or_cluster_is_resampled_by_that(path):
    args, splits = split(path, split="group:clone", split_sizes=[0.5, 0.2, 0.3])
    groups = find_groups(args, splits)
    assert (groups.column, groups.num_groups) == ("clone", len(set(splits["test"]["clone"])))
    args, splits = split(path, split="cluster", cluster_column="heavy", split_sizes=[0.5, 0.2, 0.3])
    for name in ("test", "validation"):
        groups = find_groups(args, splits, name)
        assert (groups.column, groups.num_groups) == ("cluster", len(set(splits[name]["heavy"])))
    assert not set(splits["validation"]["split_cluster"]) & set(splits["test"]["split_cluster"])


def test_of_one_held_out_value_nothing_is_claimed(path):
    args, splits = split(path, split="group:clone", split_sizes=[0.5, 0.2, 0.3])
    one = splits["test"].filter(lambda row: row["clone"] == splits["test"]["clone"][0])
    (said,) = describe_groups(find_groups(args, {**splits, "test": one}))
    assert said.startswith("All rows have the same clone: no interval can be had from one.")


def table(heavy, antigen):
    return Dataset.from_dict({"heavy": heavy, "antigen": antigen})


def test_rows_with_an_antibody_that_training_lacks_are_a_slice_and_all_are_counted():
    train = table(["A", "B"] * 10, ["X", "Y"] * 10)
    asked = table(["A"] * 40 + ["C"] * 35, ["Y"] * 40 + ["X"] * 35)
    slices, notes = find_slices(train, asked, ["heavy", "antigen"])
    assert [*slices] == ["rows whose heavy is not in training"]
    (is_new,) = slices.values()
    assert np.flatnonzero(is_new).tolist() == [*range(40, 75)]
    # A with Y is as new as a pair as C is: all 75 rows are new together.
    assert notes[0].startswith(
        "Of 75 rows these are new to training: 35 in heavy, 0 in antigen, 75 in heavy + antigen together."
    )


def test_fewer_than_30_on_either_side_are_too_few():
    train = table(["A"] * 5 + ["B"], ["X"] * 6)
    for new, known, num_slices in ((29, 40, 0), (40, 29, 0), (30, 30, 1)):
        rows = table(["A"] * known + ["C"] * new, ["X"] * (known + new))
        assert len(find_slices(train, rows, ["heavy"])[0]) == num_slices
