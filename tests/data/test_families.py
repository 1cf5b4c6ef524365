import random
from functools import cache

import numpy as np
import pytest
from mutants import make_families, mutate, random_sequence, textbook_distances
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from hf_ext.data import families
from hf_ext.data.families import find_families
from hf_ext.data.similarity import TooMuchWorkError, WorkLimit

PLENTY = 10**12


@cache
def make_case(lengths):
    """Sequences, all pairs of them, and the identity of each pair by the textbook."""
    sequences = make_families(8, lengths, num_bases=8, num_mutants=3)
    left, right = np.triu_indices(len(sequences), 1)
    distance = textbook_distances([sequences[i] for i in left], [sequences[i] for i in right])
    size = np.array([*map(len, sequences)])
    return sequences, left, right, 1 - distance / np.maximum(size[left], size[right])


def num_different(find):
    """Of all pairs in random families, how many stand together in one answer only; `find(sequences, identity)`."""
    different = pairs = 0
    for lengths in ((9, 10, 12, 15, 20, 30), (46,)):
        sequences, left, right, identity = make_case(lengths)
        for wanted in (0.7, 0.8, 0.9, 0.95, 1.0):
            near = identity >= wanted - 1e-9
            links = coo_matrix((near[near], (left[near], right[near])), shape=(len(sequences), len(sequences)))
            expected, found = connected_components(links, directed=False)[1], find(sequences, wanted)
            different += ((found[left] == found[right]) != (expected[left] == expected[right])).sum()
            pairs += len(left)
    return int(different), pairs


def test_families_equal_those_from_aligning_every_pair():
    different, pairs = num_different(lambda sequences, wanted: find_families(sequences, wanted, WorkLimit(PLENTY)))
    assert different == 0
    assert pairs > 5_000


def test_neighbours_alone_would_leave_relatives_apart(monkeypatch):
    monkeypatch.setattr(families._Families, "_link_rest", lambda *_: None)
    assert num_different(lambda sequences, wanted: find_families(sequences, wanted, WorkLimit(PLENTY)))[0] > 0


def test_the_exhaustive_search_needs_no_neighbours(monkeypatch):
    monkeypatch.setattr(families, "LINKING_ROUNDS", 0)
    assert num_different(lambda sequences, wanted: find_families(sequences, wanted, WorkLimit(PLENTY)))[0] == 0


def test_the_same_rows_in_another_order_are_the_same_families():
    sequences = make_families(9, (20, 60))
    turned = find_families(sequences[::-1], 0.8, WorkLimit(PLENTY))[::-1]
    found = find_families(sequences, 0.8, WorkLimit(PLENTY))
    assert ((found[:, None] == found) == (turned[:, None] == turned)).all()


def test_many_unrelated_sequences_cost_little():
    rng = random.Random(10)
    bases = [random_sequence(rng, 80) for _ in range(2000)]
    work = WorkLimit(PLENTY)
    found = find_families([*bases, *(mutate(rng, base, 5) for base in bases)], 0.8, work)
    assert (found[:2000] == found[2000:]).all()
    assert len(set(found.tolist())) == 2000
    assert work.done < 4000 * 4000 * 3  # 3 additions a pair; aligning all of them takes 200 times as much


def test_work_is_limited_and_a_check_can_end_the_search():
    sequences = make_families(8, (46, 60))
    with pytest.raises(TooMuchWorkError, match="of at most 1,000 operations"):
        find_families(sequences, 0.7, WorkLimit(1000))

    def stop(family):
        assert np.bincount(family).max() > 1
        raise InterruptedError

    with pytest.raises(InterruptedError):
        find_families(sequences, 0.7, WorkLimit(PLENTY), stop)


def test_one_sequence_is_a_family():
    assert find_families(["ACD"], 0.8, WorkLimit(PLENTY)).tolist() == [0]


@pytest.mark.nightly
@pytest.mark.parametrize(("num", "lengths", "identity"), [(50_000, (30, 60), 0.8), (50_000, (50, 400), 0.9)])
def test_a_hundred_thousand_sequences_within_bounded_work(num, lengths, identity):
    rng = random.Random(11)
    bases = [random_sequence(rng, rng.randint(*lengths)) for _ in range(num)]
    mutants = [mutate(rng, base, int((1 - identity) * (len(base) - 1) * 0.9)) for base in bases]
    work = WorkLimit(PLENTY)
    found = find_families([*bases, *mutants], identity, work)
    assert (found[:num] == found[num:]).sum() == num
    assert len(set(found.tolist())) == num
    assert work.done < 5_000_000_000
