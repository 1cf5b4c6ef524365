"""`--head auto`: a fixed library of heads on frozen embeddings, fitted by folds, and weighed by rows not seen."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.splits import draw_rows
from ..errors import ArgumentError
from ..evaluation.baselines import solve_ridges
from ..evaluation.metrics import HIT_METRICS
from ..models.configuration import AffinityConfig
from ..models.ensemble import DIRECTIONS, FEATURES, HeadEnsemble, NetworkStack, principal_directions
from ..models.head import ONE_LAYER
from ..reporting.tables import format_table
from ..reporting.units import format_cell, seconds
from ..training_args import FastTrainingArguments
from .arguments import AffinityArguments, Head
from .baselines import pooled_features
from .networks import train_networks
from .rows import FloatArray, label_array

AUTO: Head = "auto"
PLAIN: Head = "mlp"
ONE_LAYER_SIZE = 64
SIZES, DROPOUT = (256, 64), 0.1  # of the ensemble's networks, the run's own among them
PENALTIES = np.logspace(-4, 3, 8)  # relative to the mean eigenvalue of the features
# What networks read, and factors of the run's learning rate and dropout: no choice is right for all sets. On three of
# benchmarks/default_runs.py kernel ridges, nearest neighbours and more seeds beside these changed no error by 1 %.
NETWORKS = ((FEATURES, 1.0, 0.0), (FEATURES, 0.3, 1.0), (DIRECTIONS, 1.0, 1.0))
# Folds while they take half a minute on one core, else validation alone: rows, times features and what a step costs
# beside these, in features.
FOLDED_COST, STEP_COST = 2_500_000, 1_000
NUM_PARTS = 4  # of training, beside validation
NUM_SEEDS = {True: 2, False: 3}  # of each network: with folds for each fold, without
NUM_PICKS = 50  # of members, with replacement
NOISE = 0.3  # over the square root of held-out rows: by which part an error may be below the constant's by chance
MAX_FEATURE_BYTES = 2**30  # of training rows; a sample of more is read
MEMBER_HEADERS = ["head", "error", "weight"]

Units = tuple[Sequence[Any], Sequence[Any]] | None


def settle_head(
    args: AffinityArguments, training: FastTrainingArguments, explicit: Collection[str], is_stream: bool
) -> str:
    """Settles what `--head` and `--head_sizes` mean before a model is built; `args.head` is "auto" if heads are mixed.

    Args:
        args: as parsed, towers settled; changed in place.
        training: of the run.
        explicit: names of the arguments that the user set.
        is_stream: whether rows are.

    Returns:
        Why a single network is trained although `--head auto` was meant; else "".

    Raises:
        ArgumentError: `--head auto` with sizes.
    """
    if args.head in ONE_LAYER and "head_sizes" not in explicit:
        args.head_sizes = [ONE_LAYER_SIZE]
    if args.head != AUTO:
        return ""
    if "head_sizes" in explicit:
        if "head" in explicit:
            raise ArgumentError(
                "--head auto has sizes of its own: leave --head_sizes out, or give --head mlp (product, gated) with it."
            )
        args.head = PLAIN
        return "Head: one mlp, as --head_sizes asks for; without it, several heads are mixed (--head auto)."
    if args.init_head_from:
        _take_head_of(args, Path(args.init_head_from))
        return f"Head: one {args.head}, begun from the network of {args.init_head_from}; it is not mixed with others."
    if reason := _why_single(args, training, is_stream):
        args.head = PLAIN
        return f"Head: mlp {'-'.join(map(str, args.head_sizes))}. --head auto mixes several heads, but {reason}."
    args.head_sizes = [*SIZES]
    if "head_dropout" not in explicit:
        args.head_dropout = DROPOUT
    return ""


def _take_head_of(args: AffinityArguments, folder: Path) -> None:
    """The form of a trained network; `carry_head` names what is wrong with a folder that has none."""
    args.head = PLAIN
    found = AffinityConfig.get_config_dict(folder)[0] if (folder / "config.json").is_file() else {}
    if found.get("model_type") == AffinityConfig.model_type:
        config = AffinityConfig.from_dict(found)
        args.head = cast(Head, config.head_form or PLAIN)
        args.head_sizes, args.head_dropout = list(config.head_sizes or []), config.head_dropout


def _why_single(args: AffinityArguments, training: FastTrainingArguments, is_stream: bool) -> str | None:
    metric = str(training.metric_for_best_model).removeprefix("eval_")
    if {*args.tower_training} - {"frozen"}:
        return "here encoders train"
    if args.loss != "mse":
        return f"they are fitted by least squares, not by --loss {args.loss}"
    if is_stream:
        return "here rows are a stream"
    if training.world_size > 1:
        return f"here are {training.world_size} processes"
    if metric in HIT_METRICS:
        return f"their mean seldom reaches the threshold of --metric_for_best_model {metric}"
    return None


@dataclass(frozen=True)
class Fitted:
    """`facts`: for `all_results.json["ensemble"]`. `predicted`: (n,) of the validation rows, by members fitted without
    them, label units."""

    facts: dict[str, Any]
    predicted: FloatArray


def fit_ensemble(trainer: Any, splits: Mapping[str, Any], units: Units) -> Fitted:
    """Fits the library on the embeddings of `trainer.model`'s encoders, and gives it the weighted sum.

    Members: ridge regressions of several penalties on the features and on their principal directions and products;
    networks of several seeds and learning rates; a constant. Each is fitted without validation rows and predicts them;
    of small sets also without each of four parts of training. Weights are those of greedy selection with replacement
    (R. Caruana et al., Ensemble selection from libraries of models, 2004) by the RMSE of these predictions, and members
    of all folds are averaged. A label that is a bound is taken for a value.

    Args:
        trainer: a `FastTrainer` whose `AffinityModel` of frozen encoders is trained: its head standardises.
        splits: map-style train and validation.
        units: of each training and each validation row what was held out together: no fold cuts one. None: rows.

    Cost: embeddings are looked up where they are cached; then half a minute for 700 rows of 1,344 features or 3,000 of
    320, two to three minutes for 55,000 of 320 or 16,000 of 1,344, on one core. Same rows and seed, same numbers.
    """
    began, args, config = time.perf_counter(), trainer.args, trainer.model.config
    train, validation = splits["train"], splits["validation"]
    width = sum(trainer.model.embedding_sizes.values())
    drawn = draw_rows(len(train), args.seed, max(1, MAX_FEATURE_BYTES // (4 * width)))
    if len(drawn) < len(train):
        train, units = train.select(drawn), None if units is None else ([units[0][i] for i in drawn], units[1])
    labels = np.concatenate([label_array(train), label_array(validation)])
    parts = make_parts(len(train), len(validation), width, units, args.seed)
    ensemble, views = _read_views(trainer, train, validation)
    members = [_constant(labels, parts)]
    members += [member for view, values in views.items() for member in _ridges(view, values.numpy(), labels, parts)]
    for view, rate, dropout in NETWORKS:
        given = views[view].to(args.device), labels, parts, config.head_sizes, dropout * config.head_dropout
        stack, predicted = train_networks(*given, args, rate, NUM_SEEDS[len(parts) > 1])
        name = f"networks on {view}, rate {args.learning_rate * rate:.2g}, dropout {stack.dropout:g}"
        members.append(_Member(name, view, predicted, stack))
    every, rows = np.stack([member.predicted for member in members]), np.concatenate(parts)
    weights = choose_weights(every[:, rows], labels[rows])
    for member, weight in zip(members, weights):
        if weight > 0:
            member.add_to(ensemble, float(weight))
    trainer.model.set_ensemble(ensemble)
    mixed = weights @ every
    *errors, error = np.sqrt(np.mean((np.vstack([every, mixed]) - labels)[:, rows] ** 2, axis=1)).tolist()
    described = zip(members, errors, weights.tolist())
    facts = {
        "members": [{"name": one.name, "error": its, "weight": weight} for one, its, weight in described],
        "error": error,
        "num_folds": len(parts),
        "num_held_out": len(rows),
        "seconds": time.perf_counter() - began,
    }
    return Fitted(facts, mixed[len(train) :])


def _read_views(trainer: Any, train: Any, validation: Any) -> tuple[HeadEnsemble, dict[str, torch.Tensor]]:
    """An ensemble without members, and what members read: by view (n, size), float32, training rows first, on the CPU.

    No labels are read.
    """
    head, widths = trainer.model.head, [*trainer.model.embedding_sizes.values()]
    features = torch.from_numpy(np.concatenate([pooled_features(trainer, rows) for rows in (train, validation)]))
    features.sub_(head.input_mean.cpu()).mul_(head.input_scale.cpu())  # in place: it may be a gigabyte
    bases = [principal_directions(block[: len(train)]) for block in features.split(widths, dim=1)]
    ensemble = HeadEnsemble(widths, [basis.shape[1] for basis in bases], [])
    ensemble.fit_directions(bases, features[: len(train)])
    directions = torch.cat([ensemble.directions(chunk) for chunk in features.split(8192)])
    return ensemble, {FEATURES: features, DIRECTIONS: directions}


@dataclass(frozen=True)
class _Member:
    """A head of the library. `predicted`: (n,) of each row by the fit without its part. `fitted`: networks, or the
    coefficients and the intercept of a linear model, the mean of those of all folds."""

    name: str
    view: str
    predicted: FloatArray
    fitted: NetworkStack | tuple[FloatArray, float]

    def add_to(self, ensemble: HeadEnsemble, weight: float) -> None:
        if isinstance(self.fitted, NetworkStack):
            self.fitted.scale_outputs(weight / len(self.fitted.biases[0]))
            ensemble.views.append(self.view)
            ensemble.networks.append(self.fitted.requires_grad_(False))
            return
        coefficients, intercept = self.fitted
        getattr(ensemble, f"linear_{self.view}").add_(torch.from_numpy(weight * coefficients))
        ensemble.intercept.add_(weight * intercept)


def make_parts(num_train: int, num_validation: int, width: int, units: Units, seed: int) -> list[NDArray[np.int64]]:
    """Rows that are held out together, by number, training rows first: the validation rows, then parts of training."""
    parts = [np.arange(num_train, num_train + num_validation)]
    if (num_train + num_validation) * (width + STEP_COST) > FOLDED_COST:
        return parts
    unit = np.arange(num_train) if units is None else np.unique(np.asarray(units[0]), return_inverse=True)[1]
    place = np.random.default_rng(seed).permutation(int(unit.max()) + 1)
    further = [np.flatnonzero(place[unit] % NUM_PARTS == part) for part in range(NUM_PARTS)]
    return [*parts, *(part for part in further if 0 < len(part) < num_train)]


def _constant(labels: FloatArray, parts: Sequence[NDArray[np.int64]]) -> _Member:
    predicted, means = np.zeros(len(labels)), []
    for part in parts:
        means.append(float(np.delete(labels, part).mean()))
        predicted[part] = means[-1]
    return _Member("constant", FEATURES, predicted, (np.zeros(1), float(np.mean(means))))


def _ridges(
    view: str, values: NDArray[np.float32], labels: FloatArray, parts: Sequence[NDArray[np.int64]]
) -> list[_Member]:
    predicted = np.zeros((len(labels), len(PENALTIES)))
    coefficients, intercepts = np.zeros((values.shape[1], len(PENALTIES))), np.zeros(len(PENALTIES))
    for part in parts:
        # Validation rows stand last: what is left of them is a view, not a copy of a gigabyte.
        rest = slice(part[0]) if part[-1] == len(labels) - 1 else np.setdiff1d(np.arange(len(labels)), part)
        weights, levels = solve_ridges(values[rest], labels[rest], PENALTIES, standardize=False)
        predicted[part] = values[part] @ weights + levels
        coefficients += weights / len(parts)
        intercepts += levels / len(parts)
    return [
        _Member(f"ridge on {view}, penalty {penalty:g}", view, predicted[:, i], (coefficients[:, i], intercepts[i]))
        for i, penalty in enumerate(PENALTIES)
    ]


def choose_weights(predicted: FloatArray, labels: FloatArray) -> FloatArray:
    """Shares of members, (m,), whose mean has the smallest error; of the first, a constant, where chance explains it.

    Args:
        predicted: (m, n), of unseen rows.
        labels: (n,).
    """
    residuals = predicted - labels
    products = residuals @ residuals.T / len(labels)
    counts, best, lowest = np.zeros(len(predicted)), np.zeros(len(predicted)), np.inf
    for num_picks in range(1, NUM_PICKS + 1):
        errors = (counts @ products @ counts + 2 * products @ counts + np.diag(products)) / num_picks**2
        counts[errors.argmin()] += 1
        if errors.min() < lowest:
            best, lowest = counts / num_picks, errors.min()
    gain = 1 - np.sqrt(lowest / products[0, 0]) if products[0, 0] > 0 else 0.0
    return best if gain > NOISE / np.sqrt(len(labels)) else np.eye(len(predicted))[0]


def member_rows(facts: Mapping[str, Any]) -> list[list[str]]:
    """A row under `MEMBER_HEADERS` for each member, the heaviest first, then the best."""
    order = sorted(facts["members"], key=lambda one: (-one["weight"], one["error"]))
    return [[one["name"], format_cell(one["error"]), f"{one['weight']:.2f}"] for one in order]


def describe_ensemble(facts: Mapping[str, Any]) -> str:
    """The facts as text for the log: how heads were weighed, those with a weight, an alarm if none is worth it."""
    used = [one for one in facts["members"] if one["weight"] > 0]
    constant = facts["members"][0]
    held_out = "validation rows" if facts["num_folds"] == 1 else f"rows of {facts['num_folds']} folds"
    text = (
        f"Head: the weighted mean of {len(used)} of {len(facts['members'])} heads, chosen in "
        f"{seconds(facts['seconds'])} by their RMSE on {facts['num_held_out']:,} {held_out}, which they were not "
        f"fitted on: {format_cell(facts['error'])} together, a constant {format_cell(constant['error'])}. --head mlp "
        "trains a single network."
    )
    lines = [text, format_table(member_rows(facts)[: len(used)], MEMBER_HEADERS)]
    if constant["weight"] == 1:
        lines.append(
            "ALARM: no head predicts rows that it has not seen better than the training mean, which is what the model "
            "predicts now: look at labels and sequences first, or try other encoders."
        )
    return "\n".join(lines)
