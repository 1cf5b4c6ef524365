"""How many outputs are antibodies, by form, by patterns and by numbering (never mixed up), and how human they are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...evaluation._arrays import FloatArray
from ...evaluation.scores import Score
from ...optional import require
from .numbering import J_STARTS, LENGTHS, MAX_OUTSIDE, RESIDUES, Numberer
from .rows import AntibodyRows, Sampling, mean_score

MAX_NAMED = 5  # kinds of problems that a summary lists
PEPTIDE = 9  # residues, of OASis
# Two cysteines with a tryptophan between them at the distances of an immunoglobulin fold, and the J motif. What stands
# between the second cysteine and that motif is CDR3 as IMGT bounds it (positions 105 to 117). A pattern neither knows
# gaps nor framework residues, and misses chains with rare insertions: so it is never called strict.
_FOLD = r"^(?P<before>.{{12,40}}?)C.{{6,22}}?W.{{46,80}}?C(?P<cdr3>[A-Z]{{1,45}}?){start}G.G(?P<after>.*)$"
_PATTERNS = {chain: re.compile(_FOLD.format(start=start)) for chain, start in J_STARTS.items()}
_USUAL = {"before": 22, "after": 7}  # residues before Cys23 and after the J motif of a whole domain


def judge_validity(
    rows: AntibodyRows, sampling: Sampling, numberer: Numberer | None = None, needs_light: bool = True
) -> tuple[dict[str, Any], np.ndarray]:
    """Checks each row's form, its conserved residues by pattern, and its domains where there is a `numberer`.

    Args:
        sampling: its units are those of these rows.
        numberer: None leaves numbering out: then nothing is called strict.
        needs_light: whether a heavy chain alone is no valid output.

    Returns:
        JSON-able:
            well_formed: share of pairs of chains of the 20 residues. Shuffled residues pass.
            motif: of these, with the conserved residues' pattern. A stand-in where numbering is not asked for.
            numbered: every chain is numbered as a variable domain of its type, whatever else it holds; None without
                numbering. Published numbers are of this kind.
            strict: numbered, with Cys23, Trp41, Cys104 and the J motif, a domain of plausible length and nothing else;
                None without numbering.
            problems: the most frequent reasons of the strictest check, with their numbers of rows.
            num_too_long: per chain, rows whose chain is longer than any variable domain.
            median_length_of_too_long: per chain, residues; None where there are none.
            numbered_by: the library; None without numbering.
        And (n,) bool, what passes the strictest check that was made.

    Cost: 30 us a row, and what `Numberer` costs for two chains.
    """

    def share(problems: Sequence[str | None]) -> Score:
        return mean_score(np.array([not one for one in problems], dtype=bool), sampling)

    form = find_structure_problems(rows, needs_light)
    motif = strictest = find_problems(rows, None, needs_light)
    numbered = strict = None
    if numberer is not None:
        strictest = find_problems(rows, numberer, needs_light)
        types = _by_chain(rows, numberer.find_type_problem)
        numbered, strict = share([first or second for first, second in zip(form, types)]), share(strictest)
    too_long = {
        chain: [len(one) for one in rows.chain(chain) if len(one) > longest] for chain, (_, longest) in LENGTHS.items()
    }
    scores = {
        "well_formed": share(form),
        "motif": share(motif),
        "numbered": numbered,
        "strict": strict,
        "problems": Counter(filter(None, strictest)).most_common(MAX_NAMED),
        "num_too_long": {chain: len(lengths) for chain, lengths in too_long.items()},
        "median_length_of_too_long": {
            chain: float(np.median(lengths)) if lengths else None for chain, lengths in too_long.items()
        },
        "numbered_by": None if numberer is None else numberer.library,
    }
    return scores, np.array([not one for one in strictest], dtype=bool)


def find_problems(rows: AntibodyRows, numberer: Numberer | None = None, needs_light: bool = True) -> list[str | None]:
    """The first fault of each row, None where it is a valid antibody: of its form, then of its chains.

    With a `numberer` a chain has to be one whole variable domain and nothing else; without one, to have the pattern of
    conserved residues. See `judge_validity` for the arguments and the cost.
    """
    if numberer is not None:
        numberer.number([*rows.heavy, *rows.chain("light")])
    find = find_pattern_problem if numberer is None else numberer.find_domain_problem
    form = find_structure_problems(rows, needs_light)
    return [first or second for first, second in zip(form, _by_chain(rows, find))]


def find_structure_problems(rows: AntibodyRows, needs_light: bool = True) -> list[str | None]:
    """What is wrong with the form of each row; None where it is a pair of chains of the 20 residues, whatever these."""
    no_light = ["no light chain" if one is None and needs_light else None for one in rows.light]
    chains = _by_chain(rows, _find_letter_problem)
    return [first or second or third for first, second, third in zip(rows.malformed, chains, no_light)]


def _by_chain(rows: AntibodyRows, find: Callable[[str, str], str | None]) -> list[str | None]:
    """What `find` says of each row's heavy chain, else of its light one; a missing light chain has no fault."""
    return [find("heavy", one) or (None if other is None else find("light", other)) for one, other in rows.pairs]


def _find_letter_problem(chain: str, sequence: str) -> str | None:
    if not sequence:
        return f"no {chain} chain"
    foreign = sorted(set(sequence) - RESIDUES)
    return f"{chain} chain with {', '.join(foreign)}" if foreign else None


def find_pattern_problem(chain: str, sequence: str) -> str | None:
    """Why a "heavy" or "light" chain cannot be a single variable domain as far as patterns tell. Cost: 10 us."""
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


class Humanness:
    """OASis: the share of a pair's 9-mers that at least 10 % of the human repertoires in Observed Antibody Space hold.

    Source: D. Prihoda et al., BioPhi, mAbs 14 (2022), 2020203; the peptides are those that promb (MIT) ships.

    Raises:
        MissingDependencyError: promb is not installed, or does not import.

    Cost: 7 to 30 s and 0.8 GB for the first score, then 0.1 ms a chain.
    """

    def __init__(self) -> None:
        self._promb: Any = require("promb", "humanness", "OASis humanness")
        self._database: Any = None

    def score(self, rows: AntibodyRows) -> FloatArray:
        """(n,), of both chains together; 0 for a pair that is too short to hold a peptide."""
        if self._database is None:
            self._database = self._promb.init_db("human-oas", verbose=False)
        shares = np.zeros(len(rows))
        for row, pair in enumerate(rows.pairs):
            peptides = [one[i : i + PEPTIDE] for one in filter(None, pair) for i in range(len(one) - PEPTIDE + 1)]
            shares[row] = np.mean([self._database.contains(one) for one in peptides]) if peptides else 0.0
        return shares
