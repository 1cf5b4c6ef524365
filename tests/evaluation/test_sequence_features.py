"""Features of sequences: counts by hand, what is left out, and that a linear rule is found again."""

from __future__ import annotations

import numpy as np
import pytest

from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation import RidgeBaseline, sequence_features
from hf_ext.evaluation.sequence_features import SequenceFeatures


def test_sequences_of_one_length_are_read_by_position_without_what_never_varies() -> None:
    features = SequenceFeatures([["ACD", "AYD", "ACD"]])
    assert (features.name, features.num_features, features.num_counts) == ("one-hot", 2, 2)
    # C and Y at the second position, in the order of the alphabet; W there was never seen.
    assert features.transform([["ACD", "AYD", "AWD"]]).tolist() == [[1, 0], [0, 1], [0, 0]]


def test_sequences_of_several_lengths_are_read_by_3mers() -> None:
    features = SequenceFeatures([["AAAA", "AAAC", "C"]])
    # AAA twice, AAA and AAC once, nothing in a sequence shorter than 3.
    assert (features.name, features.num_features) == ("3-mer", 2)
    assert features.transform([["AAAA", "AAAC", "C", "CAAA"]]).tolist() == [[2, 0], [1, 1], [0, 0], [1, 0]]


def test_a_length_seen_only_among_rows_to_predict_makes_3mers_of_a_column() -> None:
    train = [["ACD", "AYD"]]
    assert SequenceFeatures(train, [[["ACW"]]]).name == "one-hot"
    assert SequenceFeatures(train, [[["ACDW"]]]).name == "3-mer"


def test_columns_stand_side_by_side_and_one_with_a_single_value_is_left_out() -> None:
    features = SequenceFeatures([["AC", "AD"], ["WWWW", "WWWW"], ["MKT", "MKTA"]])
    assert (features.name, features.num_features) == ("one-hot and 3-mer", 3)
    assert features.transform([["AD"], ["YYYY"], ["MKTA"]]).tolist() == [[0, 1, 1]]


def test_beyond_the_limit_the_counts_that_vary_most_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(sequence_features, "MAX_FEATURES", 2)
    # Second position: half C, half D. Third: one W of six.
    rows = ["ACA", "ACA", "ACA", "ADA", "ADA", "ADW"]
    features = SequenceFeatures([rows])
    assert (features.num_features, features.num_counts) == (2, 4)
    assert features.transform([["ACA", "ADW"]]).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("chunk", [1, 2_000_000])
def test_pieces_give_the_same_counts(monkeypatch, chunk) -> None:
    rows = [["ACDEFG", "ACDACD", "GGG", "ACDACD", "WACD"]]
    expected = SequenceFeatures(rows).transform(rows)
    monkeypatch.setattr(sequence_features, "CHUNK_RESIDUES", chunk)
    assert np.array_equal(SequenceFeatures(rows).transform(rows), expected)
    assert expected.sum() == 4 + 4 + 1 + 4 + 2


def test_ridge_on_them_finds_an_additive_rule_and_not_one_of_shuffled_labels() -> None:
    generator = np.random.default_rng(0)
    letters = generator.integers(0, 4, (300, 6))
    rows = ["".join("ACDE"[i] for i in row) for row in letters]
    effects = generator.normal(size=(6, 4))
    labels = effects[np.arange(6), letters].sum(1)
    features = SequenceFeatures([rows[:200]], [[rows[200:]]])
    train, held_out = features.transform([rows[:200]]), features.transform([rows[200:]])
    ridge = RidgeBaseline(standardize=False).fit(train, labels[:200], held_out, labels[200:])
    np.testing.assert_allclose(ridge.predict(held_out), labels[200:], atol=1e-3)
    wrong = RidgeBaseline(standardize=False).fit(train, generator.permutation(labels[:200]), held_out, labels[200:])
    assert np.corrcoef(wrong.predict(held_out), labels[200:])[0, 1] < 0.5


@pytest.mark.parametrize(
    ("columns", "error", "words"),
    [
        ([], ArgumentError, "No columns"),
        ([["ACD", "ACD"]], ArgumentError, "No column of sequences varies"),
        ([["ACD", "AWD"], ["A"]], DataError, "Columns of 2, 1 rows"),
        ([["ACD", "acd"]], DataError, "Sequence 'acd': only the letters A-Z"),
        ([["ACD", "A-D"]], DataError, "Sequence 'A-D': only the letters A-Z"),
    ],
)
def test_what_cannot_be_read_is_refused(columns, error, words) -> None:
    with pytest.raises(error, match=words):
        SequenceFeatures(columns)
