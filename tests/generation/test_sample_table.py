"""The table of samples: duplicates counted, faults named, ranks by what may rank; worked out by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
from antibody_examples import heavy, light

from hf_ext.data.antibodies import AntibodyPair
from hf_ext.generation.sample_table import Examiners, name_antigens, tabulate
from hf_ext.generation.sampling import SampledPair

GOOD = AntibodyPair(heavy("ARDY"), light())
OTHER = AntibodyPair(heavy("ARDF"), light())
THIRD = AntibodyPair(heavy("ARDW"), light())
CUT = AntibodyPair(heavy("ARDY"), None, ("no <eos>: cut off",))
LOOSE = AntibodyPair("EVQL", "DIQM")
LIKELY = {GOOD: -0.5, OTHER: -0.2, THIRD: -0.1, CUT: -0.1, LOOSE: -0.3}


def draw(*pairs):
    return [SampledPair(one, LIKELY[one]) for one in pairs]


def test_distinct_antibodies_are_counted_within_each_antigen_and_valid_ones_come_first():
    ended = AntibodyPair(GOOD.heavy, GOOD.light, ("no <eos>: cut off",))  # the same chains, but in error
    LIKELY[ended] = -0.05
    table = tabulate([draw(CUT, GOOD, OTHER, GOOD, ended, LOOSE), draw(GOOD)], ["MKT", "ACD"], asked=9.5)
    assert table["request"].tolist() == [0] * 5 + [1]
    assert table["rank"].tolist() == [1, 2, 3, 4, 5, 1]
    assert table["log_probability"].tolist() == [-0.2, -0.5, -0.05, -0.1, -0.3, -0.5]
    assert table["copies"].tolist() == [1, 2, 1, 1, 1, 1]
    assert table["cdr_h3"][:2].tolist() == ["ARDF", "ARDY"]
    cut, pattern = "no <eos>: cut off", "heavy chain without the pattern Cys-Trp-Cys and WGxG"
    assert table["problem"].tolist() == ["", "", cut, cut, pattern, ""]
    assert table["valid"].tolist() == ["yes", "yes", "no", "no", "no", "yes"]
    assert {*table["asked_affinity"]} == {9.5}
    assert {*table["checked_by"]} == {"pattern"}
    assert "predicted_affinity" not in table


@pytest.mark.parametrize(
    ("record", "order"),
    [
        ({"verdict": {"outcome": "better"}}, [8.0, 7.0, None]),
        ({"verdict": {"outcome": "undecided"}}, [None, 7.0, 8.0]),
        (None, [None, 7.0, 8.0]),
    ],
)
def test_only_a_discriminator_that_beat_its_baselines_orders_and_what_it_cannot_read_comes_last(record, order):
    predictions = {GOOD.heavy: 8.0, OTHER.heavy: 7.0, THIRD.heavy: np.nan}
    judge = SimpleNamespace(record=record, predict=lambda rows: np.array([predictions[one] for one in rows.heavy]))
    table = tabulate([draw(GOOD, OTHER, THIRD)], ["MKT"], Examiners(discriminator=judge))
    assert [None if np.isnan(one) else one for one in table["predicted_affinity"]] == order


def test_antigens_have_names_of_one_word_that_do_not_repeat():
    assert name_antigens(None, [2, 5]) == ["row2", "row5"]
    assert name_antigens(["spike RBD", "a", "a", None], [1, 2, 3, 4]) == ["spike_RBD", "a_row2", "a_row3", "row4"]
