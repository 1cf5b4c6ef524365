"""What intervals resample: said, or found by what the split held out; rows where nothing repeats."""

from __future__ import annotations

import csv
from typing import Any

import pytest

from hf_ext.affinity.held_out import describe_units, find_lone_value, find_units
from hf_ext.data.arguments import DataArguments
from hf_ext.data.loading import load_data
from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation.resampling import ResamplingUnits

LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def spell(number: int) -> str:
    """A sequence of its own for each number, unlike that of others."""
    return "".join(LETTERS[(number * 7 + i * (number % 13 + 1)) % 20] for i in range(30)) + LETTERS[number % 20] * 5


@pytest.fixture
def path(tmp_path) -> str:
    """20 antibodies, each with 6 antigens of 6: the first 14 train, 2 validate, 4 test."""
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["heavy", "antigen", "clone", "assay", "part", "label"])
        for antibody in range(20):
            part = "train" if antibody < 14 else "valid" if antibody < 16 else "test"
            for antigen in range(6):
                name = f"clone{antibody // 2}"
                label = antibody + 0.1 * antigen
                writer.writerow([spell(antibody), spell(100 + antigen), name, f"run{antigen % 2}", part, label])
    return str(file)


def settled(path: str, **settings: Any) -> tuple[DataArguments, Any]:
    args = DataArguments(dataset_name=path, sequence_columns=["heavy", "antigen"], **settings)
    return args, load_data(args, output_dir=None, seed=0).splits


def found(path: str, *split: Any, **settings: Any) -> tuple[ResamplingUnits | None, Any]:
    args, splits = settled(path, **settings)
    return find_units(args, splits, *split), splits


def test_a_repeated_sequence_that_was_held_out_is_found_and_one_that_was_not_is_not(path):
    units, splits = found(path, split_column="part")
    assert units is not None
    assert (units.column, units.num_units, len(splits["test"])) == ("heavy", 4, 24)


def test_a_group_column_with_fewer_values_is_the_wider_unit(path):
    units, _ = found(path, split_column="part", group_column="clone")
    assert units is not None
    assert (units.column, units.num_units) == ("clone", 2)
    units, _ = found(path, split_column="part", group_column="assay")  # in training too
    assert units is not None
    assert units.column == "heavy"


def test_a_split_by_group_is_resampled_by_group(path):
    units, splits = found(path, split="group:clone", split_sizes=[0.5, 0.2, 0.3])
    assert units is not None
    assert (units.column, units.num_units) == ("clone", len(set(splits["test"]["clone"])))
    assert units.num_units >= 2


def test_a_split_by_cluster_is_resampled_by_cluster(path):
    units, splits = found(path, split="cluster", cluster_column="heavy", split_sizes=[0.6, 0.1, 0.3])
    assert units is not None
    assert (units.column, units.num_units) == ("cluster", len(set(splits["test"]["heavy"])))
    assert len(set(splits["train"]["split_cluster"])) == len(set(splits["train"]["heavy"]))
    validation = splits["validation"]
    assert len({*zip(validation["heavy"], validation["split_cluster"])}) == len(set(validation["heavy"])) == 2
    assert not set(validation["split_cluster"]) & set(splits["test"]["split_cluster"])
    # rows of one antibody are one cluster
    assert len({*zip(splits["test"]["heavy"], splits["test"]["split_cluster"])}) == units.num_units


def test_a_random_split_holds_nothing_out_and_is_resampled_by_row(path):
    assert found(path, split="random")[0] is None
    assert describe_units(None) == []


def test_the_argument_decides_also_against_what_would_be_found(path):
    assert found(path, split_column="part", interval_by="rows")[0] is None
    units, _ = found(path, split_column="part", interval_by="assay")
    assert units is not None
    assert (units.column, units.num_units) == ("assay", 2)
    (basis, few) = describe_units(units)
    assert basis.startswith("Intervals resample the 2 values of assay behind 24 rows, and speak about further values")
    assert few.startswith("An interval from only 2 values of assay is not to be trusted")


def test_a_single_held_out_value_is_passed_over_where_it_was_found_and_refused_where_it_was_named(path):
    kept = "clone != 'clone8'"  # antibodies 16 and 17, so that the test rows are of clone9
    units, _ = found(path, split_column="part", group_column="clone", filter=kept)
    assert units is not None
    assert (units.column, units.num_units) == ("heavy", 2)
    with pytest.raises(ArgumentError, match="--interval_by clone: all 12 test rows have the same value"):
        found(path, split_column="part", interval_by="clone", filter=kept)


def test_what_cannot_be_resampled_is_refused_by_name(path):
    with pytest.raises(DataError, match="clon"):
        found(path, split_column="part", interval_by="clon")
    with pytest.raises(ArgumentError, match=r"interval_by='clone'.*drop --streaming"):
        DataArguments(dataset_name=path, interval_by="clone", streaming=True)
    with pytest.raises(ArgumentError, match="column 'label' is one that loading writes"):
        DataArguments(dataset_name=path, interval_by="label")
    args = DataArguments(dataset_name=path, sequence_columns=["heavy"], interval_by="clone")
    with pytest.raises(ArgumentError, match="interval_by='clone' is for scores of labels"):
        load_data(args, output_dir=None, seed=0, needs_labels=False)


def test_validation_rows_have_units_of_their_own(path):
    units, splits = found(path, "validation", split_column="part")
    assert units is not None
    assert (units.column, units.num_units, len(units.unit_of_row)) == ("heavy", 2, len(splits["validation"]))
    assert found(path, "validation", split="random")[0] is None
    assert found(path, "validation", split_column="part", interval_by="rows")[0] is None
    units, splits = found(path, "validation", split="cluster", cluster_column="heavy", split_sizes=[0.5, 0.2, 0.3])
    assert units is not None
    assert (units.column, units.num_units) == ("cluster", len(set(splits["validation"]["heavy"])))


def test_one_clone_held_out_for_validation_is_one_unit_of_folds_and_none_of_intervals(path):
    units, _ = found(path, "validation", 1, split_column="part", group_column="clone")
    assert units is not None
    assert (units.column, units.num_units) == ("clone", 1)
    units, _ = found(path, "validation", 2, split_column="part", group_column="clone")
    assert units is not None
    assert (units.column, units.num_units) == ("heavy", 2)
    units, _ = found(path, "validation", 1, split_column="part", interval_by="clone")
    assert units is not None
    assert units.num_units == 1
    with pytest.raises(ArgumentError, match="--interval_by clone: all 12 validation rows have the same value"):
        found(path, "validation", 2, split_column="part", interval_by="clone")


def test_one_held_out_value_in_test_is_found_and_several_or_a_known_one_are_not(path):
    args, splits = settled(path, split="group:clone", split_sizes=[0.5, 0.2, 0.3])
    several = set(splits["test"]["clone"])
    assert len(several) > 1
    assert find_lone_value(args, splits) is None
    one = splits["test"].filter(lambda row: row["clone"] == min(several))
    assert find_lone_value(args, {**splits, "test": one}) == "clone"
    args, splits = settled(path, split="random", split_sizes=[0.6, 0.1, 0.3])
    assert find_lone_value(args, splits) is None
