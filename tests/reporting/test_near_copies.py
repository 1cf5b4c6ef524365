"""Near copies are told as shares of checked rows, and the sample is stated."""

import pytest

from hf_ext.reporting import Leaks
from hf_ext.reporting.data_section import describe_near_copies
from hf_ext.reporting.record import Leak, Near

pytestmark = pytest.mark.internals


def leak(*counts, num_checked=2000, num_test_rows=26212):
    near = [Near(identity, num) for identity, num in zip((0.9, 0.7), counts)]
    return Leak(num_test_rows=num_test_rows, num_checked=num_checked, near=near)


def test_a_share_of_the_checked_rows_at_each_identity():
    some = leak(1234, 1500)
    assert describe_near_copies(Leaks("test", {"sequence": some}, some)) == [
        "1,234 of 2,000 checked test rows (of 26,212) have a training sequence at >= 90% identity; 1,500 of "
        "2,000 at >= 70%."
    ]


def test_every_row_is_said_first_and_columns_follow_the_row():
    every = leak(78, 78, num_checked=78, num_test_rows=78)
    none = leak(0, 3, num_checked=78, num_test_rows=78)
    assert describe_near_copies(Leaks("validation", {"heavy": none, "light": every}, none)) == [
        "3 of 78 checked validation rows have a training sequence at >= 70% identity in every column.",
        "3 of 78 checked validation rows have a training sequence at >= 70% identity in the column heavy.",
        "Every one of 78 checked validation rows has a training sequence at >= 90% identity in the column light.",
    ]


def test_nothing_near_and_nothing_looked_for_say_nothing():
    none = leak(0, 0)
    assert describe_near_copies(Leaks("test", {"s": none}, none)) == describe_near_copies(Leaks()) == []
