"""`--head auto`: a fixed library of heads on frozen embeddings, fitted by folds, and weighed by rows not seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from datasets import Dataset

from ..baselines import columns_of, pooled_features
from ..data import MAX_FEATURES, RESIDUES, SequenceCollator, SequenceFeatures, Variants, draw_rows, label_array
from ..errors import DataError
from ..models import (
    COUNTS,
    FEATURES,
    NUM_LANDMARKS,
    HeadEnsemble,
    KernelMap,
    NearestStack,
    NetworkStack,
    principal_directions,
)
from ..text import format_cell, format_table, seconds
from .members import fit_members
from .networks import adopt_network
from .objectives import OBJECTIVES, FloatArray, IntArray, Objective
from .spread import fit_spread

if TYPE_CHECKING:
    from ..trainer import FastTrainer

# Folds while they take a quarter of a minute on one core, else validation alone: rows, times features and what a step
# costs beside these, in features.
FOLDED_COST = 2_500_000
STEP_COST = 1_000
OUTPUTS_PER_WIDTH = 32  # classes whose logistic regression costs as much as all else that reads the features
NUM_FOLDS = 4  # of training, beside validation
MAX_PRODUCTS = 4e10  # rows times counts of residues squared: some seconds on one core
MAX_CLASS_LABELS = 10_000  # rows times outputs; logistic regressions of more read features and directions alone
NUM_PICKS = 50  # of members, with replacement
NUM_KINDS = 5  # of members, the best of each weighed evenly: what few rows choose is drawn to it
LEAST_GAIN = 0.25  # over a constant, of the best kind's: one with less is not weighed so
KIND_ROWS = 32  # held-out ones that count as much as it does
NOISE = 0.3  # over the square root of held-out rows: by which share an error may be below the constant's by chance
MAX_FEATURE_BYTES = 2**30  # of training rows; a sample of more is read
MEMBER_HEADERS = ["head", "error", "weight"]

Groups = Sequence[Sequence[Any]] | None  # by split, then by row


@dataclass(frozen=True)
class Fitted:
    """`facts`: for `all_results.json["ensemble"]`. `predicted`: (n,) of the validation rows, by members fitted without
    them, label units, and `stds` how far labels are expected from that; None of classes."""

    facts: dict[str, Any]
    predicted: FloatArray | None
    stds: FloatArray | None = None


def fit_ensemble(
    trainer: FastTrainer,
    splits: Mapping[str, Any],
    groups: Groups,
    adopts: bool = False,
) -> Fitted:
    """Fits the library on the embeddings of `trainer.model`'s encoders, and gives it the weighted sum.

    Members: ridge or logistic regressions of several alphas on the features, on their principal directions and
    products, on counts of residues, and on kernels of features and of residues; of numbers the nearest rows; networks
    of several seeds, learning rates and forms; a constant. Each is fitted without validation rows and predicts them; of
    small sets also without each of four folds of training. Weights are those of greedy selection with replacement
    (R. Caruana et al., Ensemble selection from libraries of models, 2004) by the error of these predictions, the RMSE
    or the log loss of mixed probabilities, and members of all folds are averaged. A label that is a bound is taken for
    a value. Batches of `trainer` have counts of residues from here on, if a member that has weight reads them.

    Args:
        trainer: a `FastTrainer` whose `AffinityModel` of frozen encoders is trained: its head standardises.
        splits: map-style train and validation.
        groups: of each training and each validation row what was held out together: no fold cuts one. None: rows.
        adopts: give the head the best network of its sizes, for `--init_head_from`; else it stays as it was trained.

    Cost: embeddings are looked up where they are cached; then ten seconds for 700 rows of 1,344 features or 3,000 of
    320, a minute for 55,000 of 320 or 16,000 of 1,344, on one core. Same rows and seed, same numbers.
    """
    began = time.perf_counter()
    args = trainer.args
    config = trainer.model.config
    train = splits["train"]
    validation = splits["validation"]
    width = sum(trainer.model.input_sizes.values())
    row_bytes = 4 * (width + MAX_FEATURES + 4 * NUM_LANDMARKS)
    drawn = draw_rows(len(train), args.seed, max(1, MAX_FEATURE_BYTES // row_bytes))
    if len(drawn) < len(train):
        train = train.select(drawn)
        groups = groups and [[groups[0][i] for i in drawn], groups[1]]
    kind = config.kind
    labels = np.concatenate([label_array(split, kind) for split in (train, validation)])
    objective = OBJECTIVES[kind.linear_name](labels, len(kind.names))
    cost = width * (1 + (objective.num_outputs - 1) / OUTPUTS_PER_WIDTH)
    folds = make_folds(len(train), len(validation), cost, groups, args.seed)
    rows = np.concatenate(folds)
    ensemble, views = _read_views(trainer, train, validation, objective)
    members = fit_members(ensemble, views, objective, folds, config.head_sizes, config.head_dropout, args)
    every = np.stack([member.scored for member in members])
    weights = choose_weights(every, partial(objective.errors, rows=rows), [one.kind for one in members], len(rows))
    for member, weight in zip(members, weights.tolist()):
        if weight > 0 and isinstance(member.fitted, NetworkStack | NearestStack):
            ensemble.add(member.view, weight, member.fitted)
        elif weight > 0:
            ensemble.intercept.copy_(torch.from_numpy(weight * member.fitted))
    ensemble.drop_unread()
    if adopts:
        alike = [
            one for one in members if getattr(one.fitted, "sizes", None) == config.head_sizes and one.view == FEATURES
        ]
        best = min(alike, key=lambda one: float(objective.errors(one.scored[None], rows)[0]))
        adopt_network(trainer.model, cast(NetworkStack, best.fitted))
    if not ensemble.sizes[RESIDUES]:
        trainer.data_collator.residues = {}
    trainer.model.set_ensemble(ensemble)
    mixed = weights @ every
    stds = None
    if objective.link == "identity":
        apart = weights[1:] @ np.square(every[1:] - mixed)  # as `HeadEnsemble.mix` has it, without the constant
        spread = fit_spread(apart, objective.labels[rows] - mixed)
        trainer.model.config.prediction_spread = spread
        stds = np.sqrt(spread["noise"] + spread["slope"] * apart)[: len(validation)]
    *errors, error = objective.errors(np.vstack([every, mixed]), rows).tolist()
    described = zip(members, errors, weights.tolist())
    facts = {
        "members": [{"name": one.name, "error": its, "weight": weight} for one, its, weight in described],
        "error": error,
        "measure": objective.measure,
        "num_folds": len(folds),
        "num_held_out": len(rows),
        "seconds": time.perf_counter() - began,
    }
    return Fitted(facts, None if stds is None else mixed[: len(validation)], stds)


def _read_views(
    trainer: FastTrainer, train: Any, validation: Any, objective: Objective
) -> tuple[HeadEnsemble, dict[str, torch.Tensor]]:
    """Makes an ensemble without members, and what they read: by view (n, size), float32, training rows first.

    No labels are read. Batches of `trainer` have residues from here on, where members may read them.
    """
    head = trainer.model.head
    collator = trainer.data_collator
    widths = [*trainer.model.input_sizes.values()]
    features = torch.from_numpy(np.concatenate([pooled_features(trainer, rows) for rows in (train, validation)]))
    features.sub_(head.input_mean.cpu()).mul_(head.input_scale.cpu())  # in place: it may be a gigabyte
    bases = [principal_directions(block[: len(train)]) for block in features.split(widths, dim=1)]
    ranks = [basis.shape[1] for basis in bases]
    if not any(ranks):  # they differ behind the last residue that is read, or in what is missing
        raise DataError("All training rows have the same embeddings, so there is nothing to learn.")
    residues = features[:, :0]
    num_counts = 0
    reads_more = objective.link == "identity" or len(features) * objective.num_outputs <= MAX_CLASS_LABELS
    if reads_more:
        most = min(MAX_FEATURES, int(np.sqrt(MAX_PRODUCTS / len(train))))
        collator.residues = _find_residues(train, collator, most)
        read = [collator.read_residues(rows) for rows in (train, validation)]
        residues = torch.from_numpy(np.concatenate(read)).float()
        num_counts = collator.residues[COUNTS].num_features if len(collator.residues) > 1 else 0
    ensemble = HeadEnsemble(widths, ranks, [], objective.num_outputs, objective.link, residues.shape[1], num_counts)
    ensemble.fit_directions(bases, features[: len(train)])
    landmarks = draw_rows(len(train), trainer.args.seed, NUM_LANDMARKS)
    views = {FEATURES: features, RESIDUES: residues, COUNTS: residues[:, residues.shape[1] - num_counts :]}
    for view, values in [*views.items()]:
        if reads_more and values.shape[1]:
            ensemble.add_kernel(view, KernelMap.fit(values[landmarks]))
    for view in ensemble.sizes.keys() - views.keys():
        parts = zip(features.split(8192), residues.split(8192))
        views[view] = torch.cat([ensemble.read(view, *part) for part in parts])
    return ensemble, {view: views[view] for view, size in ensemble.sizes.items() if size > 0}


def _find_residues(train: Dataset, collator: SequenceCollator, most: int) -> dict[str, Any]:
    """Chooses what is read off sequences: what variants substitute, and counts."""
    variants = collator.variants
    if len(variants) > most:
        variants = Variants()
    counts = SequenceFeatures.fit(train, columns_of(collator), most - len(variants))
    return {**({"variants": variants} if variants.column else {}), COUNTS: counts}


def make_folds(num_train: int, num_validation: int, width: float | None, groups: Groups, seed: int) -> list[IntArray]:
    """Makes folds: row numbers, training rows first, of the validation rows, then of training.

    The validation rows alone where folds of rows of this `width` cost too much; None: folds in any case.
    """
    folds = [np.arange(num_train, num_train + num_validation)]
    if width is not None and (num_train + num_validation) * (width + STEP_COST) > FOLDED_COST:
        return folds
    group = np.arange(num_train) if groups is None else np.unique(np.asarray(groups[0]), return_inverse=True)[1]
    place = np.random.default_rng(seed).permutation(int(group.max()) + 1)
    further = [np.flatnonzero(place[group] % NUM_FOLDS == fold) for fold in range(NUM_FOLDS)]
    return [*folds, *(fold for fold in further if 0 < len(fold) < num_train)]


def choose_weights(
    scored: FloatArray, errors: Callable[[FloatArray], FloatArray], kinds: Sequence[str], num_rows: int
) -> FloatArray:
    """Chooses weights of members, (m,), whose mean has the smallest error; of few rows nearer to an even mean of kinds.

    Of the first, a constant, if chance explains it.

    Args:
        scored: (m, entries), of unseen rows.
        errors: of m members, (m, entries) -> (m,).
        kinds: of members, (m,).
        num_rows: that are not seen.
    """
    counts = np.zeros(len(scored))
    best = np.zeros(len(scored))
    lowest = np.inf
    total = np.zeros(scored.shape[1])
    for num_picks in range(1, NUM_PICKS + 1):
        found = errors((total + scored) / num_picks)
        picked = found.argmin()
        counts[picked] += 1
        total += scored[picked]
        if found[picked] < lowest:
            best = counts / num_picks
            lowest = found[picked]
    alone = errors(scored)
    most = alone[0] - LEAST_GAIN * (alone[0] - alone.min())
    firsts: dict[str, int] = {}
    for i in alone.argsort().tolist():
        if alone[i] <= most:
            firsts.setdefault(kinds[i], i)
    chosen = [*firsts.values()][:NUM_KINDS]
    share = KIND_ROWS / (KIND_ROWS + num_rows)
    best *= 1 - share
    best[chosen] += share / len(chosen)
    gain = 1 - errors((best @ scored)[None])[0] / alone[0] if alone[0] > 0 else 0.0
    return best if gain > NOISE / np.sqrt(num_rows) else np.eye(len(scored))[0]


def member_rows(facts: Mapping[str, Any]) -> list[list[str]]:
    """Returns a row under `MEMBER_HEADERS` for each member, the heaviest first, then the best."""
    order = sorted(facts["members"], key=lambda one: (-one["weight"], one["error"]))
    return [[one["name"], format_cell(one["error"]), f"{one['weight']:.2f}"] for one in order]


def describe_ensemble(facts: Mapping[str, Any]) -> str:
    """Describes the facts for the log: how heads were weighed, those with a weight, an alarm if none is worth it."""
    used = [one for one in facts["members"] if one["weight"] > 0]
    constant = facts["members"][0]
    held_out = "validation rows" if facts["num_folds"] == 1 else f"rows of {facts['num_folds']} folds"
    text = (
        f"Head: the weighted mean of {len(used)} of {len(facts['members'])} heads, chosen in "
        f"{seconds(facts['seconds'])} by their {facts['measure']} on {facts['num_held_out']:,} {held_out}, which they "
        f"were not fitted on: {format_cell(facts['error'])} together, a constant {format_cell(constant['error'])}. "
        "--head mlp trains a single network."
    )
    lines = [text, format_table(member_rows(facts)[: len(used)], MEMBER_HEADERS)]
    if constant["weight"] == 1:
        lines.append(
            "ALARM: no head predicts rows that it has not seen better than a constant, which is what the model "
            "predicts now: look at labels and sequences first, or try other encoders."
        )
    return "\n".join(lines)
