"""What outputs repeat of each other, and of training."""

import numpy as np
import pytest
from antibody_examples import antibodies, heavy, light, random_antigens

from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.generation.judging.diversity import judge_diversity
from hf_ext.generation.judging.novelty import judge_novelty
from hf_ext.generation.judging.rows import AntibodyRows
from hf_ext.generation.judging.scores import Sampling


def sampling(rows: AntibodyRows) -> Sampling:
    return Sampling(ResamplingUnits.of("antigen", rows.antigens))


def rows_of(cdr3s: list[str], antigens: list[str]) -> AntibodyRows:
    return AntibodyRows.of_columns([heavy(one) for one in cdr3s], [light()] * len(cdr3s), antigens)


def test_unique_share_is_distinct_outputs_by_outputs():
    rows = rows_of(["ARDY", "ARDY", "ARDY", "AKEL"], ["a", "b", "c", "d"])
    found = judge_diversity(rows, sampling(rows))
    assert (found.num_outputs, found.num_distinct, found.most_frequent) == (4, 2, 3)
    assert found.unique_pairs["value"] == pytest.approx(0.5)
    assert found.unique_cdr3["value"] == pytest.approx(0.5)
    assert found.unique_per_antigen["value"] == 1.0
    same = rows_of(["ARDY", "ARDY", "ARDY", "AKEL"], ["a", "a", "b", "b"])
    assert judge_diversity(same, sampling(same)).unique_per_antigen["value"] == pytest.approx(0.75)


def test_outputs_that_are_all_distinct_have_an_interval_below_one():
    rows = antibodies(40, random_antigens(40))
    found = judge_diversity(rows, sampling(rows)).unique_pairs
    assert (found["value"], found["high"]) == (1.0, 1.0)
    assert found["low"] == pytest.approx(0.025 ** (1 / 40))


def test_greedy_rows_of_one_antigen_count_once():
    rows = rows_of(["ARDY"] * 4 + ["AKEL"] * 4, ["a"] * 4 + ["b"] * 4)
    assert judge_diversity(rows, sampling(rows)).unique_pairs["value"] == pytest.approx(0.25)
    greedy = judge_diversity(rows, sampling(rows), is_greedy=True)
    assert (greedy.num_outputs, greedy.unique_pairs["value"]) == (2, 1.0)


def test_greedy_outputs_that_are_equal_for_all_antigens_stay_repeats():
    rows = rows_of(["ARDY"] * 6, list("aabbcc"))
    assert judge_diversity(rows, sampling(rows), is_greedy=True).unique_pairs["value"] == pytest.approx(1 / 3)


def test_identity_within_an_antigen_and_across_are_told_apart():
    rows = rows_of(["A" * 10, "A" * 10, "D" * 10, "D" * 10], list("aabb"))
    found = judge_diversity(rows, sampling(rows))
    size = len(heavy("A" * 10))
    assert found.identity_within["value"] == 1.0
    assert found.identity_across["value"] == pytest.approx(1 - 10 / size)
    lone = rows.select([0, 2])
    assert judge_diversity(lone, sampling(lone)).identity_within["value"] is None


def test_copies_near_copies_and_new_outputs_are_counted():
    training = antibodies(30, random_antigens(5))
    copy, near, new = training.heavy[3], training.heavy[4].replace("VESGG", "VESAG"), heavy("ARWWWWWWWWWWWWWWWWWW")
    rows = AntibodyRows.of_columns([copy, copy, near, new], [light(), light("QQ"), light(), light()], list("abcd"))
    found = judge_novelty(rows, training, sampling(rows))
    assert found.memorised["value"] == 0.25  # a copied heavy chain with another light one is none
    assert found.is_copy.tolist() == [True, False, False, False]
    assert found.near_copies["value"] == 0.5
    assert found.memorised_cdr3["value"] == 0.75
    size = len(near)
    assert found.nearest_heavy[:3] == pytest.approx(np.array([1, 1, 1 - 1 / size]))
    assert found.nearest_heavy[3] < 0.9
    assert found.quantiles["heavy"][-1] == pytest.approx(1.0)


def test_outputs_without_a_cdr3_have_no_cdr3_novelty():
    rows = AntibodyRows.of_columns(["AAAA"], [None], ["a"])
    found = judge_novelty(rows, antibodies(3, ["a"]), sampling(rows))
    assert found.cdr3["value"] is None
    assert found.light["value"] is None
    assert found.memorised["value"] == 0.0
    assert found.quantiles["cdr3"] is None
