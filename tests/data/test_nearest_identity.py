"""The nearest reference by percent identity is found exactly, and k-mers are counted as they are shared."""

import numpy as np
import pytest

from hf_ext.data.kmer_overlap import KmerOverlap
from hf_ext.data.nearest_identity import nearest_identities, pair_identities


def test_identity_of_pairs_is_one_less_edits_by_the_longer_length():
    found = pair_identities(["ACDE", "ACDE", "", "", "ACDE"], ["ACDE", "ACE", "", "AC", "WWWW"])
    assert found.tolist() == [1.0, 0.75, 1.0, 0.0, 0.0]
    assert pair_identities([], []).tolist() == []


def mutate(sequence: str, generator: np.random.Generator, edits: int) -> str:
    letters = list(sequence)
    for _ in range(edits):
        kind, place = generator.integers(3), int(generator.integers(len(letters)))
        new = str(generator.choice(list("ACDEFGHIKLMNPQRSTVWY")))
        letters[place : place + 1] = {0: [new], 1: [], 2: [letters[place], new]}[int(kind)]
    return "".join(letters)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_edits", [0, 3, 12, 40])
def test_nearest_is_what_all_pairs_aligned_give(num_edits):
    generator = np.random.default_rng(num_edits)
    bases = ["".join(generator.choice(list("ACDEFGHIKLMNPQRSTVWY"), size=int(n))) for n in (60, 61, 75, 90)]
    references = [mutate(bases[i % 4], generator, 1 + i % 15) for i in range(200)]
    queries = [mutate(references[int(i)], generator, num_edits) for i in generator.integers(200, size=70)]
    identity, place = nearest_identities(queries, references)
    every = [max(pair_identities([one] * 200, references)) for one in queries]
    assert identity.tolist() == every
    assert pair_identities(queries, [references[i] for i in place]).tolist() == every


def test_what_is_less_identical_than_asked_for_is_not_found():
    queries, references = ["ACDEFGHIKL", "ACDEFGHIKW", "WWWWWWWWWW"], ["ACDEFGHIKL", "ACDEFGHYYY"]
    identity, place = nearest_identities(queries, references, at_least=0.9)
    assert identity[:2].tolist() == [1.0, 0.9]
    assert np.isnan(identity[2])
    assert place.tolist() == [0, 0, -1]
    assert nearest_identities(queries, references, at_least=0.91)[1].tolist() == [0, -1, -1]


def test_a_query_among_the_references_names_its_first_place():
    identity, place = nearest_identities(["CCCC", "AAAA"], ["AAAA", "CCCC", "CCCC"])
    assert identity.tolist() == [1.0, 1.0]
    assert place.tolist() == [1, 0]


def test_short_and_empty_sequences_have_a_nearest_one_too():
    identity, place = nearest_identities(["", "A", "AC"], ["ACD", "WW"])
    assert identity == pytest.approx(np.array([0, 1 / 3, 2 / 3]))
    assert place.tolist()[1:] == [0, 0]


def test_shared_kmers_count_repeats_as_often_as_both_hold_them():
    overlap = KmerOverlap(["AAAAA", "ACDEF"], ["AAAA", "CDE", "AC"], k=3)
    assert overlap.shared().tolist() == [[2, 0, 0], [0, 1, 0]]
    assert overlap.shared(slice(1, 2)).tolist() == [[0, 1, 0]]
    assert overlap.cosine() == pytest.approx(np.array([[2 / 6**0.5, 0, 0], [0, 1 / 3**0.5, 0]]))
