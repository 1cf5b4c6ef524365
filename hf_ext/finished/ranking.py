"""Which rows to measure next: `hf-ext predict --rank`. A batch is taken by the acquisition of its rows, highest first.

Sources: N. Srinivas et al., Gaussian process optimization in the bandit setting (2010), of ucb; W. Thompson,
Biometrika 25 (1933).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from ..errors import ArgumentError
from ..evaluation import FloatArray
from ..heads import require_spread
from ..labels import LabelKind
from ..property import PredictArguments

GREEDY = "greedy"
OWNERS = {"by": None, "beta": "ucb", "minimize": None, "diverse": None, "seed": "thompson"}  # flag -> --by it is for
CANDIDATES = 2  # times the batch, with `diverse`


def check_ranking(own: PredictArguments, explicit: Collection[str], config: Any, is_stream: bool) -> None:
    """Checks that a model can rank as it is asked to, before a row is read.

    Args:
        own: as parsed; `explicit` are the names of the arguments that the user set.
        config: of the model.
        is_stream: whether rows are.

    Raises:
        ArgumentError: a flag of ranking that would do nothing; a stream; a label that is not one number per row, or a
            strategy that needs the spread of a model that has none.
    """
    for name, owner in OWNERS.items():
        if name in explicit and (own.rank is None or owner not in (None, own.by)):
            needed = "--rank N" if own.rank is None else f"--by {owner}"
            raise ArgumentError(f"--{name} does nothing without {needed}: give that, too, or leave it out.")
    if own.rank is None:
        return
    kind: LabelKind = config.kind
    if is_stream:
        raise ArgumentError("--rank looks at all rows, and --streaming reads them one after another: leave one out.")
    if kind.why_no_intervals:
        raise ArgumentError(f"--rank is for models of one number per row, and this one predicts {kind.describe()}.")
    if own.by != GREEDY:
        require_spread(config.prediction_spread, f"--rank --by {own.by}")


def acquire(own: PredictArguments, predicted: FloatArray, stds: Any) -> FloatArray:
    """Computes what measuring each row is worth by `own.by`, higher is better: (n,), label units.

    `stds`: (n,) standard deviations, which `greedy` does not read.
    """
    worth = -predicted if own.minimize else predicted
    if own.by == GREEDY:
        return worth
    if own.by == "ucb":
        return worth + own.beta * stds
    return worth + stds * np.random.default_rng(own.seed).standard_normal(len(worth))


def choose_batch(acquisition: FloatArray, number: int, sequences: Sequence[Sequence[str]] | None = None) -> list[int]:
    """Chooses rows, the first to measure first; of equal ones those that stand first.

    Args:
        acquisition: (n,).
        number: of rows to choose, at most n.
        sequences: of each row, column by column: then the best row, and of the best `CANDIDATES` times `number` each
            time the one whose nearest chosen row is the most edits away, of equal ones the best.

    Cost: a sort; with sequences an edit distance of each candidate to each chosen row.
    """
    order = np.argsort(-acquisition, kind="stable")
    if sequences is None:
        return order[:number].tolist()
    candidates = order[: CANDIDATES * number].tolist()
    columns = [[column[i] or "" for i in candidates] for column in sequences]
    nearest = np.full(len(candidates), np.inf)
    chosen = [0]
    while len(chosen) < number:
        edits = [cdist([column[chosen[-1]]], column, scorer=Levenshtein.distance)[0] for column in columns]
        nearest = np.minimum(nearest, np.sum(edits, axis=0))
        nearest[chosen] = -1
        chosen.append(int(nearest.argmax()))
    return [candidates[i] for i in chosen]
