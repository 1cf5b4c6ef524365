"""How many outputs are antibodies, at three strengths that are never mixed up: form, patterns, numbering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...evaluation.scores import Score
from .motifs import find_motif_problems
from .numbering import NumberedDomain, Numberer, find_domain_problem
from .rows import CHAINS, AntibodyRows
from .scores import Sampling, mean_score
from .structure import find_structure_problems

MAX_NAMED = 5  # kinds of problems that a summary lists
LONGEST = {"heavy": 145, "light": 130}  # residues: no variable domain is longer
WITHOUT_NUMBERING = "anarcii was not asked: outputs were held against patterns of conserved residues only."


@dataclass(frozen=True)
class Domains:
    """Numbered domains of n rows, heavy and light; None where a chain is missing or no variable domain."""

    heavy: list[NumberedDomain | None]
    light: list[NumberedDomain | None]

    @classmethod
    def of(cls, rows: AntibodyRows, numberer: Numberer) -> Domains:
        """Numbers every distinct chain once, 0.12 s each."""
        both = numberer.number([*rows.chain("heavy"), *rows.chain("light")])
        return cls(both[: len(rows)], both[len(rows) :])


@dataclass(frozen=True)
class Validity:
    """Shares of n rows that pass, and what the others fail at.

    Attributes:
        well_formed: pairs of chains of the 20 residues. Shuffled residues pass.
        motif: these, with the conserved residues' pattern. A stand-in where numbering is not asked for.
        numbered: every chain is numbered as a variable domain of its type, whatever else it holds; None without
            numbering. Published numbers are of this kind.
        strict: numbered, with Cys23, Trp41, Cys104 and the J motif, a domain of plausible length and nothing else;
            None without numbering.
        problems: the most frequent reasons of the strictest check, with their numbers of rows.
        num_too_long: per chain, rows whose chain is longer than any variable domain.
        median_length_of_too_long: per chain, residues; None where there are none.
        is_valid: (n,) bool, of the strictest check that was made.
        cost: of numbering, see `Numberer.cost`.
    """

    well_formed: Score
    motif: Score
    numbered: Score | None
    strict: Score | None
    problems: list[tuple[str, int]]
    num_too_long: dict[str, int]
    median_length_of_too_long: dict[str, float | None]
    is_valid: np.ndarray
    cost: dict[str, Any] | None = None

    @property
    def decisive(self) -> Score:
        """The strictest share that was measured."""
        return self.strict or self.motif

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; without the row by row answer."""
        return {
            "well_formed": self.well_formed,
            "motif": self.motif,
            "numbered": self.numbered,
            "strict": self.strict,
            "problems": [list(one) for one in self.problems],
            "num_too_long": self.num_too_long,
            "median_length_of_too_long": self.median_length_of_too_long,
            "numbering_cost": self.cost,
            "note": None if self.strict else WITHOUT_NUMBERING,
        }


def judge_validity(
    rows: AntibodyRows, sampling: Sampling, numberer: Numberer | None = None, needs_light: bool = True
) -> Validity:
    """Checks each row's form, its conserved residues by pattern, and its domains where there is a `numberer`.

    Args:
        sampling: its units are those of these rows.
        numberer: None leaves numbering out: then nothing is called strict.
        needs_light: whether a heavy chain alone is no valid output.

    Cost: 30 us a row, and 0.24 s with numbering.
    """
    form = find_structure_problems(rows, needs_light)
    motif = [first or second for first, second in zip(form, find_motif_problems(rows))]
    numbered = strict = cost = None
    strictest = motif
    if numberer is not None:
        domains = Domains.of(rows, numberer)
        found = [domain_problems(rows, domains, row) for row in range(len(rows))]
        strictest = [first or second[0] for first, second in zip(form, found)]
        numbered = mean_score(np.array([not p and q[1] for p, q in zip(form, found)], dtype=bool), sampling)
        strict, cost = mean_score(_none(strictest), sampling), numberer.cost()
    counts = Counter(problem for problem in strictest if problem)
    lengths = {chain: np.array([len(one) for one in rows.chain(chain)]) for chain in CHAINS}
    too_long = {chain: values[values > LONGEST[chain]] for chain, values in lengths.items()}
    return Validity(
        mean_score(_none(form), sampling),
        mean_score(_none(motif), sampling),
        numbered,
        strict,
        counts.most_common(MAX_NAMED),
        {chain: len(values) for chain, values in too_long.items()},
        {chain: float(np.median(values)) if len(values) else None for chain, values in too_long.items()},
        _none(strictest),
        cost,
    )


def domain_problems(rows: AntibodyRows, domains: Domains, row: int) -> tuple[str | None, bool]:
    """The first strict problem of a row, and whether all its chains are numbered with the right chain type."""
    chains: list[tuple[str, NumberedDomain | None]] = [("heavy", domains.heavy[row])]
    if rows.light[row] is not None:
        chains.append(("light", domains.light[row]))
    problem = next(filter(None, (find_domain_problem(domain, chain) for chain, domain in chains)), None)
    types = {"heavy": "H", "light": "KL"}
    return problem, all(domain is not None and domain.chain_type in types[chain] for chain, domain in chains)


def _none(problems: Sequence[str | None]) -> np.ndarray:
    return np.array([problem is None for problem in problems], dtype=bool)
