"""Columns of antibodies, and intervals by what was held out."""

from types import SimpleNamespace

import numpy as np
import pytest

from hf_ext.errors import DataError
from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.generation.judging.rows import AntibodyRows, Sampling, compare_means, mean_score


def by_antigen(values) -> Sampling:
    return Sampling(ResamplingUnits.of("antigen", values))


def test_rows_come_from_pairs_and_are_selected_together():
    pairs = [SimpleNamespace(heavy="AA", light="CC"), SimpleNamespace(heavy="DD", light="")]
    rows = AntibodyRows.of(pairs, ["X", "Y"], [None, "no <eos>"])
    assert rows.pairs == [("AA", "CC"), ("DD", None)]
    assert rows.chain("light") == ["CC", ""]
    kept = rows.select(np.array([False, True]))
    assert (kept.pairs, kept.antigens, kept.malformed) == ([("DD", None)], ("Y",), ("no <eos>",))
    with pytest.raises(DataError, match=r"'heavy': 2.*'antigens': 1"):
        AntibodyRows.of_columns(["A", "B"], [None, None], ["X"])


def test_the_interval_of_a_mean_is_that_of_its_units():
    values = np.tile([0.0, 1.0], 50)
    rows, antigens = by_antigen(range(100)), by_antigen(np.repeat(range(20), 5))
    one, other = mean_score(values, rows), mean_score(values, antigens)
    assert one["value"] == other["value"] == 0.5
    assert (other["interval_by"], other["num_units"], other["is_trusted"]) == ("antigen", 20, True)
    # Units of equal rows: 20 numbers of which 10 are 1 vary more than 100 of which 50 are.
    equal = mean_score(np.repeat([0.0, 1.0] * 10, 5), antigens)
    assert equal["high"] - equal["low"] > 1.8 * (one["high"] - one["low"])
    with pytest.raises(DataError, match="units of 100 rows for 2"):
        mean_score([1.0, 2.0], rows)


def test_a_share_of_all_rows_has_the_exact_binomial_interval_of_its_units():
    score = mean_score(np.ones(100, dtype=bool), by_antigen(range(100)))
    assert (score["value"], score["high"]) == (1.0, 1.0)
    assert score["low"] == pytest.approx(0.025 ** (1 / 100))  # 0.9638
    fewer = mean_score(np.zeros(100, dtype=bool), by_antigen(np.repeat(range(10), 10)))
    assert (fewer["value"], fewer["low"]) == (0.0, 0.0)
    assert fewer["high"] == pytest.approx(1 - 0.025 ** (1 / 10))  # 0.3085


def test_rows_without_a_value_are_left_out_and_counted_out():
    score = mean_score([1.0, np.nan, 3.0], by_antigen(["a", "b", "c"]))
    assert (score["value"], score["n"], score["num_units"]) == (2.0, 2, 2)
    assert mean_score([np.nan], by_antigen(["a"]))["undefined"] == "no row has a value"
    compared = compare_means([1.0, np.nan, 3.0], [2.0, 5.0, np.nan], by_antigen(["a", "b", "c"]))
    assert (compared.n, compared.improvement) == (1, 1.0)
    assert compare_means([np.nan], [1.0], by_antigen(["a"])).improvement is None


def test_few_units_are_not_trusted_even_where_each_is_one_row():
    better = compare_means(np.zeros(5), np.ones(5), by_antigen(range(5)))
    assert (better.improvement, better.low, better.is_better) == (1.0, 1.0, False)
    assert compare_means(np.zeros(10), np.ones(10), by_antigen(range(10))).is_better


def test_a_lower_loss_per_token_is_an_improvement_weighted_by_tokens():
    found = compare_means([20.0, 60.0], [10.0, 60.0], by_antigen(["a", "b"]), num_tokens=[10, 30])
    assert (found.before, found.after, found.improvement) == (2.0, 1.75, 0.25)
