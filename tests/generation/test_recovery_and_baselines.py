"""Outputs against the held-out binders of their antigen, and the rules that a generator must beat."""

import numpy as np
import pytest
from antibody_examples import antibodies, heavy, light, random_antigens

from hf_ext.errors import DataError, MissingDependencyError
from hf_ext.generation.judging.baselines import RANDOM, RETRIEVAL, SHUFFLED, find_nearest_antigens, make_baselines
from hf_ext.generation.judging.humanness import Humanness
from hf_ext.generation.judging.numbering import REGIONS, NumberedDomain
from hf_ext.generation.judging.recovery import judge_recovery
from hf_ext.generation.judging.rows import AntibodyRows
from hf_ext.generation.judging.validity import Domains
from hf_ext.optional import import_problem


def rows_of(cdr3s: list[str | None], antigens: list[str]) -> AntibodyRows:
    chains = ["AAAA" if one is None else heavy(one) for one in cdr3s]
    return AntibodyRows.of_columns(chains, [light()] * len(chains), antigens)


def test_cdr3_recovery_is_identity_to_the_most_alike_binder_of_the_antigen():
    held_out = rows_of(["ARDY", "ARDYEL", "AKEL", None], ["a", "a", "b", "c"])
    rows = rows_of(["ARDYEM", "AKEL", None, "ARDY", "ARDY"], ["a", "a", "a", "c", "unknown"])
    found = judge_recovery(rows, held_out)
    assert found.cdr3[:3] == pytest.approx(
        np.array([5 / 6, 1 / 2, 0.0])
    )  # ARDYEL is 3 edits of 6 from AKEL, ARDY 3 of 4
    assert np.isnan(found.cdr3[3:]).all()  # no binder with a CDR3; no binder at all
    assert found.light[:4].tolist() == [1.0] * 4
    assert found.heavy[3] < 0.1  # the binder of c is AAAA
    assert found.regions == {}


def test_regions_are_recovered_one_by_one_where_numbering_is():
    regions = dict.fromkeys(REGIONS, "ACDE")
    other = {**regions, "CDR2": "ACWW", "FR3": "ACDEF"}
    mine, theirs = (NumberedDomain("H", {}, each, 0) for each in (other, regions))
    rows = rows_of(["ARDY", "ARDY"], ["a", "a"])
    found = judge_recovery(rows, rows.select([0]), Domains([mine, None], [None] * 2), Domains([theirs], [None]))
    assert found.regions["heavy CDR1"].tolist() == [1.0, 0.0]
    assert found.regions["heavy CDR2"].tolist() == [0.5, 0.0]
    assert found.regions["heavy FR3"].tolist() == [0.8, 0.0]
    assert np.isnan(found.regions["light CDR1"]).all()
    assert len(found.regions) == 14


def test_retrieval_takes_an_antibody_of_the_most_similar_training_antigen():
    known = random_antigens(6, size=80)
    training = antibodies(30, known)
    asked = [known[2][:60] + known[5][:15], known[4][5:], known[2]]
    nearest = find_nearest_antigens(asked, known)
    assert nearest.antigens == (known[2], known[4], known[2])
    assert nearest.similarity[2] == pytest.approx(1.0)
    rows = make_baselines(asked * 10, training)[RETRIEVAL]
    for pair, antigen in zip(rows.pairs, rows.antigens):
        expected = known[2] if antigen in (asked[0], asked[2]) else known[4]
        assert expected in [training.antigens[i] for i, one in enumerate(training.pairs) if one == pair]


def test_shuffled_antibodies_are_training_pairs_drawn_without_replacement():
    training = antibodies(30, random_antigens(6))
    rows = make_baselines(["x"] * 30, training)[SHUFFLED]
    assert sorted(rows.pairs) == sorted(training.pairs)
    assert rows.pairs != training.pairs
    assert rows.antigens == ("x",) * 30


def test_random_residues_have_real_lengths_and_training_frequencies():
    training = AntibodyRows.of_columns(["A" * 90 + "C" * 30] * 5, ["D" * 50, None, None, None, None], ["x"] * 5)
    rows = make_baselines(["x"] * 50, training)[RANDOM]
    assert {len(one) for one in rows.heavy} == {120}
    assert sorted({len(one) for one in rows.chain("light")}) == [0, 50]
    text = "".join(rows.heavy)
    assert set(text) == {"A", "C"}
    assert text.count("A") / len(text) == pytest.approx(0.75, abs=0.02)


def test_baselines_are_seeded_and_need_training_rows():
    training = antibodies(10, random_antigens(3))
    assert make_baselines(["x"], training, 1) == make_baselines(["x"], training, 1)
    assert make_baselines(["x"] * 9, training, 1) != make_baselines(["x"] * 9, training, 2)
    with pytest.raises(DataError, match="no training antibodies"):
        make_baselines(["x"], training.select([]))


@pytest.mark.skipif(import_problem("promb") is None, reason="promb is installed here")
def test_humanness_without_its_library_names_the_extra():
    with pytest.raises(MissingDependencyError, match=r"hf_ext\[humanness\]"):
        Humanness()


@pytest.mark.nightly  # loading takes 7 to 30 s and 0.8 GB
@pytest.mark.skipif(import_problem("promb") is not None, reason="the extra 'humanness'")
def test_human_frameworks_are_human_and_shuffled_residues_are_not():
    judge = Humanness()
    assert judge.load_s is None  # nothing is loaded before it is needed
    rows = rows_of(["ARDRSTYFDY"], ["a"])
    shuffled = "".join(np.random.default_rng(0).permutation(list(rows.heavy[0])))
    mixed = AntibodyRows.of_columns([rows.heavy[0], shuffled, "ACD"], [light(), None, None], ["a"] * 3)
    found = judge.score(mixed)
    assert found[0] > 0.8
    assert found[1:].tolist() == [0.0, 0.0]
    assert judge.load_s > 0
