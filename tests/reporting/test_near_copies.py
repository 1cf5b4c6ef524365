"""Near copies are told as shares of checked rows, and the sample is stated."""

from hf_ext.reporting.data_section import describe_near_copies


def near(identity, num_rows):
    return {"identity": identity, "num_rows": num_rows}


def leak(*counts, num_checked=2000, num_test_rows=26212):
    return {"num_test_rows": num_test_rows, "num_checked": num_checked, "near": [*counts]}


def test_a_share_of_the_checked_rows_at_each_identity():
    some = leak(near(0.9, 1234), near(0.7, 1500))
    assert describe_near_copies({"compared": "test", "columns": {"sequence": some}, "row": some}) == [
        "1,234 of 2,000 checked test rows (of 26,212) have a training sequence at >= 90% identity; 1,500 of "
        "2,000 at >= 70%."
    ]


def test_every_row_is_said_first_and_columns_follow_the_row():
    every = leak(near(0.9, 78), near(0.7, 78), num_checked=78, num_test_rows=78)
    none = leak(near(0.9, 0), near(0.7, 3), num_checked=78, num_test_rows=78)
    report = {"compared": "validation", "columns": {"heavy": none, "light": every}, "row": none}
    assert describe_near_copies(report) == [
        "3 of 78 checked validation rows have a training sequence at >= 70% identity in every column.",
        "3 of 78 checked validation rows have a training sequence at >= 70% identity in the column heavy.",
        "Every one of 78 checked validation rows has a training sequence at >= 90% identity in the column light.",
    ]


def test_nothing_near_and_nothing_looked_for_say_nothing():
    none = leak(near(0.9, 0), near(0.7, 0))
    assert describe_near_copies({"compared": "test", "columns": {"s": none}, "row": none}) == []
    assert describe_near_copies({}) == describe_near_copies(None) == []
