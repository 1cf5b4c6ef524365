"""`--head auto` in a run: whether a search can be made, what it may change, and what is kept of it to go on with."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from transformers import set_seed

from ...arguments.parser import FastArgumentParser
from ...data.fingerprint import fingerprint
from ...data.splits import draw_rows
from ...errors import ArgumentError
from ...models.configuration import AffinityConfig
from ...models.head import ONE_LAYER
from ...processes.team import do_on_main
from ...reporting.run_record import write_json
from ...reporting.tables import format_table
from ...reporting.units import format_cell, less_is_better, metric_name, seconds
from ...speedups.batch_size import cached_batch_size
from ...training_args import FastTrainingArguments
from ..arguments import AffinityArguments, Head
from .candidates import MIN_STEPS, HeadSettings
from .rows import make_folds, read_rows
from .run_settings import PLAIN, make_recipe, make_start, metric_of
from .search import HeadSearch, find_budget, search_head

AUTO: Head = "auto"
ONE_LAYER_SIZE = 64
FILE = "head_search.json"
MAX_FEATURE_BYTES = 2**30  # of training rows; the search sees a sample of more
# What the user may have set -> what the search then leaves alone.
FIXED = {
    "head_dropout": "dropout",
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "num_train_epochs": "epochs",
    "max_steps": "epochs",
}
CANDIDATE_HEADERS = ["head", "dropout", "learning rate", "weight decay", "epochs", "weights", "error"]
CHOSEN = ("head_sizes", "head_dropout", "learning_rate", "weight_decay", "num_train_epochs")
BATCH_ARGUMENTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "effective_batch_size",
    "cached_batch_size",
)

Units = tuple[Sequence[Any], Sequence[Any]] | None

logger = logging.getLogger(__name__)


def settle_head(args: AffinityArguments, training: FastTrainingArguments, explicit: Collection[str], rows: Any) -> None:
    """Settles what `--head auto` means before a model is built.

    `--head_sizes` asks for that perceptron; `--init_head_from` for the head of that run. Otherwise a search follows:
    of small sets its heads take `per_device_train_batch_size` rows per step, where the plan would take fewer to have
    more steps; a small head does not need them.

    Args:
        args, training: as parsed; changed in place.
        explicit: names of the arguments that the user set.
        rows: of training.

    Raises:
        ArgumentError: `--head auto` with sizes.
    """
    if args.head in ONE_LAYER and "head_sizes" not in explicit:
        args.head_sizes = [ONE_LAYER_SIZE]
    if args.head != AUTO:
        return
    if "head_sizes" in explicit and "head" in explicit:
        raise ArgumentError(
            "--head auto chooses the sizes: leave --head_sizes out, or give --head mlp (product, gated) with it."
        )
    if "head_sizes" in explicit:
        args.head = PLAIN
    elif args.init_head_from:
        _take_head_of(args, Path(args.init_head_from))
    elif hasattr(rows, "__len__") and training.cached_batch_size and not {*explicit} & {*BATCH_ARGUMENTS}:
        planned = cached_batch_size(len(rows), training.cached_batch_size)
        if planned < training.per_device_train_batch_size:
            training.cached_batch_size = None


def _take_head_of(args: AffinityArguments, folder: Path) -> None:
    """The form of a trained head; `carry_head` names what is wrong with a folder that has none."""
    args.head = PLAIN
    file = folder / "config.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    if found.get("model_type") == AffinityConfig.model_type:
        config = AffinityConfig.from_dict(found)
        args.head = cast(Head, config.head_form or PLAIN)
        args.head_sizes, args.head_dropout = list(config.head_sizes or []), config.head_dropout


def choose_head(
    trainer: Any,
    args: AffinityArguments,
    training: FastTrainingArguments,
    splits: Mapping[str, Any],
    parser: FastArgumentParser,
    units: Units,
) -> dict[str, Any] | None:
    """Searches a head for `trainer.model`, and gives model and arguments what it found; None where there is no search.

    The search is kept in `output_dir/head_search.json`: the same command goes on with the same head. Where there are
    checkpoints to go on from, none is made anew: other settings of the user take effect on the head that was found, and
    training refuses those that contradict the checkpoint.

    Args:
        trainer: before training. Called by all processes.
        args: after `settle_head`.
        training: what `trainer` was made from; several heads are trained from it.
        splits: train, as it is trained on, and validation.
        parser: after parsing: what the user set is kept, and where the others come from is noted.
        units: of each training and validation row what was held out together, or None for rows.

    Returns:
        JSON-able: `chosen`, `tried`, `metric`, `num_folds`, `num_held_out`, `ridge_error`, `seconds`.

    Raises:
        ArgumentError: something that is no file is in the way of the search's.

    Cost: less than a run with --head mlp; embeddings are looked up in the cache, which training then finds filled.
    """
    if args.head != AUTO:
        return None
    reason = _why_not(trainer, splits, parser.explicit)
    if reason is not None:
        sizes = "-".join(map(str, args.head_sizes))
        logger.info("Head: mlp %s. A search for a better one is made on cached embeddings, and %s.", sizes, reason)
        return None
    fixed = {FIXED[name] for name in parser.explicit & FIXED.keys()}
    start, facts = make_start(trainer.args, args), _describe(trainer, args, splits, fixed, units)
    file = Path(trainer.args.output_dir) / FILE
    if file.exists() and not file.is_file():
        raise ArgumentError(f"{file} is no file: move it away, the search for a head is kept there.")

    def look() -> dict[str, Any] | None:
        return _read(file, facts, {name: getattr(start, name) for name in fixed}) if training.resume != "no" else None

    found = do_on_main(training, look)
    if found is None:
        searched = _search(trainer, args, splits, fixed, units)
        found = do_on_main(training, lambda: searched)  # processors may round differently
        if trainer.is_world_process_zero():
            write_json(file, {"facts": facts, "found": found})
    _apply(HeadSettings.from_dict(found["chosen"]), trainer, args, training)
    parser.origins.update({name: "head search" for name in CHOSEN if FIXED.get(name) not in fixed})
    return found


def describe_choice(found: Mapping[str, Any]) -> str:
    """What the log says of a search: its winner, and all candidates, the best first."""
    ridge = found["ridge_error"]
    chosen = HeadSettings.from_dict(found["chosen"])
    text = (
        f"Head: {head_name(found['chosen'])}, dropout {chosen.dropout:g}, learning rate {chosen.learning_rate:g}, "
        f"weight decay {chosen.weight_decay:g}, {chosen.epochs:g} epochs. Chosen among {len(found['tried'])} by "
        f"{error_name(found['metric'])} on {found['num_held_out']:,} rows that they were not trained on, in "
        f"{seconds(found['seconds'])}; a ridge on the same embeddings has {format_cell(ridge)} there. "
        "--head mlp takes the large perceptron."
    )
    return f"{text}\n{format_table(candidate_rows(found), CANDIDATE_HEADERS)}"


def _why_not(trainer: Any, splits: Mapping[str, Any], explicit: Collection[str]) -> str | None:
    model, cache = trainer.model, trainer.plan["embedding_cache"]
    if len(model.frozen_inputs) < len(model.embedding_sizes):
        return "here encoders train"
    if not all(hasattr(splits[name], "__len__") for name in ("train", "validation")):
        return "here rows are a stream"
    if cache.status != "applied":
        return f"the cache is {cache.status} ({cache.reason})"
    if trainer.args.max_steps <= 0 and trainer.args.num_train_epochs <= 0:
        return "no epoch is asked for"  # training says how to ask for some
    if "max_steps" in explicit and 0 < trainer.args.max_steps < MIN_STEPS:
        return f"--max_steps {trainer.args.max_steps} is too short to tell heads apart"
    return None


def _search(
    trainer: Any, args: AffinityArguments, splits: Mapping[str, Any], fixed: set[str], units: Units
) -> dict[str, Any]:
    width = sum(trainer.model.embedding_sizes.values())
    rows = dict(splits)
    most = max(1, MAX_FEATURE_BYTES // (4 * width))
    chosen = draw_rows(len(rows["train"]), trainer.args.seed, most)
    if len(chosen) < len(rows["train"]):
        rows["train"] = rows["train"].select(chosen)
        units = None if units is None else ([units[0][i] for i in chosen], units[1])
    train, validation = read_rows(trainer, rows)
    recipe = make_recipe(trainer, args, float(train.labels.mean()), float(train.labels.std()) or 1.0)
    planned = cached_batch_size(len(train), recipe.rows_per_step)  # what the plan would take for the large head
    budget = find_budget(replace(recipe, rows_per_step=planned), len(train))
    start = make_start(trainer.args, args)
    folds = make_folds(train, validation, units, trainer.args.seed)
    logger.info("Choosing a head on cached embeddings; --head mlp takes the large one without a search.")
    is_quiet = trainer.args.disable_tqdm or not trainer.is_world_process_zero()
    found = search_head(start, fixed, recipe, folds, budget, is_quiet=is_quiet)
    return {**_plain(found), "metric": metric_of(trainer.args)}


def _plain(found: HeadSearch) -> dict[str, Any]:
    return {**asdict(found), "chosen": found.chosen.to_dict()}


def _describe(
    trainer: Any, args: AffinityArguments, splits: Mapping[str, Any], fixed: Collection[str], units: Units
) -> dict[str, Any]:
    """What decides the outcome of a search: where it is the same, the search is not made again."""
    recipe = asdict(make_recipe(trainer, args, 0.0, 1.0))
    del recipe["measure"]
    facts = {
        "start": make_start(trainer.args, args).to_dict(),
        "fixed": sorted(fixed),
        "recipe": {**recipe, "scheduler": str(recipe["scheduler"])},
        "metric": metric_of(trainer.args),
        "embeddings": {name: trainer.embedding_key(name) for name in trainer.model.embedding_sizes},
        "num_units": None if units is None else [len(set(values)) for values in units],
        "rows": {name: fingerprint(splits[name]) for name in ("train", "validation")},
    }
    return json.loads(json.dumps(facts, default=str))


def _read(file: Path, facts: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an earlier search of the same facts found; of other facts where checkpoints are to go on, with `fixed`."""
    try:
        stored = json.loads(file.read_text())
        found = stored["found"]
        chosen = HeadSettings.from_dict(found["chosen"])
        tried = [HeadSettings.from_dict(one) for one in found["tried"]]
        is_same = stored["facts"] == facts
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not any(replace(one, epochs=chosen.epochs) == chosen for one in tried):
        return None
    if is_same:
        return found
    has_checkpoints = any(any(file.parent.glob(f"{part}checkpoint-*")) for part in ("", "seed-*/"))
    return {**found, "chosen": replace(chosen, **fixed).to_dict()} if has_checkpoints else None


