"""Sequences with a known history, and edit distances by the textbook."""

import random

import numpy as np

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
