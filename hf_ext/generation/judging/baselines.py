"""What a generator must beat: antibodies for the same antigens from three rules that learn nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...data.near_copies import kmer_cosines
from ...errors import DataError
from .numbering import RESIDUES
from .rows import CHAINS, AntibodyRows, places_of

RANDOM = "random residues"
SHUFFLED = "shuffled antibodies"
RETRIEVAL = "nearest-antigen retrieval"
QUERIES_PER_BLOCK = 256


def make_baselines(antigens: Sequence[str], training: AntibodyRows, seed: int = 0) -> dict[str, AntibodyRows]:
    """One antibody per row and rule, row by row as the model's outputs.

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
    noise = {chain: _write_noise(lengths.chain(chain), training.chain(chain), generator) for chain in CHAINS}
    shuffled = training.select(_draw(len(training), len(antigens), generator))
    members = places_of(training.antigens)
    chosen = np.zeros(len(antigens), np.int64)
    for antigen, rows in places_of(find_nearest_antigens(antigens, [*members])).items():
        chosen[rows] = np.asarray(members[antigen])[_draw(len(members[antigen]), len(rows), generator)]
    retrieved = training.select(chosen)
    return {
        RANDOM: AntibodyRows.of_columns(noise["heavy"], noise["light"], antigens),
        SHUFFLED: AntibodyRows.of_columns(shuffled.heavy, shuffled.light, antigens),
        RETRIEVAL: AntibodyRows.of_columns(retrieved.heavy, retrieved.light, antigens),
    }


def find_nearest_antigens(antigens: Sequence[str], known: Sequence[str]) -> list[str]:
    """(n,) the one of distinct `known` antigens that shares most 3-mers with each, by cosine; of equals the first."""
    distinct = list(dict.fromkeys(antigens))
    blocks = (distinct[start : start + QUERIES_PER_BLOCK] for start in range(0, len(distinct), QUERIES_PER_BLOCK))
    nearest = [place for block in blocks for place in kmer_cosines(block, known).argmax(axis=1)]
    found = {antigen: known[place] for antigen, place in zip(distinct, nearest)}
    return [found[antigen] for antigen in antigens]


def _write_noise(lengths: Sequence[str], chains: Sequence[str], generator: np.random.Generator) -> list[str]:
    """Residues at the frequencies of `chains`, as many as each of `lengths` has."""
    text, letters = "".join(chains), sorted(RESIDUES)
    counts = np.array([text.count(one) for one in letters], np.float64)
    shares = counts / counts.sum() if counts.sum() else np.full(len(letters), 1 / len(letters))
    return ["".join(generator.choice(letters, size=len(one), p=shares)) for one in lengths]


def _draw(num: int, size: int, generator: np.random.Generator) -> np.ndarray:
    """`size` of `num` places, none a second time before all were taken."""
    rounds = [generator.permutation(num) for _ in range(-(-size // num))]
    return np.concatenate(rounds or [np.zeros(0, dtype=np.int64)])[:size]
