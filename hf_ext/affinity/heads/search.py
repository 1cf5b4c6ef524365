"""The search: every form briefly, then small changes of the best one, until a budget of work is spent."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm.auto import tqdm

from ...evaluation.baselines import RidgeBaseline
from .candidates import LARGE, HeadSettings, first_candidates, neighbours
from .rows import HeadRows
from .training import Recipe, train_head

Folds = Sequence[tuple[HeadRows, HeadRows]]  # rows to train on, rows held out

# Seconds of a step on one core, to compare costs: a plain loop's and Trainer's; what each weight adds, what it adds by
# row, and each feature by row.
STEP_S, TRAINER_STEP_S = 1.7e-3, 4.5e-3
WEIGHT_S, PRODUCT_S, FEATURE_S = 5e-9, 9e-11, 3e-9
BUDGET = 0.9  # of the run with the large head that the search takes the place of
LARGE_HEAD = HeadSettings("mlp", LARGE, 0.3, 1e-3, 0.01, epochs=30)
BEHIND = 1.05  # of the best one's error on the same held-out rows, and a candidate sees no further ones
NEAR = 1.01  # errors up to this multiple of the lowest count as equal, and the cheapest head of these is taken
MAX_CANDIDATES = 24

logger = logging.getLogger(__name__)


@dataclass
class HeadSearch:
    """What a search found.

    Attributes:
        chosen: the head to train.
        tried: per candidate its settings, `error` (of held-out rows, smaller is better; None: not finite) and
            `num_weights`; JSON-able.
        num_folds, num_held_out: sets of held-out rows, and rows in them.
        ridge_error: that of a ridge on the same embeddings and rows, its penalty chosen on these.
        seconds: wall time.
    """

    chosen: HeadSettings
    tried: list[dict[str, Any]] = field(default_factory=list)
    num_folds: int = 1
    num_held_out: int = 0
    ridge_error: float | None = None
    seconds: float = 0.0


def search_head(
    start: HeadSettings,
    fixed: Collection[str],
    recipe: Recipe,
    folds: Folds,
    budget: float,
    *,
    is_quiet: bool = False,
) -> HeadSearch:
    """Tries heads on embeddings, and returns the one with the lowest error on rows that it was not trained on.

    Which candidates are tried depends on numbers of rows and weights, never on the clock: the same data, settings and
    machine give the same head.

    Args:
        start: the run's own settings: the first candidates have its rates.
        fixed: names of `HeadSettings` that no candidate changes.
        recipe: what all share.
        folds: from `make_folds`.
        budget: seconds by estimate that the candidates may cost, from `find_budget`; the first is tried in any case.
        is_quiet: no progress bar.

    Cost: `budget`, and a ridge per set of held-out rows.
    """
    began = time.perf_counter()
    found = HeadSearch(start, num_folds=len(folds), num_held_out=sum(len(held_out) for _, held_out in folds))
    errors: dict[HeadSettings, float] = {}
    best: _Tried | None = None
    left = budget
    queue = first_candidates(start, fixed, recipe.widths)
    with tqdm(total=round(budget), desc="Choosing a head", unit="s", disable=is_quiet, leave=False) as bar:
        while queue and len(errors) < MAX_CANDIDATES:
            settings = queue.pop(0)
            errors[settings] = math.inf  # also of one that is too dear: it is not asked for again
            planned = _seconds(settings, recipe, [len(train) for train, _ in folds], STEP_S)
            if planned <= left or not found.tried:
                tried = _evaluate(settings, recipe, folds, best)
                errors[settings] = tried.error
                best = tried if best is None or errors[settings] < errors[best.settings] else best
                left -= planned * tried.share
                bar.update(round(budget - left) - bar.n)
                found.tried.append(_describe(settings, recipe, errors[settings]))
            queue = queue or [one for one in neighbours(best.settings, fixed) if one not in errors][:1]
    found.chosen = _choose(errors, recipe)
    found.ridge_error = _ridge_error(recipe, folds)
    found.seconds = time.perf_counter() - began
    return found


def find_budget(recipe: Recipe, num_rows: int) -> float:
    """What a search may cost, in seconds by estimate: `BUDGET` of a run with the large head that it takes the place of.

    Args:
        recipe: with that run's rows per step.
        num_rows: to train on.
    """
    return BUDGET * _seconds(LARGE_HEAD, recipe, [num_rows], TRAINER_STEP_S)


@dataclass(frozen=True)
class _Tried:
    """`curves`: errors after each epoch, by set of held-out rows; `share`: steps taken, of those planned."""

    settings: HeadSettings
    curves: list[list[float]]
    share: float

    @property
    def error(self) -> float:
        return sum(map(min, self.curves)) / len(self.curves)


def _evaluate(settings: HeadSettings, recipe: Recipe, folds: Folds, best: _Tried | None) -> _Tried:
    """Trains a candidate for each set of held-out rows, until it is clearly behind the best one there."""
    curves: list[list[float]] = []
    num_steps = 0
    for i, (train, held_out) in enumerate(folds):
        run = train_head(settings, recipe, train, held_out, rival=None if best is None else best.curves[i])
        curves.append(run.errors)
        num_steps += run.steps
        if best is not None and not sum(map(min, curves)) <= BEHIND * sum(map(min, best.curves[: i + 1])):
            break
    planned = sum(recipe.num_steps(len(train), settings.epochs) for train, _ in folds)
    tried = _Tried(settings, curves, num_steps / planned)
    logger.debug("%s: %.5g", settings, tried.error)
    return tried


def _choose(errors: dict[HeadSettings, float], recipe: Recipe) -> HeadSettings:
    """Of those as good as the best the one with the fewest weights, then with the lowest error."""
    lowest = min(errors.values())
    near = [one for one, error in errors.items() if error <= max(lowest * NEAR, lowest)]
    return min(near, key=lambda one: (one.num_weights(recipe.widths), errors[one]))


def _seconds(settings: HeadSettings, recipe: Recipe, sizes: Sequence[int], step_s: float) -> float:
    """An estimate for training on sets of these sizes."""
    weights = settings.num_weights(recipe.widths)
    each = step_s + weights * WEIGHT_S + recipe.rows_per_step * (weights * PRODUCT_S + sum(recipe.widths) * FEATURE_S)
    return each * sum(recipe.num_steps(size, settings.epochs) for size in sizes)


def _describe(settings: HeadSettings, recipe: Recipe, error: float) -> dict[str, Any]:
    shown = error if math.isfinite(error) else None
    return {**settings.to_dict(), "error": shown, "num_weights": settings.num_weights(recipe.widths)}


def _ridge_error(recipe: Recipe, folds: Folds) -> float:
    errors = []
    for train, held_out in folds:
        features = [rows.features.cpu().numpy() for rows in (train, held_out)]
        ridge = RidgeBaseline().fit(features[0], train.labels, features[1], held_out.labels)
        errors.append(recipe.measure(ridge.predict(features[1]), held_out))
    return sum(errors) / len(errors)
