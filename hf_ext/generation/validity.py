"""How many outputs are antibodies, by their form and by the pattern of conserved residues."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from ..data.proteins import STANDARD
from .rows import AntibodyRows, Sampling, mean_score

RESIDUES = frozenset(STANDARD)
MAX_NAMED = 5  # kinds of problems that a summary lists
MAX_OUTSIDE = 10  # residues beyond the domain's ends: a constant region, a second domain or a leader has more
J_STARTS = {"heavy": "W", "light": "F"}  # of the J motif, which tells heavy from light
# Two cysteines with a tryptophan between them at the distances of an immunoglobulin fold, and the J motif. What stands
# between the second cysteine and that motif is CDR3 as IMGT bounds it (positions 105 to 117). A pattern neither knows
# gaps nor framework residues, and misses chains with rare insertions.
_FOLD = r"^(?P<before>.{{12,40}}?)C.{{6,22}}?W.{{46,80}}?C(?P<cdr3>[A-Z]{{1,45}}?){start}G.G(?P<after>.*)$"
_PATTERNS = {chain: re.compile(_FOLD.format(start=start)) for chain, start in J_STARTS.items()}
_USUAL = {"before": 22, "after": 7}  # residues before Cys23 and after the J motif of a whole domain


def judge_validity(
    rows: AntibodyRows, sampling: Sampling, needs_light: bool = True
) -> tuple[dict[str, Any], np.ndarray]:
    """Checks each row's form, and its conserved residues by pattern.

    Args:
        sampling: its units are those of these rows.
        needs_light: whether a heavy chain alone is no valid output.

    Returns:
        JSON-able:
            well_formed: share of pairs of chains of the 20 residues. Shuffled residues pass.
            valid: of these, with the conserved residues' pattern.
            problems: the most frequent faults, with their numbers of rows.
        And (n,) bool, which rows are valid.

    Cost: 30 us a row.
    """
    problems = find_problems(rows, needs_light)
    well_formed, valid = (
        np.array([one is None for one in found], dtype=bool)
        for found in (find_form_problems(rows, needs_light), problems)
    )
    return {
        "well_formed": mean_score(well_formed, sampling),
        "valid": mean_score(valid, sampling),
        "problems": Counter(filter(None, problems)).most_common(MAX_NAMED),
    }, valid


def find_problems(rows: AntibodyRows, needs_light: bool = True) -> list[str | None]:
    """The first fault of each row, None where it is a valid antibody: of its form, then of its chains."""
    form = find_form_problems(rows, needs_light)
    return [first or second for first, second in zip(form, _by_chain(rows, _find_pattern_problem))]


def find_form_problems(rows: AntibodyRows, needs_light: bool = True) -> list[str | None]:
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


def _find_pattern_problem(chain: str, sequence: str) -> str | None:
    found = _PATTERNS[chain].match(sequence)
    if found is None:
        return f"{chain} chain without the pattern Cys-Trp-Cys and {J_STARTS[chain]}GxG"
    for end, usual in _USUAL.items():
        if len(found[end]) - usual > MAX_OUTSIDE:
            return f"{chain} chain with more than {MAX_OUTSIDE} residues {end} its variable domain"
    return None


def find_cdr3(heavy: str) -> str | None:
    """The residues between the second conserved cysteine and the J motif; None where the pattern is not found."""
    found = _PATTERNS["heavy"].match(heavy)
    return None if found is None else found["cdr3"]
