"""Candidates: duplicates counted, faults named, ranks by what may rank; worked out by hand."""

import numpy as np
import pytest
from antibody_examples import heavy, light

from hf_ext.data.antibodies import AntibodyPair
from hf_ext.generation.candidates import (
    Candidate,
    Scores,
    as_rows,
    collect,
    describe,
    find_nearest,
    rank,
    score_candidates,
    tabulate,
)
from hf_ext.generation.judging.rows import AntibodyRows
from hf_ext.generation.sample_files import name_antigens
from hf_ext.generation.sampling import SampledPair

GOOD = AntibodyPair(heavy("ARDY"), light())
OTHER = AntibodyPair(heavy("ARDF"), light())
CUT = AntibodyPair(heavy("ARDY"), None, ("no <eos>: cut off",))
LOOSE = AntibodyPair("EVQL", "DIQM")
LIKELY = {GOOD: -0.5, OTHER: -0.2, CUT: -0.1, LOOSE: -0.3}


def candidates_of(*pairs):
    return [Candidate(0, pair, 1, LIKELY[pair]) for pair in pairs]


def test_distinct_antibodies_are_counted_within_each_antigen():
    found = collect([[SampledPair(one, LIKELY[one]) for one in (GOOD, OTHER, GOOD)], [SampledPair(GOOD, -0.5)]])
    assert [(one.request, one.pair, one.copies) for one in found] == [(0, GOOD, 2), (0, OTHER, 1), (1, GOOD, 1)]
    apart = collect([[SampledPair(GOOD, -0.5), SampledPair(AntibodyPair(GOOD.heavy, GOOD.light, ("cut",)), -0.5)]])
    assert len(apart) == 2  # the same chains, but one of them ended in error


def test_the_first_fault_is_named_and_a_valid_one_has_none():
    scores = score_candidates(as_rows(candidates_of(GOOD, CUT, LOOSE), ["MKT"]))
    assert scores.problems[:2] == [None, "no <eos>: cut off"]
    assert scores.problems[2] == "heavy chain without the pattern Cys-Trp-Cys and WGxG"
    assert (scores.checked_by, scores.nearest, scores.affinities) == ("pattern", None, None)


def test_valid_ones_come_first_then_the_likeliest():
    found = candidates_of(CUT, GOOD, OTHER)
    scores = score_candidates(as_rows(found, ["MKT"]))
    assert rank(found, scores) == [2, 1, 0]
    table = tabulate(found, scores, rank(found, scores), 9.5)
    assert table["rank"] == [1, 2, 3]
    assert table["log_probability"] == [-0.2, -0.5, -0.1]
    assert table["valid"] == ["yes", "yes", "no"]
    assert table["cdr_h3"] == ["ARDF", "ARDY", "ARDY"]
    assert table["asked_affinity"] == [9.5] * 3
    assert "predicted_affinity" not in table


def test_a_predicted_affinity_orders_where_it_may_and_unknown_ones_come_behind():
    found = candidates_of(GOOD, OTHER, AntibodyPairWithout)
    scores = Scores([None] * 3, "pattern", None, np.array([8.0, 7.0, np.nan]))
    assert rank(found, scores, by_affinity=True) == [0, 1, 2]
    assert rank(found, scores) == [2, 1, 0]
    assert tabulate(found, scores, [0, 1, 2])["predicted_affinity"] == [8.0, 7.0, ""]


AntibodyPairWithout = AntibodyPair(heavy("ARDW"), light())
LIKELY[AntibodyPairWithout] = -0.1


def test_the_nearest_training_antibody_is_that_of_the_heavy_chain():
    training = AntibodyRows.of_columns([OTHER.heavy, GOOD.heavy, "EVQLVE"], [light(), None, light()], [""] * 3)
    found = find_nearest(as_rows(candidates_of(GOOD, OTHER, LOOSE), ["MKT"]), training, [2, 3, 4])
    size = len(GOOD.heavy)
    assert found.heavy.tolist() == pytest.approx([1, 1, 4 / 6])
    assert found.row.tolist() == [3, 2, 4]
    assert found.light[:2].tolist() == [1, 1]
    assert found.is_copy.tolist() == [False, True, False]  # chains of two training antibodies are no copy
    nothing = find_nearest(as_rows(candidates_of(GOOD), ["MKT"]), AntibodyRows.of_columns([], [], []))
    assert np.isnan(nothing.heavy).all()
    assert nothing.row.tolist() == [0]
    assert size == len(OTHER.heavy)


def test_what_is_likely_wrong_is_a_warning_and_what_is_right_is_none():
    alone = candidates_of(GOOD, OTHER)
    said = describe(alone, score_candidates(as_rows(alone, ["MKT"])), ["MKT"])
    assert said[0].startswith("2 antibodies for 1 antigens: 2 distinct, 2 valid by pattern, 0 malformed")
    assert not [line for line in said if line.startswith("WARNING")]
    collapsed = [Candidate(0, GOOD, 9, -0.5), Candidate(1, GOOD, 9, -0.5)]
    training = AntibodyRows.of_columns([GOOD.heavy], [GOOD.light], [""])
    scores = score_candidates(as_rows(collapsed, ["MKT", "ACD"]), training=training)
    warnings = [line for line in describe(collapsed, scores, ["MKT", "ACD"]) if line.startswith("WARNING")]
    assert [line.split(": ", 1)[1][:30] for line in warnings] == [
        "11.1 % are distinct: the model",
        "1 antibodies were written for ",
        "2 lines of the table are train",
    ]
    assert describe([], Scores([], "pattern"), []) == ["No antibodies."]


def test_antigens_have_names_of_one_word_that_do_not_repeat():
    assert name_antigens(None, [2, 5]) == ["row2", "row5"]
    assert name_antigens(["spike RBD", "a", "a", None], [1, 2, 3, 4]) == ["spike_RBD", "a_row2", "a_row3", "row4"]
