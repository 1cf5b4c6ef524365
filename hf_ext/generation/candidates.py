"""Sampled antibodies as candidates: duplicates counted, faults named, scores beside them, ranked within an antigen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.antibodies import AntibodyPair
from ..data.near_copies import nearest_identities
from ..evaluation._arrays import FloatArray
from .judging.discriminator import Discriminator
from .judging.numbering import Numberer
from .judging.rows import AntibodyRows
from .judging.validity import find_cdr3, find_problems
from .sampling import SampledPair

NUMBERING, PATTERN = "numbering", "pattern"
COLLAPSED_BELOW = 0.5  # distinct by drawn
DIGITS = 4  # of a log-probability; further ones change with the batch
COLUMNS = ("rank", "generated_heavy", "generated_light", "copies", "log_probability", "valid", "problem", "checked_by")
OPTIONAL = (
    *("cdr_h3", "asked_affinity", "predicted_affinity"),
    *("nearest_training_heavy", "nearest_training_light", "nearest_training_row", "is_training_copy"),
)


@dataclass(frozen=True)
class Candidate:
    """A distinct antibody of one antigen.

    Attributes:
        request: place of the antigen among those asked for.
        copies: how often it was drawn.
        log_probability: see `SampledPair`; where ways to write it differ, of the likeliest.
    """

    request: int
    pair: AntibodyPair
    copies: int
    log_probability: float


@dataclass(frozen=True)
class NearestTraining:
    """The nearest training chains of n candidates.

    Attributes:
        heavy, light: (n,) identity, 0 to 1; NaN where a candidate, or all of training, lacks the chain.
        row: (n,) source row of the nearest heavy chain; 0 where there is none.
        is_copy: (n,) bool, both chains are those of one training antibody to the residue.
    """

    heavy: FloatArray
    light: FloatArray
    row: np.ndarray
    is_copy: np.ndarray


@dataclass(frozen=True)
class Scores:
    """What is said about n candidates, row by row; None for what was not asked.

    Attributes:
        problems: the first fault; None where a candidate is a valid antibody as far as `checked_by` tells.
        checked_by: "numbering", or "pattern" of conserved residues where numbering was not asked for.
        affinities: (n,) predicted, label units; NaN where the discriminator cannot read a candidate.
    """

    problems: list[str | None]
    checked_by: str
    nearest: NearestTraining | None = None
    affinities: FloatArray | None = None


def collect(found: Sequence[Sequence[SampledPair]]) -> list[Candidate]:
    """The distinct antibodies of each antigen, in the order in which they were drawn; malformed ones too."""
    candidates = []
    for request, samples in enumerate(found):
        by_pair: dict[AntibodyPair, list[float]] = {}
        for one in samples:
            by_pair.setdefault(one.pair, []).append(one.log_probability)
        candidates += [Candidate(request, pair, len(known), max(known)) for pair, known in by_pair.items()]
    return candidates


def as_rows(candidates: Sequence[Candidate], antigens: Sequence[str]) -> AntibodyRows:
    """For the judges; `antigens` as they were asked for."""
    malformed = ["; ".join(one.pair.malformed) or None for one in candidates]
    return AntibodyRows.of([one.pair for one in candidates], [antigens[one.request] for one in candidates], malformed)


def score_candidates(
    rows: AntibodyRows,
    *,
    numberer: Numberer | None = None,
    training: AntibodyRows | None = None,
    training_rows: Sequence[int] | None = None,
    discriminator: Discriminator | None = None,
    needs_light: bool = True,
) -> Scores:
    """Checks each candidate, finds the nearest of training, predicts its affinity: what was given to do it with.

    Args:
        training: antibodies that the model was trained on, and `training_rows` their rows in the file.
        needs_light: whether a heavy chain alone is a fault.

    Cost: with numbering see `Numberer`, with training 0.1 s for 12,000 antibodies.
    """
    return Scores(
        find_problems(rows, numberer, needs_light),
        PATTERN if numberer is None else NUMBERING,
        None if training is None else find_nearest(rows, training, training_rows),
        None if discriminator is None else discriminator.predict(rows),
    )


def find_nearest(rows: AntibodyRows, training: AntibodyRows, numbers: Sequence[int] | None = None) -> NearestTraining:
    """The nearest training chain of each candidate; `numbers`: rows of `training` in its file, else from 1."""
    known = set(training.pairs)
    heavy, place = _nearest(rows.chain("heavy"), training.chain("heavy"))
    light, _ = _nearest(rows.chain("light"), training.chain("light"))
    of_file = np.array([*(range(1, len(training) + 1) if numbers is None else numbers)], np.int64)
    found = np.where(place < 0, 0, of_file[place]) if len(of_file) else np.zeros(len(rows), np.int64)
    return NearestTraining(heavy, light, found, np.array([pair in known for pair in rows.pairs], dtype=bool))


def _nearest(mine: Sequence[str], theirs: Sequence[str]) -> tuple[FloatArray, np.ndarray]:
    """Identity to the nearest and its place; NaN and -1 for "", and where there are no others."""
    identity, place = np.full(len(mine), np.nan), np.full(len(mine), -1)
    references = [i for i, one in enumerate(theirs) if one]
    asked = [i for i, one in enumerate(mine) if one]
    if references and asked:
        identity[asked], nearest = nearest_identities([mine[i] for i in asked], [theirs[i] for i in references])
        place[asked] = np.array(references)[nearest]
    return identity, place


def rank(candidates: Sequence[Candidate], scores: Scores, by_affinity: bool = False) -> list[int]:
    """Their order: by antigen, as asked for; within it valid ones first, then the best.

    Args:
        by_affinity: best is the highest predicted affinity, ties and unknown ones by log-probability; else that alone.
    """
    predicted = scores.affinities if by_affinity and scores.affinities is not None else np.full(len(candidates), np.nan)

    def key(i: int) -> tuple[Any, ...]:
        one, is_known = candidates[i], not np.isnan(predicted[i])
        affinity = -predicted[i] if is_known else 0.0
        return one.request, scores.problems[i] is not None, not is_known, affinity, -round(one.log_probability, DIGITS)

    return sorted(range(len(candidates)), key=key)


def tabulate(
    candidates: Sequence[Candidate], scores: Scores, order: Sequence[int], asked: float | None = None
) -> dict[str, list[Any]]:
    """Columns of `COLUMNS` and, as far as they are known, `OPTIONAL`, in `order`; ranks from 1 within each antigen."""
    ranks: dict[int, int] = {}
    table: dict[str, list[Any]] = {name: [] for name in (*COLUMNS, "cdr_h3")}
    for i in order:
        one, problem = candidates[i], scores.problems[i]
        ranks[one.request] = ranks.get(one.request, 0) + 1
        likely = round(one.log_probability, DIGITS)
        cells: tuple[Any, ...] = (ranks[one.request], one.pair.heavy, one.pair.light or "", one.copies, likely)
        cells += ("no" if problem else "yes", problem or "", scores.checked_by, find_cdr3(one.pair.heavy) or "")
        for name, cell in zip(table, cells):
            table[name].append(cell)
    if asked is not None:
        table["asked_affinity"] = [asked] * len(order)
    if scores.affinities is not None:
        table["predicted_affinity"] = [_known(scores.affinities[i]) for i in order]
    if (nearest := scores.nearest) is not None:
        table["nearest_training_heavy"] = [_known(nearest.heavy[i]) for i in order]
        table["nearest_training_light"] = [_known(nearest.light[i]) for i in order]
        table["nearest_training_row"] = [int(nearest.row[i]) or "" for i in order]
        table["is_training_copy"] = ["yes" if nearest.is_copy[i] else "no" for i in order]
    return table


def _known(value: float) -> float | str:
    return "" if np.isnan(value) else float(value)


def describe(candidates: Sequence[Candidate], scores: Scores, antigens: Sequence[str]) -> list[str]:
    """What was drawn, in sentences; likely mistakes begin with WARNING."""
    drawn, distinct = sum(one.copies for one in candidates), len(candidates)
    if not drawn:
        return ["No antibodies."]
    num_antigens = len({antigens[one.request] for one in candidates})
    valid = sum(one.copies for one, problem in zip(candidates, scores.problems) if problem is None)
    malformed = sum(one.copies for one in candidates if one.pair.malformed)
    text = f"{drawn:,} antibodies for {num_antigens:,} antigens: {distinct:,} distinct, {valid:,} valid by "
    lines = [f"{text}{scores.checked_by}, {malformed:,} malformed; all are in the table."]
    if distinct < COLLAPSED_BELOW * drawn and drawn > num_antigens:
        lines.append(f"WARNING: {100 * distinct / drawn:.3g} % are distinct: the model, or its temperature, collapsed.")
    if shared := _count_shared(candidates, antigens):
        lines.append(f"WARNING: {shared:,} antibodies were written for several antigens: it may not read the antigen.")
    if scores.checked_by == PATTERN:
        lines.append("Valid is by patterns of conserved residues. Numbering is stricter: --numbering immunum.")
    if scores.nearest is None:
        lines.append("Copies of training antibodies were not looked for: name the file with --training_data.")
    elif copied := int(scores.nearest.is_copy.sum()):
        lines.append(f"WARNING: {copied:,} lines of the table are training antibodies to the residue.")
    return lines


def _count_shared(candidates: Sequence[Candidate], antigens: Sequence[str]) -> int:
    owners: dict[tuple[str, str | None], set[str]] = {}
    for one in candidates:
        owners.setdefault((one.pair.heavy, one.pair.light), set()).add(antigens[one.request])
    return sum(len(each) > 1 for each in owners.values())
