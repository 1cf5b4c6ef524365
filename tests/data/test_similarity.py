import random
from functools import cache
from itertools import product

import numpy as np
import pytest
from mutants import RESIDUES, make_families, mutate, random_sequence, textbook_distances

from hf_ext.data import shared_kmers, similarity
from hf_ext.data.shared_kmers import choose_kmers
from hf_ext.data.similarity import WorkLimit, find_near

SHORT, LONG = (9, 10, 12, 15, 20, 30), (46, 60, 75)
IDENTITIES = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0)
PLENTY = 10**12
OTHER = {residue: RESIDUES[RESIDUES.index(residue) - 1] for residue in RESIDUES}


def identities(left, right):
    """[left, right], by the textbook."""
    pairs = list(product(left, right))
    longest = np.array([max(len(a), len(b)) for a, b in pairs])
    return (1 - textbook_distances(*zip(*pairs)) / longest).reshape(len(left), len(right))


@cache
def make_case(lengths, num_bases):
    sequences = make_families(3, lengths, num_bases)
    random.Random(4).shuffle(sequences)
    return sequences[:30], sequences[30:], identities(sequences[:30], sequences[30:]).max(1)


def num_missed_and_wrong(search):
    """Over random families: pairs of a query and an identity, near ones not found, others found."""
    asked = missed = wrong = 0
    for case in ((SHORT, 14), (LONG, 8)):
        queries, references, best = make_case(*case)
        for wanted in IDENTITIES:
            found, near = search(queries, references, wanted), best >= wanted - 1e-9
            asked, missed, wrong = asked + len(found), missed + (near & ~found).sum(), wrong + (found & ~near).sum()
    return asked, int(missed), int(wrong)


def search(queries, references, wanted):
    found, is_complete = find_near([queries], [references], wanted, WorkLimit(PLENTY))
    assert is_complete
    return found


def test_every_near_copy_is_found_and_nothing_else():
    assert num_missed_and_wrong(search) == (480, 0, 0)


def test_a_filter_that_asks_for_one_kmer_too_many_is_noticed(monkeypatch):
    def too_strict(identity, max_length):
        return [
            shared_kmers.SharedKmers(rule.k, np.where(rule.shared > 0, rule.shared + 3, 0), rule.kept)
            for rule in choose_kmers(identity, max_length)
        ]

    monkeypatch.setattr(similarity, "choose_kmers", too_strict)
    _, missed, wrong = num_missed_and_wrong(search)
    assert missed > 10
    assert wrong == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("length", [9, 15, 20, 46, 53, 54, 60, 120, 250, 300])
def test_mutants_are_found_down_to_the_identity_at_every_length(length):
    rng = random.Random(length)
    bases = [random_sequence(rng, length) for _ in range(12)]
    for wanted in (0.7, 0.9):
        allowed = int((1 - wanted) * length + 1e-9)
        for num, expected in ((allowed, True), (allowed + 1, False)):
            mutants = []
            for base in bases:
                places = set(rng.sample(range(length), num))
                mutants.append("".join(OTHER[x] if i in places else x for i, x in enumerate(base)))
            if expected or wanted == 0.9:  # of 91 substitutions, gaps can save one
                assert search(mutants, bases, wanted).tolist() == [expected] * 12


def test_every_length_has_a_rule_that_asks_for_a_shared_kmer():
    for wanted in (0.7, 0.8, 0.9, 1.0):
        rules = choose_kmers(wanted, 600)
        asks = np.stack([rule.shared for rule in rules])
        assert ((asks > 0).sum(0) == [0] + [1] * 600).all()  # one rule each, none for nothing
        for rule in rules:
            lengths = np.flatnonzero(rule.shared)
            assert (rule.shared[lengths] <= rule.kept[lengths]).all()


def test_rows_are_near_only_where_every_column_is():
    rng = random.Random(5)
    a, b, x, y = (random_sequence(rng, 40) for _ in range(4))
    near_a, near_x = mutate(rng, a, 2), mutate(rng, x, 2)
    references = [[a, b], [x, y]]
    queries = [[near_a, near_a, a, b, ""], [near_x, y, y, y, x]]
    found, is_complete = find_near(queries, references, 0.9, WorkLimit(PLENTY))
    assert (found.tolist(), is_complete) == ([True, False, False, True, False], True)
    assert find_near([["", "A"], [x, x]], [["", ""], [near_x, y]], 0.9, WorkLimit(PLENTY))[0].tolist() == [True, False]


def test_variants_of_one_protein_cost_little_however_many_there_are():
    rng = random.Random(6)
    base = random_sequence(rng, 200)
    variants = list(dict.fromkeys(mutate(rng, base, 4) for _ in range(4000)))
    costs = []
    for num in (1000, 3000):
        work = WorkLimit(PLENTY)
        found, _ = find_near([variants[:200]], [variants[200 : 200 + num]], 0.9, work)
        assert found.all()
        costs.append(work.done)
    assert max(costs) < 1.1 * min(costs) < 200 * 64 * 200


def test_unrelated_sequences_are_hardly_compared():
    rng = random.Random(7)
    sequences = [random_sequence(rng, 100) for _ in range(4000)]
    work = WorkLimit(PLENTY)
    found, _ = find_near([sequences[:500]], [sequences[500:]], 0.9, work)
    assert not found.any()
    assert work.done < 500 * 3500 * 0.01  # of a hundred thousand cells an alignment each


def test_a_search_that_is_cut_short_says_so_and_what_it_found_is_right():
    sequences = make_families(3, LONG)
    queries, references = sequences[::3], sequences[1::3]
    whole = search(queries, references, 0.7)
    assert any(
        0 < find_near([queries], [references], 0.7, WorkLimit(limit))[0].sum() < whole.sum() for limit in (3000, 30000)
    )
    for limit in (0, 3000, 30000):
        found, is_complete = find_near([queries], [references], 0.7, WorkLimit(limit))
        assert not is_complete
        assert not (found & ~whole).any()
