"""Which rows are new to training: by hand, and a sentence wherever there is nothing to score apart."""

import numpy as np
from datasets import Dataset

from hf_ext.affinity.slices import find_slices


def table(heavy, antigen):
    return Dataset.from_dict({"heavy": heavy, "antigen": antigen})


def test_rows_with_an_antibody_that_training_lacks_are_a_slice():
    train = table(["A", "B"] * 10, ["X", "Y"] * 10)
    asked = table(["A"] * 40 + ["C"] * 35, ["Y"] * 40 + ["X"] * 35)
    slices, notes = find_slices(train, asked, ["heavy", "antigen"])
    # A with Y is as new as a pair as C is: all 75 rows are new together.
    assert [one.name for one in slices] == ["rows whose heavy is not in training"]
    assert np.flatnonzero(slices[0].rows).tolist() == [*range(40, 75)]
    assert notes == [
        "Every row is new to training in heavy + antigen together: these scores are for new ones.",
        "No row is new to training in antigen: nothing here speaks about new ones.",
    ]


def test_the_same_rows_are_one_slice():
    train = table(["A"] * 10 + ["B"] * 10, ["X"] * 20)
    slices, notes = find_slices(train, table(["A"] * 30 + ["C"] * 30, ["X"] * 60), ["heavy", "antigen"])
    assert [one.name for one in slices] == ["rows whose heavy is not in training"]
    assert notes == ["Every row has the same antigen: nothing here speaks about another."]


def test_a_random_split_over_shared_antibodies_says_so():
    _, notes = find_slices(table(["A", "B"], ["X", "X"]), table(["A", "B"], ["X", "X"]), ["heavy"])
    assert notes == ["No row is new to training in heavy: nothing here speaks about new ones."]


def test_rows_that_are_new_in_every_column_are_said_once():
    _, notes = find_slices(table(["A", "B"], ["X", "Y"]), table(["C", "D"], ["Z", "Z"]), ["heavy", "antigen"])
    assert notes == [
        "Every row is new to training in heavy, antigen: these scores are for new ones.",
        "Every row has the same antigen: nothing here speaks about another.",
    ]


def test_fewer_than_30_on_either_side_are_too_few():
    train = table(["A"] * 5 + ["B"], ["X"] * 6)
    for (new, known), why in {
        (29, 40): ": these 29 are too few to be scored apart (it takes 30).",
        (40, 29): ", so these scores are for new ones: the other 29 are too few to be scored apart (it takes 30).",
        (20, 19): ", 19 are not: both are too few to be scored apart (it takes 30 of each).",
    }.items():
        rows = table(["A"] * known + ["C"] * new, ["X"] * (known + new))
        slices, notes = find_slices(train, rows, ["heavy"])
        assert slices == []
        assert notes == [f"{new} of {new + known} rows are new to training in heavy{why}"]
    assert len(find_slices(train, table(["A"] * 30 + ["C"] * 30, ["X"] * 60), ["heavy"])[0]) == 1
