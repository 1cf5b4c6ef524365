"""How alike outputs are: to each other (diversity), to training (novelty), to binders that were held out (recovery)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...data.columns import factorize
from ...data.near_copies import nearest_identities, pair_identities
from ...evaluation._arrays import FloatArray
from ...evaluation.scores import Score
from .rows import AntibodyRows, Sampling, mean_score, places_of
from .validity import find_cdr3

PARTNERS = 4  # other outputs that one is held against
NEAR_COPY = 0.95  # identity of both chains to the nearest training chain
NOT_NEAR = 0.7  # identity below which no nearest chain is looked for; it stands for all that is lower
MAX_BINDERS = 100  # of one antigen that outputs are held against, a seeded sample of more


def judge_diversity(rows: AntibodyRows, sampling: Sampling) -> dict[str, Any]:
    """Counts what n outputs repeat, and how alike the heavy chains of two of them are.

    Args:
        sampling: its units are those of these rows; its seed also chooses the pairs that are compared.

    Returns:
        JSON-able:
            num_distinct: distinct pairs of chains.
            unique_pairs: these by outputs. Its interval resamples a row's share, 1 / how often its pair occurs.
            unique_cdr3: the same of heavy CDR3, among outputs where the pattern finds one.
            identity_within: mean identity of heavy chains written for the same antigen; undefined with one output each.
            identity_across: the same of those written for different antigens.

    Cost: 10 us a row.
    """
    columns = {
        "unique_pairs": _unique_shares(rows.pairs),
        "unique_cdr3": _unique_shares([find_cdr3(one) for one in rows.heavy]),
        **_identities(rows, sampling.seed),
    }
    return {
        "num_distinct": len(set(rows.pairs)),
        **{name: mean_score(values, sampling) for name, values in columns.items()},
    }


def _unique_shares(values: Sequence[Any]) -> np.ndarray:
    """1 / how often each value occurs, NaN for None: the mean is distinct values by values.

    As a share, bool, where each occurs once: then resamples cannot tell how rare a repeat is.
    """
    counts = Counter(values)
    shares = np.array([np.nan if one is None else 1 / counts[one] for one in values], dtype=np.float64)
    return shares == 1 if len(shares) and (shares == 1).all() else shares


def _identities(rows: AntibodyRows, seed: int) -> dict[str, FloatArray]:
    """Mean identity of each heavy chain to some of its antigen, and to some of others; NaN where there are none."""
    generator = np.random.default_rng(seed)
    antigen = factorize(rows.antigens)[0]
    pairs: dict[str, list[tuple[int, int]]] = {"identity_within": [], "identity_across": []}
    for row in range(len(rows)):
        same = np.flatnonzero(antigen == antigen[row])
        drawn = np.unique(generator.integers(0, len(rows), size=16 * PARTNERS))  # a pass over all would cost too much
        for chosen, others in zip(pairs.values(), (same[same != row], drawn[antigen[drawn] != antigen[row]])):
            chosen += [(row, other) for other in generator.permutation(others)[:PARTNERS]]
    means = {}
    for name, chosen in pairs.items():
        left, right = np.array(chosen, np.int64).reshape(-1, 2).T
        identity = pair_identities([rows.heavy[i] for i in left], [rows.heavy[i] for i in right])
        sums, numbers = (np.bincount(left, weights, len(rows)) for weights in (identity, np.ones(len(left))))
        means[name] = np.divide(sums, numbers, out=np.full(len(rows), np.nan), where=numbers > 0)
    return means


def judge_novelty(
    rows: AntibodyRows, training: AntibodyRows, sampling: Sampling
) -> tuple[dict[str, Score], dict[str, np.ndarray]]:
    """Finds the nearest training chain of every output, exactly.

    Args:
        sampling: its units are those of `rows`.

    Returns:
        Scores:
            memorised: share of outputs that are a training pair, both chains to the residue.
            near_copies: share of which each chain is at least 95 % identical to some training chain; copies count too.
            memorised_cdr3: share whose heavy CDR3 stands in training, among outputs where the pattern finds one.
            heavy, light, cdr3: mean identity to the nearest of training; a chain that is less than 70 % identical to
                any counts as 70 %.
        And row by row, (n,) each: "nearest_heavy", that identity, and "is_copy", bool, memorised pairs.

    Cost: 0.1 s a distinct new pair for 12,000 training pairs; copies cost nothing, and noise little.
    """
    known = set(training.pairs)
    is_copy = np.array([pair in known for pair in rows.pairs], dtype=bool)
    mine, theirs = _columns(rows), _columns(training)
    floors = {"cdr3": 0.0, "heavy": NOT_NEAR, "light": NOT_NEAR}
    nearest = {name: _nearest(mine[name], theirs[name], floor) for name, floor in floors.items()}
    columns = {
        "memorised": is_copy,
        "near_copies": np.fmin(nearest["heavy"], nearest["light"]) >= NEAR_COPY,
        "memorised_cdr3": np.where(np.isnan(nearest["cdr3"]), np.nan, nearest["cdr3"] == 1),
        **nearest,
    }
    scores = {name: mean_score(values, sampling) for name, values in columns.items()}
    return scores, {"nearest_heavy": nearest["heavy"], "is_copy": is_copy}


def judge_recovery(rows: AntibodyRows, held_out: AntibodyRows, seed: int = 0) -> dict[str, FloatArray]:
    """Identity of every output to the held-out binder of its antigen that is most alike.

    More binders make a higher number likelier: compare only what was held against the same ones, as the baselines are.

    Args:
        held_out: binders that training did not hold, with their antigens.
        seed: of the sample of an antigen's binders, where there are more than 100.

    Returns:
        "cdr3" of the heavy chain, found by pattern; "heavy" and "light", most of which is germline in any antibody:
        (n,) each. NaN where the antigen has no held-out binder with such a sequence; 0 where the output has none.

    Cost: 10 us per output and binder of its antigen.
    """
    generator = np.random.default_rng(seed)
    mine, theirs, asked = _columns(rows), _columns(held_out), places_of(rows.antigens)
    found = {name: np.full(len(rows), np.nan) for name in mine}
    for antigen, binders in places_of(held_out.antigens).items():
        chosen = binders if len(binders) <= MAX_BINDERS else generator.permutation(binders)[:MAX_BINDERS]
        places = asked.get(antigen, [])
        for name, values in found.items():
            values[places] = _nearest([mine[name][i] for i in places], [theirs[name][i] for i in chosen], 0.0, 0.0)
    return found


def _columns(rows: AntibodyRows) -> dict[str, list[str]]:
    """What is held against others of its kind; "" where a row has none."""
    return {
        "cdr3": [find_cdr3(one) or "" for one in rows.heavy],
        "heavy": rows.chain("heavy"),
        "light": rows.chain("light"),
    }


def _nearest(mine: Sequence[str], theirs: Sequence[str], floor: float, empty: float = np.nan) -> FloatArray:
    """Identity of each sequence to the nearest of the others, or the floor; `empty` for "", NaN without others."""
    references = [one for one in theirs if one]
    if not references:
        return np.full(len(mine), np.nan)
    identity = np.nan_to_num(nearest_identities(mine, references, floor)[0], nan=floor)
    return np.where([one == "" for one in mine], empty, identity)
