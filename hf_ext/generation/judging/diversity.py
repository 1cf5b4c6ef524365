"""How unlike each other the outputs are: over all of them, and for one antigen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...data.near_copies import pair_identities
from ...evaluation.scores import Score
from .rows import AntibodyRows
from .scores import Sampling, mean_score
from .validity import find_cdr3

PARTNERS = 4  # others that a row is held against


@dataclass(frozen=True)
class Diversity:
    """What n outputs repeat.

    Attributes:
        num_outputs: what was counted: outputs, or with greedy decoding one per antigen and output.
        num_distinct: distinct pairs of chains.
        unique_pairs: distinct pairs by outputs. Its interval resamples a row's share, 1 / how often its pair occurs.
        unique_per_antigen: the same, where only outputs for the same antigen repeat each other.
        unique_cdr3: as `unique_pairs`, of heavy CDR3, among outputs where the pattern finds one.
        most_frequent: how many outputs are the commonest pair.
        identity_within: mean identity of heavy chains written for the same antigen; undefined with one output each.
        identity_across: the same of those written for different antigens.
    """

    num_outputs: int
    num_distinct: int
    unique_pairs: Score
    unique_per_antigen: Score
    unique_cdr3: Score
    most_frequent: int
    identity_within: Score
    identity_across: Score

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**vars(self)}


def judge_diversity(rows: AntibodyRows, sampling: Sampling, is_greedy: bool = False) -> Diversity:
    """Counts what repeats, and how alike the heavy chains of two outputs are.

    Args:
        sampling: its units are those of these rows; its seed also chooses the pairs that are compared.
        is_greedy: the outputs were decoded without sampling, so that rows of one antigen are equal by construction:
            then each antigen's outputs count once.

    Cost: 10 us a row.
    """
    if is_greedy:
        first: dict[Any, int] = {}
        for row, output in enumerate(zip(rows.pairs, rows.antigens)):
            first.setdefault(output, row)
        chosen = np.array([*first.values()], dtype=np.int64)
        rows, sampling = rows.select(chosen), sampling.select(chosen)
    counts = Counter(rows.pairs)
    within, across = _identities(rows, sampling.seed)
    return Diversity(
        len(rows),
        len(counts),
        mean_score(_unique_shares(rows.pairs), sampling),
        mean_score(_unique_shares([*zip(rows.pairs, rows.antigens)]), sampling),
        mean_score(_unique_shares([find_cdr3(one) for one in rows.heavy]), sampling),
        max(counts.values(), default=0),
        mean_score(within, sampling),
        mean_score(across, sampling),
    )


def _unique_shares(values: Sequence[Any]) -> np.ndarray:
    """1 / how often each value occurs, NaN for None: the mean is distinct values by values.

    As a share, bool, where each occurs once: then resamples cannot tell how rare a repeat is.
    """
    counts = Counter(values)
    shares = np.array([np.nan if one is None else 1 / counts[one] for one in values], dtype=np.float64)
    return shares == 1 if len(shares) and (shares == 1).all() else shares


def _identities(rows: AntibodyRows, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean identity of each heavy chain to some of its antigen, and to some of others; NaN where there are none."""
    generator = np.random.default_rng(seed)
    _, antigen = np.unique(np.array(rows.antigens, dtype=object).astype(str), return_inverse=True)
    everything = np.arange(len(rows))
    members = [everything[antigen == number] for number in range(int(antigen.max(initial=-1)) + 1)]
    sides: list[tuple[list[int], list[int]]] = [([], []), ([], [])]
    for row in range(len(rows)):
        same = members[antigen[row]]
        for (left, right), others in zip(sides, (same[same != row], _others(everything, antigen, row, generator))):
            chosen = generator.permutation(others)[:PARTNERS]
            left.extend([row] * len(chosen))
            right.extend(chosen.tolist())
    means = []
    for left, right in sides:
        identity = pair_identities([rows.heavy[i] for i in left], [rows.heavy[i] for i in right])
        sums = np.bincount(left, identity, len(rows)) if left else np.zeros(len(rows))
        numbers = np.bincount(left, minlength=len(rows)) if left else np.zeros(len(rows))
        means.append(np.divide(sums, numbers, out=np.full(len(rows), np.nan), where=numbers > 0))
    return means[0], means[1]


def _others(everything: np.ndarray, antigen: np.ndarray, row: int, generator: np.random.Generator) -> np.ndarray:
    """Rows of other antigens among a few dozen drawn ones, so that a row costs no pass over all."""
    drawn = np.unique(generator.integers(0, len(everything), size=16 * PARTNERS))
    return drawn[antigen[drawn] != antigen[row]]
