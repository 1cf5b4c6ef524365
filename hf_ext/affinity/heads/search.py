"""The search: every form briefly, then small changes of the best one, until a budget of work is spent."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm.auto import tqdm

from ...evaluation.baselines import RidgeBaseline
from ...reporting.progress import is_watched
from .candidates import LARGE, HeadSettings, first_candidates, neighbours, trained_longer
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
# Two heads' errors on n held-out rows differ by chance by about this over sqrt(n), relative to the errors.
NOISE = 0.3
MAX_CANDIDATES = 24

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadSearch:
    """What a search found.

    Attributes:
        chosen: the head to train; with the epochs of a run without a search where fewer won and there was no budget
            left to try as many.
        tried: per candidate its settings, `error` (of held-out rows, smaller is better; None: not finite),
            `is_complete` (False: given up before it had seen all sets of them) and `num_weights`; JSON-able.
        num_folds, num_held_out: sets of held-out rows, and rows in them.
        ridge_error: that of a ridge on the same embeddings and rows, its penalty chosen on these.
        seconds: wall time.
    """

    chosen: HeadSettings
    tried: list[dict[str, Any]]
    num_folds: int
    num_held_out: int
    ridge_error: float
    seconds: float


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
    tried: list[_Tried] = []
    asked: set[HeadSettings] = set()
    left = budget
    queue = first_candidates(start, fixed, recipe.widths, recipe.num_steps(len(folds[0][0]), 1))
    with tqdm(
        total=round(budget), desc="Choosing a head", unit="s", disable=is_quiet or not is_watched(), leave=False
    ) as bar:
        while queue and len(asked) < MAX_CANDIDATES:
            settings = queue.pop(0)
            asked.add(settings)
            planned = _seconds(settings, recipe, [len(train) for train, _ in folds], STEP_S)
            if planned <= left or not tried:  # what is too dear is not asked for again
                tried.append(_evaluate(settings, recipe, folds, _best(tried)))
                left -= planned * tried[-1].share
                bar.update(round(budget - left) - bar.n)
            if not queue:
                best = _best(tried) or tried[0]
                queue = [one for one in neighbours(best.settings, start, fixed) if one not in asked][:1]
    num_held_out = sum(len(held_out) for _, held_out in folds)
    return HeadSearch(
        chosen=_lengthen(_choose(tried, recipe, num_held_out), start, asked, tried),
        tried=[_describe(one, recipe) for one in tried],
        num_folds=len(folds),
        num_held_out=num_held_out,
        ridge_error=_ridge_error(recipe, folds),
        seconds=time.perf_counter() - began,
    )


def find_budget(recipe: Recipe, num_rows: int) -> float:
    """What a search may cost, in seconds by estimate: `BUDGET` of a run with the large head that it takes the place of.

    Args:
        recipe: with that run's rows per step.
        num_rows: to train on.
    """
    return BUDGET * _seconds(LARGE_HEAD, recipe, [num_rows], TRAINER_STEP_S)


@dataclass(frozen=True)
class _Tried:
    """What became of a candidate.

    Attributes:
        curves: errors after each epoch, by set of held-out rows.
        is_complete: of all sets; it was given up otherwise, and is not compared with those that have seen all.
        share: of its planned steps that were taken.
    """

    settings: HeadSettings
    curves: list[list[float]]
    is_complete: bool
    share: float

    @property
    def error(self) -> float:
        return sum(map(min, self.curves)) / len(self.curves)


def _best(tried: Sequence[_Tried]) -> _Tried | None:
    return min((one for one in tried if one.is_complete), key=lambda one: one.error, default=None)


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
    tried = _Tried(settings, curves, len(curves) == len(folds), num_steps / planned)
    logger.debug("%s: %.5g", settings, tried.error)
    return tried


def _choose(tried: Sequence[_Tried], recipe: Recipe, num_held_out: int) -> HeadSettings:
    """Of those as good as the best, but for noise, the one with the fewest weights, then with the lowest error."""
    complete = [one for one in tried if one.is_complete]
    near_enough = 1 + NOISE / math.sqrt(num_held_out)
    lowest = min(one.error for one in complete)
    near = [one for one in complete if one.error <= lowest * near_enough or one.error == lowest]
    return min(near, key=lambda one: (one.settings.num_weights(recipe.widths), one.error)).settings


def _lengthen(
    chosen: HeadSettings, start: HeadSettings, asked: Collection[HeadSettings], tried: Sequence[_Tried]
) -> HeadSettings:
    """As many epochs as without a search, where more were asked for and too dear: validation chooses the checkpoint."""
    longer = trained_longer(chosen, start)
    was_too_dear = longer in asked and longer not in {one.settings for one in tried}
    return replace(chosen, epochs=max(chosen.epochs, start.epochs)) if was_too_dear else chosen


def _seconds(settings: HeadSettings, recipe: Recipe, sizes: Sequence[int], step_s: float) -> float:
    """An estimate for training on sets of these sizes."""
    weights = settings.num_weights(recipe.widths)
    each = step_s + weights * WEIGHT_S + recipe.rows_per_step * (weights * PRODUCT_S + sum(recipe.widths) * FEATURE_S)
    return each * sum(recipe.num_steps(size, settings.epochs) for size in sizes)


def _describe(one: _Tried, recipe: Recipe) -> dict[str, Any]:
    shown = one.error if math.isfinite(one.error) else None
    weights = one.settings.num_weights(recipe.widths)
    return {**one.settings.to_dict(), "error": shown, "is_complete": one.is_complete, "num_weights": weights}


def _ridge_error(recipe: Recipe, folds: Folds) -> float:
    errors = []
    for train, held_out in folds:
        features = [rows.features.cpu().numpy() for rows in (train, held_out)]
        ridge = RidgeBaseline().fit(features[0], train.labels, features[1], held_out.labels)
        errors.append(recipe.measure(ridge.predict(features[1]), held_out))
    return sum(errors) / len(errors)
