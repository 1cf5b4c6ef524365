"""The table of samples: duplicates counted, faults named, ranks by what may rank; worked out by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
from antibody_examples import heavy, light

from hf_ext.data.antibodies import AntibodyPair
from hf_ext.generation.judging.rows import AntibodyRows
from hf_ext.generation.sample import Examiners, describe, name_antigens, tabulate
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


def test_the_nearest_training_antibody_is_that_of_the_heavy_chain():
    training = AntibodyRows.of_columns([OTHER.heavy, GOOD.heavy, "EVQLVE"], [light(), None, light()], [""] * 3)
    table = tabulate([draw(GOOD, OTHER, LOOSE)], ["MKT"], Examiners(training=training, training_rows=[2, 3, 4]))
    assert table["generated_heavy"].tolist() == [OTHER.heavy, GOOD.heavy, LOOSE.heavy]
    assert table["nearest_training_heavy"].tolist() == pytest.approx([1, 1, 4 / 6])
    assert table["nearest_training_light"][:2].tolist() == [1, 1]
    assert table["nearest_training_row"].tolist() == [2, 3, 4]
    assert table["is_training_copy"].tolist() == ["yes", "no", "no"]  # chains of two training antibodies are no copy
    nothing = tabulate([draw(GOOD)], ["MKT"], Examiners(training=AntibodyRows.of_columns([], [], [])))
    assert nothing[["nearest_training_heavy", "nearest_training_row"]].isna().all(axis=None)


def test_what_is_likely_wrong_is_a_warning_and_what_is_right_is_none():
    said = describe(tabulate([draw(GOOD, OTHER)], ["MKT"]), ["MKT"])
    assert said[0].startswith("2 antibodies for 1 antigens: 2 distinct, 2 valid by pattern, 0 malformed")
    assert not [line for line in said if line.startswith("WARNING")]
    training = AntibodyRows.of_columns([GOOD.heavy], [GOOD.light], [""])
    collapsed = tabulate([draw(*9 * [GOOD])] * 2, ["MKT", "ACD"], Examiners(training=training))
    warnings = [line for line in describe(collapsed, ["MKT", "ACD"]) if line.startswith("WARNING")]
    assert [line.split(": ", 1)[1][:30] for line in warnings] == [
        "11.1 % are distinct: the model",
        "1 antibodies were written for ",
        "2 lines of the table are train",
    ]


def test_antigens_have_names_of_one_word_that_do_not_repeat():
    assert name_antigens(None, [2, 5]) == ["row2", "row5"]
    assert name_antigens(["spike RBD", "a", "a", None], [1, 2, 3, 4]) == ["spike_RBD", "a_row2", "a_row3", "row4"]
