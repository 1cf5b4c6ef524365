import numpy as np
import pytest

from hf_ext.data import similarity
from hf_ext.data.similarity import KmerSets, cluster_rows, find_similar


def random_sequences(num, length, seed=0):
    letters = np.array(list("ACDEFGHIKLMNPQRSTVWY"))
    return ["".join(row) for row in letters[np.random.default_rng(seed).integers(0, 20, (num, length))]]


def test_similarity_is_shared_kmers_over_the_smaller_set():
    # 3-mers: ACDEF -> ACD CDE DEF; ACDEGH -> ACD CDE DEG EGH; WYACDEF -> WYA YAC ACD CDE DEF
    sets = KmerSets([["ACDEF", "ACDEGH", "WYACDEF", "ACDACDACD"]], k=3)
    left, right = np.array([0, 0, 1, 0]), np.array([1, 2, 2, 3])
    # ACDACDACD has the distinct 3-mers ACD, CDA, DAC
    assert sets.similarity(left, right).tolist() == pytest.approx([2 / 3, 1.0, 2 / 4, 1 / 3])


def test_kmers_do_not_span_columns_and_columns_are_united():
    joined = KmerSets([["ACD", "ACD"], ["EFG", "WYW"]], k=3)
    assert joined.similarity(np.array([0]), np.array([1])).tolist() == [0.5]
    assert KmerSets([["ACD", "ACDEFG"], ["EFG", "EFG"]], k=3).similarity(np.array([0]), np.array([1])).tolist() == [1.0]


def test_sequences_shorter_than_k_match_only_themselves():
    sets = KmerSets([["AC", "AC", "AD", "ACDEFG"], ["GGGGG", "WWWWW", "YYYYY", "VVVVV"]], k=5)
    assert sets.similarity(np.array([0, 0, 0]), np.array([1, 2, 3])).tolist() == [0.5, 0.0, 0.0]


def test_clusters_equal_the_ones_from_comparing_every_pair():
    bases = random_sequences(12, 60)
    rows = []
    for number, base in enumerate(bases):
        rows += [base, base[:20] + "W" + base[21:], base[5:] + "ACDEF", base[:25]]
        rows.append(bases[number - 1][:30] + base[30:])  # half of each neighbour: 26 of 56 5-mers, below 0.6
    rows = list(dict.fromkeys(rows))
    sets = KmerSets([rows])
    left, right = np.triu_indices(len(rows), 1)
    close = sets.similarity(left, right) >= 0.6
    expected = np.arange(len(rows))
    for a, b in zip(left[close], right[close]):
        expected[expected == expected[b]] = expected[a]
    cluster, complete = cluster_rows(sets, 0.6)
    assert complete
    together = cluster[left] == cluster[right]
    assert (together == (expected[left] == expected[right])).all()
    assert len(set(cluster.tolist())) == len(set(expected.tolist())) > 1


def test_exhaustive_search_alone_finds_what_minhash_would(monkeypatch):
    rows = random_sequences(30, 40)
    rows += [row[:12] for row in rows[:10]]  # fragments: all of the smaller set shared
    monkeypatch.setattr(similarity, "NUM_BINS", 1)
    cluster, complete = cluster_rows(KmerSets([rows]), 0.6)
    assert complete
    assert cluster[30:].tolist() == cluster[:10].tolist()
    assert len(set(cluster.tolist())) == 30


def test_too_much_work_is_reported_as_incomplete(monkeypatch):
    a, b, c = random_sequences(3, 20)
    sets = KmerSets([[a + b, b + c, c + a]])  # each pair shares 16 of 36 5-mers: 0.44
    assert cluster_rows(sets, 0.6)[1] is True
    assert find_similar(sets, np.arange(1), np.arange(1, 3))[1] is True
    monkeypatch.setattr(similarity, "MAX_CANDIDATES", 0)
    assert cluster_rows(sets, 0.6)[1] is False
    assert find_similar(sets, np.arange(1), np.arange(1, 3))[1] is False


def test_similar_queries_are_found_and_others_are_not():
    rows = random_sequences(50, 100)
    near = rows[7][:50] + "W" + rows[7][51:]  # 5 of 96 5-mers change: 0.948
    far = rows[8][:40] + random_sequences(1, 60, seed=9)[0]
    found, complete = find_similar(KmerSets([[*rows, near, far]]), np.array([50, 51]), np.arange(50), 0.9)
    assert (found.tolist(), complete) == ([True, False], True)


def test_malformed_input_is_refused():
    with pytest.raises(ValueError, match="equal length"):
        KmerSets([["ACDEF"], []])
    with pytest.raises(ValueError, match="k=9"):
        KmerSets([["ACDEF"]], k=9)
