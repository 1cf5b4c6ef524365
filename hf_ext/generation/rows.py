"""Antibodies with the antigen that each is for: are they valid, and means over them with intervals by antigen."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..data import STANDARD, AntibodyPair
from ..evaluation import (
    MetricValue,
    PairedComparison,
    ResamplingGroups,
    Score,
    as_column,
    as_pair,
    check_groups,
    compare_paired,
    group_facts,
    make_score,
    score_mean,
)

CHAINS = ("heavy", "light")
CONFIDENCE = 0.95  # of all intervals
RESIDUES = frozenset(STANDARD)
MAX_OUTSIDE = 10  # residues beyond the domain's ends: a constant region, a second domain or a leader has more
J_STARTS = {"heavy": "W", "light": "F"}  # of the J motif, which tells heavy from light
# Two cysteines with a tryptophan between them at the distances of an immunoglobulin fold, and the J motif. What stands
# between the second cysteine and that motif is CDR3 as IMGT bounds it (positions 105 to 117). A pattern neither knows
# gaps nor framework residues, and misses chains with rare insertions.
_FOLD = r"^(?P<before>.{{12,40}}?)C.{{6,22}}?W.{{46,80}}?C(?P<cdr3>[A-Z]{{1,45}}?){start}G.G(?P<after>.*)$"
_PATTERNS = {chain: re.compile(_FOLD.format(start=start)) for chain, start in J_STARTS.items()}
_USUAL = {"before": 22, "after": 7}  # residues before Cys23 and after the J motif of a whole domain


@dataclass(frozen=True)
class AntibodyRows:
    """n antibodies as columns of equal length.

    Attributes:
        heavy: capital letters; "" where there is none.
        light: None where the antibody is a heavy chain alone.
        antigens: what each was written for, or is known to bind.
        malformed: what was wrong with the tokens it was decoded from; None where nothing was.
    """

    heavy: tuple[str, ...]
    light: tuple[str | None, ...]
    antigens: tuple[str, ...]
    malformed: tuple[str | None, ...]

    @classmethod
    def of_pairs(cls, pairs: Sequence[AntibodyPair], antigens: Sequence[str]) -> AntibodyRows:
        """Builds rows from what a generator wrote, row by row as `antigens`."""
        heavy = tuple(pair.heavy for pair in pairs)
        light = tuple(pair.light or None for pair in pairs)
        malformed = tuple("; ".join(pair.malformed) or None for pair in pairs)
        return cls(heavy, light, tuple(antigens), malformed)

    @classmethod
    def of_columns(cls, heavy: Sequence[str], light: Sequence[str | None], antigens: Sequence[str]) -> AntibodyRows:
        """Builds rows from columns of equal length."""
        known = tuple(one or None for one in light)
        return cls(tuple(heavy), known, tuple(antigens), (None,) * len(heavy))

    def __len__(self) -> int:
        return len(self.heavy)

    @property
    def pairs(self) -> list[tuple[str, str | None]]:
        """(heavy, light) of each row."""
        return list(zip(self.heavy, self.light))

    def chain(self, name: str) -> list[str]:
        """Returns the "heavy" or "light" chains, "" where there is none."""
        return [one or "" for one in getattr(self, name)]

    def select(self, rows: Any) -> AntibodyRows:
        """Selects some rows: (n,) bool, or row numbers."""
        asked = np.asarray(rows)
        if not asked.size:
            asked = asked.astype(np.int64)
        chosen = np.arange(len(self))[asked]
        columns = [tuple(column[i] for i in chosen) for column in vars(self).values()]
        return AntibodyRows(*columns)


@dataclass(frozen=True)
class Sampling:
    """How intervals are drawn.

    Attributes:
        groups: rows that were held out together (an antigen, or its cluster), row by row as what is scored.
        num_resamples: 2 or more.
        seed: of the draws, 0 or more.
    """

    groups: ResamplingGroups
    num_resamples: int = 1000
    seed: int = 0

    def of_rows(self, chosen: np.ndarray) -> dict[str, Any]:
        """Returns what functions of `evaluation` take to draw intervals of some rows, (n,) bool."""
        groups = self.groups.select(chosen)
        return {"groups": groups, "num_resamples": self.num_resamples, "seed": self.seed, "confidence": CONFIDENCE}


def mean_score(values: Any, sampling: Sampling) -> Score:
    """Averages rows, with the interval of further groups.

    Rows without a value (NaN) are left out, and `n` does not count them. A share that is 0 or 1 in all rows has the
    exact binomial interval of as many tries as there are effective groups: resamples of it would all be the same.

    Args:
        values: (n,) numbers, or bool for a share.
        sampling: its groups are those of these n rows.

    Raises:
        DataError: groups of another number of rows.

    Cost: 60 ns per drawn row.
    """
    is_share = np.asarray(values).dtype == bool
    column = as_column(values, "values")
    check_groups(sampling.groups, len(column))
    has_value = ~np.isnan(column)
    drawn = sampling.of_rows(has_value)
    if not has_value.any():
        return make_score(MetricValue(math.nan, "no row has a value"), np.empty(0), 0, CONFIDENCE, drawn["groups"])
    column = column[has_value]
    return score_mean(column == 1 if is_share else column, are_rows_groups=True, **drawn)


def by_groups(score: Score, groups: ResamplingGroups) -> Score:
    """Scores by groups of one row each, which are taken for rows elsewhere and trusted however few: here for groups."""
    return {**score, **group_facts(groups, score["n"]), "is_trusted": groups.are_enough}


def compare_means(before: Any, after: Any, sampling: Sampling, num_tokens: Any = None) -> PairedComparison:
    """Compares means on the same rows: whether that of `after` is better than that of `before`, and by how much.

    Args:
        before, after: (n,) numbers of which more is better. Rows where either has no value (NaN) are left out of both.
        sampling: its groups are those of these n rows.
        num_tokens: (n,) tokens of each row; then `before` and `after` are summed losses, and less per token is better.

    Raises:
        DataError: other numbers of rows.

    Cost: as `compare_paired`.
    """
    earlier, later = as_pair(before, after)
    check_groups(sampling.groups, len(earlier))
    has_both = ~(np.isnan(earlier) | np.isnan(later))
    drawn = sampling.of_rows(has_both)
    weights = np.ones(len(earlier)) if num_tokens is None else as_column(num_tokens, "num_tokens")
    metric = "accuracy" if num_tokens is None else "token_loss"
    compared = compare_paired(weights[has_both], earlier[has_both], later[has_both], metric, **drawn)
    # It takes groups of one row each for rows, which it trusts however few they are; here they are antigens.
    return replace(compared, **group_facts(drawn["groups"], compared.n))


# --- validity: by form, and by the pattern of conserved residues ------------------------------------------------------


def find_problems(rows: AntibodyRows, needs_light: bool = True) -> list[str | None]:
    """Finds the first fault of each row, None where it is a valid antibody: of its form, then of its chains."""
    form = find_form_problems(rows, needs_light)
    return [first or second for first, second in zip(form, _by_chain(rows, _find_pattern_problem))]


def find_form_problems(rows: AntibodyRows, needs_light: bool) -> list[str | None]:
    """Finds what is wrong with the form of each row; None where it is a pair of chains of the 20 residues."""
    no_light = ["no light chain" if one is None and needs_light else None for one in rows.light]
    chains = _by_chain(rows, _find_letter_problem)
    return [first or second or third for first, second, third in zip(rows.malformed, chains, no_light)]


def _by_chain(rows: AntibodyRows, find: Callable[[str, str], str | None]) -> list[str | None]:
    """Returns what `find` says of each row's heavy chain, else of its light one; a missing light chain has no fault."""
    found = []
    for heavy, light in rows.pairs:
        problem = find("heavy", heavy)
        if problem is None and light is not None:
            problem = find("light", light)
        found.append(problem)
    return found


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
    """Finds the residues between the second conserved cysteine and the J motif; None where the pattern is not found."""
    found = _PATTERNS["heavy"].match(heavy)
    return None if found is None else found["cdr3"]
