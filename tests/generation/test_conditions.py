"""A generator that reads its antigen loses by another one; one that does not is said to ignore it."""

import numpy as np
import pytest

from hf_ext.errors import DataError
from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.generation.judging.conditions import judge_condition, shuffle_affinities, shuffle_antigens
from hf_ext.generation.judging.rows import Sampling


def test_shuffled_antigens_are_a_derangement_of_the_distinct_ones():
    antigens = ["a", "b", "a", "c", "d", "e"] * 3
    for seed in range(20):
        shuffled = shuffle_antigens(antigens, seed)
        other = dict(zip(antigens, shuffled))
        assert all(old != new for old, new in other.items())
        assert sorted(other.values()) == sorted(other)
        assert [other[one] for one in antigens] == shuffled  # one for all rows of an antigen
    assert shuffle_antigens(antigens, 1) == shuffle_antigens(antigens, 1)
    assert len({tuple(shuffle_antigens(antigens, seed)) for seed in range(20)}) > 5
    with pytest.raises(DataError, match=r"2 rows of 1 antigen"):
        shuffle_antigens(["a", "a"])


def test_a_shuffled_antigen_is_of_another_cluster_where_that_can_be():
    antigens, clusters = list("abcdef"), [0, 0, 0, 1, 2, 2]
    group = dict(zip(antigens, clusters))
    for seed in range(20):
        assert all(group[old] != group[new] for old, new in zip(antigens, shuffle_antigens(antigens, seed, clusters)))
    assert all(old != new for old, new in zip("abcde", shuffle_antigens("abcde", 0, [0, 0, 0, 0, 1])))


def test_shuffled_affinities_are_those_of_the_other_half():
    shuffled = shuffle_affinities([5.0, 6.0, np.nan, 8.0, 9.0])
    assert np.isnan(shuffled[2])
    assert [shuffled[i] for i in (0, 1, 3, 4)] == [8.0, 9.0, 5.0, 6.0]
    with pytest.raises(DataError, match="fewer than two distinct"):
        shuffle_affinities([7.0, 7.0, np.nan])


def losses(effect: float, num_antigens: int = 30, num_rows: int = 5):
    """Token losses of rows whose own noise is far larger than that of a pair."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(200, 250, num_antigens * num_rows)
    true = tokens * generator.uniform(0.5, 1.5, len(tokens))
    shuffled = true + tokens * (effect + generator.normal(0, 0.01, len(tokens)))
    units = ResamplingUnits.of("antigen", np.repeat(range(num_antigens), num_rows))
    return tokens, true, shuffled, Sampling(units)


def test_a_loss_that_rises_with_another_antigen_means_it_is_read():
    found = judge_condition("antigen", *losses(0.05))
    assert found.reading == "reads"
    assert found.comparison.improvement == pytest.approx(0.05, abs=0.003)
    assert found.text.startswith("reads the antigen: shuffling it costs 0.0")


def test_a_loss_that_does_not_rise_means_it_is_ignored():
    for effect in (0.0, -0.05):
        assert judge_condition("antigen", *losses(effect)).text.startswith("ignores the antigen")
    tokens, true, _, sampling = losses(0.0)
    equal = judge_condition("pKd", tokens, true, true, sampling)
    assert equal.text == "ignores the pKd: shuffling it costs 0.0000 [0.0000, 0.0000] nats per token"
    with pytest.raises(DataError, match=r"1 shuffled losses are not finite \(first: row 1\)"):
        judge_condition("pKd", [1, 1], [1.0, 1.0], [1.0, np.nan], Sampling(ResamplingUnits.of("antigen", "ab")))


def test_too_few_antigens_decide_nothing():
    found = judge_condition("antigen", *losses(0.05, num_antigens=4, num_rows=20))
    assert found.reading == "undecided"
    assert "too few units" in found.text
    assert judge_condition("antigen", *losses(0.05, num_antigens=1)).reading == "undecided"
