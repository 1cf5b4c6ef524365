import random

import numpy as np
import pytest
from mutants import mutate, random_sequence, textbook_distances

from hf_ext.data import identity
from hf_ext.data.identity import SequenceSet, allowed_edits, edit_distances, reach_identity


def distances(left, right):
    sequences = SequenceSet([*left, *right])
    return edit_distances(sequences, np.arange(len(left)), np.arange(len(right)) + len(left))


def num_wrong(compute):
    """Of pairs around the edges of 64-bit words, how many distances differ from the textbook's."""
    rng = random.Random(1)
    left = [random_sequence(rng, length) for length in (1, 2, 9, 63, 64, 65, 100, 127, 128, 129, 140) for _ in range(6)]
    right = [mutate(rng, one, rng.randrange(len(one) // 2 + 2)) for one in left]
    right[::6] = right[:1] + right[6::6]  # some unrelated, of very different length
    return int((np.asarray(compute(left, right)) != textbook_distances(left, right)).sum()), len(left)


def test_distances_worked_out_by_hand():
    left = ["KITTEN", "", "A", "A", "ACDEF", "AAAA", "ACGT" * 30, "X"]
    right = ["SITTING", "ACD", "", "A", "CDEFA", "AA", "T" + "ACGT" * 30, "A"]
    assert distances(left, right).tolist() == [3, 3, 1, 0, 2, 2, 1, 1]


def test_distances_equal_the_textbook_and_a_count_of_substitutions_does_not():
    assert num_wrong(distances) == (0, 66)
    assert num_wrong(lambda left, right: [sum(x != y for x, y in zip(a, b)) for a, b in zip(left, right)])[0] > 30


@pytest.mark.parametrize("chunk", [1, 7])
def test_distances_do_not_depend_on_chunks(monkeypatch, chunk):
    monkeypatch.setattr(identity, "PAIRS_PER_CHUNK", chunk)
    assert num_wrong(distances)[0] == 0


def test_allowed_edits_are_whole_and_meet_the_identity_exactly():
    lengths = np.array([0, 9, 10, 20, 46, 100])
    assert allowed_edits(lengths, 0.9).tolist() == [0, 0, 1, 2, 4, 10]
    assert allowed_edits(lengths, 0.7).tolist() == [0, 2, 3, 6, 13, 30]
    assert allowed_edits(lengths, 1.0).tolist() == [0] * 6


def test_the_bounds_before_alignment_change_no_answer():
    rng = random.Random(2)
    left = [random_sequence(rng, rng.choice([1, 9, 30, 70, 130])) for _ in range(120)]
    right = [mutate(rng, one, rng.randrange(1 + len(one) // 3)) for one in left]
    sequences, aligned = SequenceSet([*left, *right]), []
    places = np.arange(120)
    distance, longest = textbook_distances(left, right), np.maximum([*map(len, left)], [*map(len, right)])
    for wanted in (0.7, 0.8, 0.9, 0.95, 1.0):
        expected = distance <= allowed_edits(longest, wanted)
        assert reach_identity(sequences, places, places + 120, wanted, aligned.append).tolist() == expected.tolist()
        assert 0 < expected.sum() < 120
    assert 0 < max(aligned) < sum(len(b) * (1 + len(a) // 64) for a, b in zip(left, right))
    assert min(aligned) < 100  # at identity 1 nothing is left to align
