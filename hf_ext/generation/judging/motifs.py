"""Conserved residues of a variable domain by pattern alone: a stand-in for numbering, and never called strict.

Two cysteines with a tryptophan between them at the distances of an immunoglobulin fold, and the J motif: WGxG of a
heavy chain, FGxG of a light one. What stands between the second cysteine and that motif is CDR3 as IMGT bounds it
(positions 105 to 117). A pattern neither knows gaps nor framework residues, and misses chains with rare insertions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .rows import AntibodyRows

MAX_OUTSIDE = 10  # residues beyond the domain's ends: a constant region, a second domain or a leader has more
_FOLD = r"^(?P<before>.{12,40}?)C.{6,22}?W.{46,80}?C(?P<cdr3>[A-Z]{1,45}?)"
_MOTIFS = {
    "heavy": re.compile(_FOLD + r"WG.G(?P<after>.*)$"),
    "light": re.compile(_FOLD + r"FG.G(?P<after>.*)$"),
}
_USUAL = {"before": 22, "after": 7}  # residues before Cys23 and after the J motif of a whole domain


@dataclass(frozen=True)
class MotifMatch:
    """The third CDR, and how many residues stand before the first cysteine and after the J motif."""

    cdr3: str
    num_before: int
    num_after: int


def match_motif(sequence: str, chain: str) -> MotifMatch | None:
    """The pattern of a "heavy" or "light" chain in `sequence`; None where it has none."""
    found = _MOTIFS[chain].match(sequence)
    if found is None:
        return None
    return MotifMatch(found["cdr3"], len(found["before"]), len(found["after"]))


def find_cdr3(sequence: str, chain: str = "heavy") -> str | None:
    """The residues between the second conserved cysteine and the J motif; None where the pattern is not found."""
    found = match_motif(sequence, chain)
    return None if found is None else found.cdr3


def find_motif_problems(rows: AntibodyRows) -> list[str | None]:
    """Why each row cannot be a pair of single variable domains as far as patterns tell; a missing light chain may be.

    Cost: 10 us a chain.
    """
    return [_pair_problem(*pair) for pair in rows.pairs]


def _pair_problem(heavy: str, light: str | None) -> str | None:
    return _problem("heavy", heavy) or (None if light is None else _problem("light", light))


def _problem(chain: str, sequence: str) -> str | None:
    found = match_motif(sequence, chain)
    if found is None:
        return f"{chain} chain without the pattern Cys-Trp-Cys and {'WGxG' if chain == 'heavy' else 'FGxG'}"
    for end, count in (("before", found.num_before), ("after", found.num_after)):
        if count - _USUAL[end] > MAX_OUTSIDE:
            return f"{chain} chain with more than {MAX_OUTSIDE} residues {end} its variable domain"
    return None
