"""Identity, nearest references, near copies and families are what aligning every pair gives."""

import random
from functools import cache
from itertools import product

import numpy as np
import pytest
from rapidfuzz.distance import Levenshtein
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from hf_ext.data import near_copies, nearest_identities
from hf_ext.data.near_copies import find_families, has_near

pytestmark = pytest.mark.internals
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"


def random_sequence(rng, length, letters=RESIDUES):
    return "".join(rng.choices(letters, k=length))


def mutate(rng, sequence, num, letters=RESIDUES):
    """`num` substitutions, insertions and deletions at random places; some may undo each other."""
    residues = list(sequence)
    for _ in range(num):
        place, kind = rng.randrange(len(residues)), rng.randrange(4)
        if kind < 2:
            residues[place] = rng.choice(letters)
        elif kind == 2:
            residues.insert(place, rng.choice(letters))
        elif len(residues) > 1:
            del residues[place]
    return "".join(residues)


def make_families(seed, lengths, num_bases=30, num_mutants=4):
    """Distinct sequences: bases, mutants of 0 to 50 % edits, low complexity, doubled and halved ones."""
    rng = random.Random(seed)
    sequences = ["A", "X", "AA", "AAAAAAAAAAAA", "AAAAAAAAAAA", "XXXXXXXXXX", "XXXXXXXXXA"]
    for _ in range(num_bases):
        length = rng.choice(lengths)
        letters = rng.choice([RESIDUES, RESIDUES, RESIDUES, "AG", "XACDEFG"])
        base = random_sequence(rng, length, letters)
        sequences += [base, base * 2, base[: len(base) // 2 + 1]]
        for _ in range(num_mutants):
            sequences.append(mutate(rng, base, rng.randrange(1 + rng.randrange(length // 2 + 2)), letters))
    return list(dict.fromkeys(sequences))


def textbook_distances(left, right):
    """Edit distances of pairs, cell by cell of the matrix; all pairs at once."""
    rows, columns = max(map(len, left)), max(map(len, right))
    a = np.array([[*one.ljust(rows, "*")] for one in left])
    b = np.array([[*one.ljust(columns, "+")] for one in right])
    cost = np.zeros((len(left), rows + 1, columns + 1), dtype=np.int32)
    cost[:, :, 0], cost[:, 0, :] = np.arange(rows + 1), np.arange(columns + 1)
    for i in range(1, rows + 1):
        differs = a[:, i - 1, None] != b
        for j in range(1, columns + 1):
            gap = np.minimum(cost[:, i - 1, j], cost[:, i, j - 1]) + 1
            cost[:, i, j] = np.minimum(gap, cost[:, i - 1, j - 1] + differs[:, j - 1])
    return cost[np.arange(len(left)), [*map(len, left)], [*map(len, right)]]


SHORT, LONG = (9, 10, 12, 15, 20, 30), (46, 60)
IDENTITIES = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0)


@cache
def make_case(lengths, num_bases):
    """Sequences, among them some with letters that are no residues, and the identity of all pairs by the textbook."""
    sequences = [
        *make_families(3, lengths, num_bases),
        "AC*EFGHIKL",
        "ac*EFGHIKL",
        "\N{GREEK SMALL LETTER ALPHA}CDEFGH",
    ]
    random.Random(4).shuffle(sequences)
    pairs = list(product(sequences, repeat=2))
    longest = np.array([max(len(a), len(b)) for a, b in pairs])
    identity = 1 - textbook_distances(*zip(*pairs)) / longest
    return sequences, identity.reshape(len(sequences), len(sequences))


def num_wrong(find_near, find_families):
    """Over random families and identities: queries, wrong answers about them, and wrong families."""
    asked = wrong = apart = 0
    for case in ((SHORT, 10), (LONG, 5)):
        sequences, identity = make_case(*case)
        for wanted in IDENTITIES:
            near = identity >= wanted - 1e-9
            found = find_near(sequences[:30], sequences[30:], wanted)
            asked, wrong = asked + len(found), wrong + int((found != near[:30, 30:].any(1)).sum())
            expected, family = connected_components(coo_matrix(near))[1], find_families(sequences, wanted)
            apart += int(((expected[:, None] == expected) != (family[:, None] == family)).sum())
    return asked, wrong, apart


def test_near_copies_and_families_are_those_of_aligning_every_pair():
    assert num_wrong(has_near, find_families) == (480, 0, 0)


def test_a_filter_that_asks_for_more_kmers_than_must_be_shared_is_noticed(monkeypatch):
    monkeypatch.setattr(near_copies, "num_shared", lambda longest, edits, k: 1.7 * (longest - k + 1 - k * edits))
    _, wrong, apart = num_wrong(has_near, find_families)
    assert min(wrong, apart) > 4


def test_what_is_empty_or_alone_is_answered_too():
    assert has_near(["", "A"], ["", "C"], 0.7).tolist() == [True, False]
    assert has_near(["A"], [], 0.7).tolist() == [False]
    assert has_near([], ["A"], 0.7).tolist() == []
    assert find_families(["ACD"], 0.8).tolist() == find_families([""], 0.8).tolist() == [0]
    assert len(set(find_families(["", "A", "AC"], 0.7).tolist())) == 3


def test_identity_of_pairs_is_one_less_edits_by_the_longer_length():
    left = ["KITTEN", "ACDE", "ACDE", "", "", "ACDEF", "ACGT" * 30, "X"]
    right = ["SITTING", "ACDE", "ACE", "", "AC", "CDEFA", "T" + "ACGT" * 30, "A"]
    found = [nearest_identities([one], [other]).item() for one, other in zip(left, right)]
    assert found == [1 - 3 / 7, 1, 0.75, 1, 0, 1 - 2 / 5, 1 - 1 / 121, 0]


@pytest.mark.parametrize("num_edits", [3, 40])
def test_nearest_is_what_all_pairs_aligned_give(num_edits):
    rng = random.Random(num_edits)
    bases = [random_sequence(rng, length) for length in (60, 61, 75, 90)]
    references = [mutate(rng, bases[i % 4], 1 + i % 15) for i in range(200)]
    queries = [mutate(rng, rng.choice(references), num_edits) for _ in range(70)]
    similar = Levenshtein.normalized_similarity
    every = [max(similar(one, other) for other in references) for one in queries]
    assert nearest_identities(queries, references).tolist() == every


def test_what_is_less_identical_than_asked_for_is_not_found():
    queries, references = ["ACDEFGHIKL", "ACDEFGHIKW", "WWWWWWWWWW"], ["ACDEFGHIKL", "ACDEFGHYYY"]
    identity = nearest_identities(queries, references, at_least=0.9)
    assert identity[:2].tolist() == [1.0, 0.9]
    assert np.isnan(identity[2])
    assert np.isnan(nearest_identities(queries, references, at_least=0.91)).tolist() == [False, True, True]
    identity = nearest_identities(["", "AC", "AAAD"], ["ACD", "WW", "AAAA", "AAAC"])
    assert identity == pytest.approx(np.array([0, 2 / 3, 3 / 4]))
