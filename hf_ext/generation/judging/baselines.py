"""What a generator must beat: antibodies for the same antigens from three rules that learn nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...data.near_copies import kmer_cosines
from ...errors import DataError
from ...evaluation._arrays import FloatArray
from .numbering import RESIDUES
from .rows import AntibodyRows

RANDOM = "random residues"
SHUFFLED = "shuffled antibodies"
RETRIEVAL = "nearest-antigen retrieval"
BASELINES = (RANDOM, SHUFFLED, RETRIEVAL)
QUERIES_PER_BLOCK = 256


@dataclass(frozen=True)
class NearestAntigens:
    """For each asked antigen the most similar one of training.

    Attributes:
        antigens: (n,) of training.
        similarity: (n,) cosine of 3-mer counts: 1 for equal ones, about 0.05 for unrelated ones of 300 residues.
    """

    antigens: tuple[str, ...]
    similarity: FloatArray


def make_baselines(antigens: Sequence[str], training: AntibodyRows, seed: int = 0) -> dict[str, AntibodyRows]:
    """One antibody per row and rule, row by row as the model's outputs.

    "random residues": drawn at the training chains' frequencies, as long as a drawn pair's chains. "shuffled
    antibodies": a drawn training pair, whatever it binds. "nearest-antigen retrieval": a drawn pair of the training
    antigen that is most similar. Pairs are drawn without replacement until all were taken.

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
    return {
        RANDOM: _random_residues(antigens, training, generator),
        SHUFFLED: _take(training, _draw(len(training), len(antigens), generator), antigens),
        RETRIEVAL: _retrieve(antigens, training, generator),
    }


def find_nearest_antigens(antigens: Sequence[str], known: Sequence[str]) -> NearestAntigens:
    """The antigen among `known` that shares most 3-mers with each of `antigens`, by cosine; of equals the first.

    Raises:
        DataError: nothing is known.
    """
    references, distinct = list(dict.fromkeys(known)), list(dict.fromkeys(antigens))
    if not references:
        raise DataError("There are no training antigens to look for similar ones among.")
    found: dict[str, tuple[str, float]] = {}
    for start in range(0, len(distinct), QUERIES_PER_BLOCK):
        block = distinct[start : start + QUERIES_PER_BLOCK]
        cosine = kmer_cosines(block, references)
        nearest = np.argmax(cosine, axis=1)
        found.update(
            (one, (references[place], float(row[place]))) for one, place, row in zip(block, nearest.tolist(), cosine)
        )
    return NearestAntigens(tuple(found[one][0] for one in antigens), np.array([found[one][1] for one in antigens]))


def _random_residues(antigens: Sequence[str], training: AntibodyRows, generator: np.random.Generator) -> AntibodyRows:
    drawn = _draw(len(training), len(antigens), generator)
    chains: dict[str, list[str]] = {}
    for chain in ("heavy", "light"):
        column = training.chain(chain)
        text = np.frombuffer("".join(column).encode("ascii", "replace"), dtype=np.uint8)
        letters = np.array(sorted(RESIDUES))
        counts = np.bincount(text, minlength=256)[[ord(one) for one in letters]].astype(np.float64)
        shares = counts / counts.sum() if counts.sum() else np.full(len(letters), 1 / len(letters))
        chains[chain] = ["".join(generator.choice(letters, size=len(column[row]), p=shares)) for row in drawn]
    return AntibodyRows.of_columns(chains["heavy"], list(chains["light"]), antigens)


def _retrieve(antigens: Sequence[str], training: AntibodyRows, generator: np.random.Generator) -> AntibodyRows:
    members: dict[str, list[int]] = {}
    for row, antigen in enumerate(training.antigens):
        members.setdefault(antigen, []).append(row)
    nearest = find_nearest_antigens(antigens, list(members)).antigens
    asked: dict[str, list[int]] = {}
    for row, antigen in enumerate(nearest):
        asked.setdefault(antigen, []).append(row)
    chosen = np.zeros(len(antigens), dtype=np.int64)
    for antigen, rows in asked.items():
        chosen[rows] = np.asarray(members[antigen])[_draw(len(members[antigen]), len(rows), generator)]
    return _take(training, chosen, antigens)


def _draw(num: int, size: int, generator: np.random.Generator) -> np.ndarray:
    """`size` of `num` places, none a second time before all were taken."""
    rounds = [generator.permutation(num) for _ in range(-(-size // num))]
    return np.concatenate(rounds or [np.zeros(0, dtype=np.int64)])[:size]


def _take(training: AntibodyRows, chosen: np.ndarray, antigens: Sequence[str]) -> AntibodyRows:
    """Some training pairs, as if they had been written for `antigens`."""
    taken = training.select(chosen)
    return AntibodyRows.of_columns(taken.heavy, taken.light, antigens)
