"""What outputs repeat of each other, of training and of held-out binders, and the rules that a generator must beat."""

import numpy as np
import pytest
from antibody_examples import antibodies, heavy, light, random_antigens

from hf_ext.errors import DataError
from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.generation.judging.baselines import RANDOM, RETRIEVAL, SHUFFLED, make_baselines
from hf_ext.generation.judging.copies import judge_diversity, judge_novelty, judge_recovery
from hf_ext.generation.judging.rows import AntibodyRows, Sampling


def sampling(rows: AntibodyRows) -> Sampling:
    return Sampling(ResamplingUnits.of("antigen", rows.antigens))


def rows_of(cdr3s: list[str | None], antigens: list[str]) -> AntibodyRows:
    chains = ["AAAA" if one is None else heavy(one) for one in cdr3s]
    return AntibodyRows.of_columns(chains, [light()] * len(chains), antigens)


def test_unique_share_is_distinct_outputs_by_outputs():
    rows = rows_of(["ARDY", "ARDY", "ARDY", "AKEL"], ["a", "b", "c", "d"])
    found = judge_diversity(rows, sampling(rows))
    assert found["num_distinct"] == 2
    assert found["unique_pairs"]["value"] == found["unique_cdr3"]["value"] == pytest.approx(0.5)


def test_identity_within_an_antigen_and_across_are_told_apart():
    rows = rows_of(["A" * 10, "A" * 10, "D" * 10, "D" * 10], list("aabb"))
    found = judge_diversity(rows, sampling(rows))
    assert found["identity_within"]["value"] == 1.0
    assert found["identity_across"]["value"] == pytest.approx(1 - 10 / len(heavy("A" * 10)))
    lone = rows.select([0, 2])
    assert judge_diversity(lone, sampling(lone))["identity_within"]["value"] is None


def test_copies_near_copies_and_new_outputs_are_counted():
    training = antibodies(30, random_antigens(5))
    copy, near, new = training.heavy[3], training.heavy[4].replace("VESGG", "VESAG"), heavy("ARWWWWWWWWWWWWWWWWWW")
    rows = AntibodyRows.of_columns([copy, copy, near, new], [light(), light("QQ"), light(), light()], list("abcd"))
    found, by_row = judge_novelty(rows, training, sampling(rows))
    assert found["memorised"]["value"] == 0.25  # a copied heavy chain with another light one is none
    assert by_row["is_copy"].tolist() == [True, False, False, False]
    assert found["near_copies"]["value"] == 0.5
    assert found["memorised_cdr3"]["value"] == 0.75
    assert by_row["nearest_heavy"][:3] == pytest.approx(np.array([1, 1, 1 - 1 / len(near)]))
    assert by_row["nearest_heavy"][3] < 0.9


def test_outputs_without_a_cdr3_have_no_cdr3_novelty():
    rows = AntibodyRows.of_columns(["AAAA"], [None], ["a"])
    found, _ = judge_novelty(rows, antibodies(3, ["a"]), sampling(rows))
    assert found["cdr3"]["value"] is None
    assert found["light"]["value"] is None
    assert found["heavy"]["value"] == 0.7  # and all that is lower
    assert found["memorised"]["value"] == 0.0


def test_recovery_is_identity_to_the_most_alike_binder_of_the_antigen():
    held_out = rows_of(["ARDY", "ARDYEL", "AKEL", None], ["a", "a", "b", "c"])
    rows = rows_of(["ARDYEM", "AKEL", None, "ARDY", "ARDY"], ["a", "a", "a", "c", "unknown"])
    found = judge_recovery(rows, held_out)
    assert found["cdr3"][:3].tolist() == pytest.approx([5 / 6, 1 / 2, 0])  # ARDYEL is 3 edits of 6 from AKEL
    assert np.isnan(found["cdr3"][3:]).all()  # no binder with a CDR3; no binder at all
    assert found["light"][:4].tolist() == [1.0] * 4
    assert found["heavy"][3] < 0.1  # the binder of c is AAAA


def test_retrieval_takes_an_antibody_of_the_most_similar_training_antigen():
    known = random_antigens(6, size=80)
    training = antibodies(30, known)
    asked = [known[2][:60] + known[5][:15], known[4][5:], known[2]]
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
    assert make_baselines(["x"] * 30, training)[SHUFFLED] == rows
    assert make_baselines(["x"] * 30, training, seed=1)[SHUFFLED] != rows
    with pytest.raises(DataError, match="no training antibodies"):
        make_baselines(["x"], training.select([]))


def test_random_residues_have_real_lengths_and_training_frequencies():
    training = AntibodyRows.of_columns(["A" * 90 + "C" * 30] * 5, ["D" * 50, None, None, None, None], ["x"] * 5)
    rows = make_baselines(["x"] * 50, training)[RANDOM]
    assert {len(one) for one in rows.heavy} == {120}
    assert sorted({len(one) for one in rows.chain("light")}) == [0, 50]
    text = "".join(rows.heavy)
    assert set(text) == {"A", "C"}
    assert text.count("A") / len(text) == pytest.approx(0.75, abs=0.02)