def _apply(chosen: HeadSettings, trainer: Any, args: AffinityArguments, training: FastTrainingArguments) -> None:
    args.head_sizes, args.head_dropout = list(chosen.sizes), chosen.dropout
    for each in (training, trainer.args):
        each.learning_rate, each.weight_decay = chosen.learning_rate, chosen.weight_decay
        each.num_train_epochs = chosen.epochs
    set_seed(training.seed)  # the head's first weights are the same whether the search was made or read
    trainer.model.set_head(chosen.form, args.head_sizes, args.head_dropout)


def head_name(settings: Mapping[str, Any]) -> str:
    """Such as `mlp 256-64`."""
    return f"{settings['form']} {'-'.join(map(str, settings['sizes']))}"


def error_name(metric: str) -> str:
    """What candidates were compared by: an error, or 1 less a metric of which more is better."""
    name = metric_name(metric)
    return name if less_is_better(metric) else f"1 - {name}"


def candidate_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """A row under `CANDIDATE_HEADERS` for each candidate of `all_results.json`'s `head_search`, the best first."""
    order = sorted(found["tried"], key=lambda one: math.inf if one["error"] is None else one["error"])
    return [
        [
            head_name(one),
            *(f"{one[name]:g}" for name in ("dropout", "learning_rate", "weight_decay", "epochs")),
            f"{one['num_weights']:,}",
            format_cell(one["error"]) + ("" if one["is_complete"] else " (given up)"),
        ]
        for one in order
    ]
