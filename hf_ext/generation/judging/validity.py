"""How many outputs are antibodies, at three strengths that are never mixed up: form, patterns, numbering."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...evaluation.scores import Score
from .numbering import J_STARTS, LENGTHS, MAX_OUTSIDE, RESIDUES, Domains, Numberer
from .rows import CHAINS, AntibodyRows
from .scores import Sampling, mean_score

MAX_NAMED = 5  # kinds of problems that a summary lists
WITHOUT_NUMBERING = "Nothing was numbered: outputs were held against patterns of conserved residues only."
# Two cysteines with a tryptophan between them at the distances of an immunoglobulin fold, and the J motif. What stands
# between the second cysteine and that motif is CDR3 as IMGT bounds it (positions 105 to 117). A pattern neither knows
# gaps nor framework residues, and misses chains with rare insertions: so it is never called strict.
_FOLD = r"^(?P<before>.{{12,40}}?)C.{{6,22}}?W.{{46,80}}?C(?P<cdr3>[A-Z]{{1,45}}?){start}G.G(?P<after>.*)$"
_PATTERNS = {chain: re.compile(_FOLD.format(start=start)) for chain, start in J_STARTS.items()}
_USUAL = {"before": 22, "after": 7}  # residues before Cys23 and after the J motif of a whole domain


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
        numbered_by: the library; None without numbering.
    """

    well_formed: Score
    motif: Score
    numbered: Score | None
    strict: Score | None
    problems: list[tuple[str, int]]
    num_too_long: dict[str, int]
    median_length_of_too_long: dict[str, float | None]
    is_valid: np.ndarray
    numbered_by: str | None = None

    @property
    def decisive(self) -> Score:
        """The strictest share that was measured."""
        return self.strict or self.motif

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; without the row by row answer."""
        told = {name: value for name, value in vars(self).items() if name != "is_valid"}
        problems = [list(one) for one in self.problems]
        return {**told, "problems": problems, "note": None if self.strict else WITHOUT_NUMBERING}


def judge_validity(
    rows: AntibodyRows, sampling: Sampling, numberer: Numberer | None = None, needs_light: bool = True
) -> Validity:
    """Checks each row's form, its conserved residues by pattern, and its domains where there is a `numberer`.

    Args:
        sampling: its units are those of these rows.
        numberer: None leaves numbering out: then nothing is called strict.
        needs_light: whether a heavy chain alone is no valid output.

    Cost: 30 us a row, and what `Numberer` costs for two chains.
    """

    def share(passed: Sequence[bool]) -> Score:
        return mean_score(np.array(passed, dtype=bool), sampling)

    form = find_structure_problems(rows, needs_light)
    motif = strictest = [first or second for first, second in zip(form, find_motif_problems(rows))]
    numbered = strict = None
    if numberer is not None:
        domains = Domains.of(rows, numberer)
        strictest = [first or second for first, second in zip(form, domains.find_problems(rows))]
        numbered = share([not problem and found for problem, found in zip(form, domains.are_numbered(rows))])
        strict = share([not problem for problem in strictest])
    lengths = {chain: np.array([len(one) for one in rows.chain(chain)]) for chain in CHAINS}
    too_long = {chain: values[values > LENGTHS[chain][1]] for chain, values in lengths.items()}
    return Validity(
        share([not problem for problem in form]),
        share([not problem for problem in motif]),
        numbered,
        strict,
        Counter(problem for problem in strictest if problem).most_common(MAX_NAMED),
        {chain: len(values) for chain, values in too_long.items()},
        {chain: float(np.median(values)) if len(values) else None for chain, values in too_long.items()},
        np.array([not problem for problem in strictest], dtype=bool),
        None if numberer is None else numberer.library,
    )


def find_structure_problems(rows: AntibodyRows, needs_light: bool = True) -> list[str | None]:
    """What is wrong with the form of each row; None where it is a pair of chains of the 20 residues.

    This passes for any string of residues: `find_motif_problems` and `Domains` say whether it is an antibody.

    Args:
        needs_light: whether a heavy chain alone is a problem.
    """
    found = []
    for heavy, light, malformed in zip(rows.heavy, rows.light, rows.malformed):
        missing = "no light chain" if needs_light else None
        light_problem = missing if light is None else _letter_problem("light", light)
        found.append(malformed or _letter_problem("heavy", heavy) or light_problem)
    return found


def _letter_problem(chain: str, sequence: str) -> str | None:
    if not sequence:
        return f"no {chain} chain"
    foreign = sorted(set(sequence) - RESIDUES)
    return f"{chain} chain with {', '.join(foreign)}" if foreign else None


def find_motif_problems(rows: AntibodyRows) -> list[str | None]:
    """Why each row cannot be a pair of single variable domains as far as patterns tell; a missing light chain may be.

    Cost: 10 us a chain.
    """
    return [
        _pattern_problem("heavy", heavy) or (None if light is None else _pattern_problem("light", light))
        for heavy, light in rows.pairs
    ]


def _pattern_problem(chain: str, sequence: str) -> str | None:
    found = _PATTERNS[chain].match(sequence)
    if found is None:
        return f"{chain} chain without the pattern Cys-Trp-Cys and {J_STARTS[chain]}GxG"
    for end, usual in _USUAL.items():
        if len(found[end]) - usual > MAX_OUTSIDE:
            return f"{chain} chain with more than {MAX_OUTSIDE} residues {end} its variable domain"
    return None


def find_cdr3(sequence: str, chain: str = "heavy") -> str | None:
    """The residues between the second conserved cysteine and the J motif; None where the pattern is not found."""
    found = _PATTERNS[chain].match(sequence)
    return None if found is None else found["cdr3"]
