"""Outputs beside training antibodies and known binders: what repeats, and what rules that learn nothing would write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...data import factorize, kmer_cosines, nearest_identities
from ...errors import DataError
from ...evaluation import FloatArray, Score, places_of
from ..rows import CHAINS, RESIDUES, AntibodyRows, Sampling, find_cdr3, mean_score

NOT_NEAR = 0.7  # identity below which no nearest chain is looked for; it stands for all that is lower
MAX_BINDERS = 100  # of one antigen that outputs are compared with, a seeded sample of more
RANDOM = "random residues"
SHUFFLED = "shuffled antibodies"
RETRIEVAL = "nearest-antigen retrieval"


def judge_copies(
    rows: AntibodyRows, training: AntibodyRows, sampling: Sampling
) -> tuple[dict[str, Score], dict[str, np.ndarray]]:
    """Counts how many of n outputs are distinct, and how many are copies of training antibodies.

    Args:
        sampling: its groups are those of `rows`.

    Returns:
        Scores:
            unique_pairs: distinct pairs of chains by outputs. Its interval resamples a row's share, 1 / how often its
                pair occurs.
            unique_cdr3: the same of CDR-H3, among outputs where the pattern finds one.
            memorised: share of outputs that are a training pair, both chains to the residue.
            nearest_heavy, nearest_cdr3: mean identity to the nearest of training.
        And `find_nearest`, row by row.

    Cost: as `find_nearest`.
    """
    nearest = find_nearest(rows, training)
    columns = {
        "unique_pairs": _unique_shares(rows.pairs),
        "unique_cdr3": _unique_shares([find_cdr3(one) for one in rows.heavy]),
        "memorised": nearest["is_copy"],
        "nearest_heavy": nearest["nearest_heavy"],
        "nearest_cdr3": nearest["nearest_cdr3"],
    }
    return {name: mean_score(values, sampling) for name, values in columns.items()}, nearest


def _unique_shares(values: Sequence[Any]) -> np.ndarray:
    """Returns 1 / how often each value occurs, NaN for None: the mean is distinct values by values.

    As a share, bool, where each occurs once: then resamples cannot tell how rare a repeat is.
    """
    counts = Counter(values)
    shares = np.array([np.nan if one is None else 1 / counts[one] for one in values], dtype=np.float64)
    is_distinct = shares == 1
    return is_distinct if len(shares) and is_distinct.all() else shares


def find_nearest(rows: AntibodyRows, training: AntibodyRows) -> dict[str, np.ndarray]:
    """Computes the identity of each output to the nearest training chain, and whether it is a copy; (n,) each.

    Returns:
        nearest_heavy: a chain that is less than 70 % identical to any counts as 70 %; nearest_cdr3, of heavy chains:
        without such a limit. NaN where the output, or all of training, lacks the sequence. is_copy: bool, whether both
        chains are those of one training pair.

    Cost: 0.1 s a distinct new pair for 12,000 training pairs; copies cost nothing, and noise little.
    """
    known = set(training.pairs)
    return {
        "nearest_heavy": _nearest(rows.chain("heavy"), training.chain("heavy"), NOT_NEAR),
        "nearest_cdr3": _nearest(_cdr3s(rows), _cdr3s(training), 0.0),
        "is_copy": np.array([pair in known for pair in rows.pairs], dtype=bool),
    }


def find_recovery(rows: AntibodyRows, held_out: AntibodyRows, seed: int = 0) -> FloatArray:
    """Computes the identity of every output's CDR-H3 to that of the held-out binder of its antigen that is most alike.

    More binders make a higher number likelier: compare only what was compared with the same ones, as the baselines are.

    Args:
        held_out: binders that training did not hold, with their antigens.
        seed: of the sample of an antigen's binders, where there are more than 100.

    Returns:
        (n,), NaN where the antigen has no held-out binder with a CDR-H3; 0 where the output has none.

    Cost: 10 us per output and binder of its antigen.
    """
    generator = np.random.default_rng(seed)
    mine = _cdr3s(rows)
    theirs = _cdr3s(held_out)
    asked = places_of(rows.antigens)
    found = np.full(len(rows), np.nan)
    for antigen, binders in places_of(held_out.antigens).items():
        chosen = binders if len(binders) <= MAX_BINDERS else generator.permutation(binders)[:MAX_BINDERS]
        places = asked.get(antigen, [])
        outputs = [mine[i] for i in places]
        found[places] = _nearest(outputs, [theirs[i] for i in chosen], 0.0, empty=0.0)
    return found


def _cdr3s(rows: AntibodyRows) -> list[str]:
    return [find_cdr3(one) or "" for one in rows.heavy]


def _nearest(mine: Sequence[str], theirs: Sequence[str], floor: float, empty: float = np.nan) -> FloatArray:
    """Computes the identity of each sequence to the nearest other, or the floor; `empty` for "", NaN without others."""
    references = [one for one in theirs if one]
    if not references:
        return np.full(len(mine), np.nan)
    identity = np.nan_to_num(nearest_identities(mine, references, floor), nan=floor)
    return np.where([one == "" for one in mine], empty, identity)


def make_baselines(antigens: Sequence[str], training: AntibodyRows, seed: int = 0) -> dict[str, AntibodyRows]:
    """Makes one antibody per row and rule, row by row as the model's outputs.

    "random residues": drawn at the training chains' frequencies, as long as a drawn pair's chains. "shuffled
    antibodies": a drawn training pair, whatever it binds. "nearest-antigen retrieval": a drawn pair of the training
    antigen that shares most 3-mers. Pairs are drawn without replacement until all were taken.

    Args:
        antigens: (n,) of the rows.
        training: pairs with the antigens that they bind.

    Raises:
        DataError: there is no training pair.

    Cost: seconds for 1,000 rows and 1,000 training antigens.
    """
    if not len(training):
        raise DataError("There are no training antibodies: baselines are made of them. Give the rows of train.")
    generator = np.random.default_rng(seed)
    lengths = training.select(_draw(len(training), len(antigens), generator))
    heavy, light = [_write_noise(lengths.chain(one), training.chain(one), generator) for one in CHAINS]
    shuffled = training.select(_draw(len(training), len(antigens), generator))
    members = places_of(training.antigens)
    number, distinct = factorize(antigens)
    known = [*members]
    nearest = kmer_cosines(distinct, known).argmax(axis=1)[number]  # of equals the first
    chosen = np.zeros(len(antigens), np.int64)
    for place, rows in places_of(nearest.tolist()).items():
        of_antigen = np.asarray(members[known[place]])
        chosen[rows] = of_antigen[_draw(len(of_antigen), len(rows), generator)]
    retrieved = training.select(chosen)
    return {
        RANDOM: AntibodyRows.of_columns(heavy, light, antigens),
        SHUFFLED: AntibodyRows.of_columns(shuffled.heavy, shuffled.light, antigens),
        RETRIEVAL: AntibodyRows.of_columns(retrieved.heavy, retrieved.light, antigens),
    }


def _write_noise(lengths: Sequence[str], chains: Sequence[str], generator: np.random.Generator) -> list[str]:
    """Draws residues at the frequencies of `chains`, as many as each of `lengths` has."""
    text = "".join(chains)
    letters = sorted(RESIDUES)
    counts = np.array([text.count(one) for one in letters], np.float64)
    frequencies = counts / counts.sum() if counts.sum() else np.full(len(letters), 1 / len(letters))
    return ["".join(generator.choice(letters, size=len(one), p=frequencies)) for one in lengths]


def _draw(num: int, size: int, generator: np.random.Generator) -> np.ndarray:
    """Draws `size` of `num` places, none a second time before all were taken."""
    rounds = [generator.permutation(num) for _ in range(-(-size // num))]
    return np.concatenate(rounds or [np.zeros(0, dtype=np.int64)])[:size]
