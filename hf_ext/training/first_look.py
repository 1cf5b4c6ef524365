"""What would end a run later, or teach it nothing, is said before its first step.

Trainer reports success for runs of no step, and trains one where `max_steps` is 0.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Real
from typing import Any

import datasets
import numpy as np
import torch
from pyarrow import compute
from torch import nn
from torch.utils.data import DataLoader, Subset
from transformers import TrainingArguments
from transformers.trainer_utils import denumpify_detensorize, has_length

from ..arguments.checks import check_choices
from ..arguments.names import name_nearest
from ..data.columns import column_names, column_values, has_numbered_rows
from ..data.random_states import kept_random_states
from ..errors import ArgumentError, DataError, HfExtError
from ..evaluation.row_metrics import RowMetrics
from ..held import replaced
from ..models.lora import unwrap_peft
from ..overrides import EVALUATION, find_override
from ..speedups.sample_rows import modes_kept

NUM_BATCHES = 2  # of each evaluation set
NUM_NAMED = 5

logger = logging.getLogger(__name__)


def check_training(args: TrainingArguments, rows: Any, model: Any = None) -> None:
    """Before training, and not before an evaluation, which needs no steps.

    Args:
        args: of the trainer.
        rows: that it will train on; None where somebody else makes its loader.
        model: that it will train.

    Raises:
        ArgumentError: the arguments ask for no step; a word that is no choice was assigned to one after they were
            built; adapters whose ranks nobody would change (AdaLoRA).
        DataError: there are no rows.
    """
    check_choices(args)
    if has_numbered_rows(rows) and len(rows) == 0:
        raise DataError("The training set has no rows: nothing can be trained.")  # torch would speak of num_samples
    if args.max_steps == 0:
        raise ArgumentError(
            "max_steps=0 trains nothing. Give a number of optimizer steps, or leave it out (-1) to train for "
            "num_train_epochs. To score a model as it is, call `evaluate` or `predict`."
        )
    if args.max_steps < 0 and not (args.num_train_epochs > 0 and math.isfinite(args.num_train_epochs)):
        raise ArgumentError(
            f"num_train_epochs={args.num_train_epochs:g}: must be a number above 0, or nothing is trained; fractions "
            "are allowed. To score a model as it is, call `evaluate` or `predict`."
        )
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if config.peft_type == "ADALORA":
            raise ArgumentError(
                f"adapter {name!r} is AdaLoRA: its ranks change by a call after each step, which Trainer does not "
                "make, and no checkpoint holds what it gathers. Use LoraConfig; use_dora=True makes it DoRA."
            )


def check_batches(args: TrainingArguments, loader: Any) -> None:
    """Raises ArgumentError where `dataloader_drop_last` leaves `loader` no batch, DataError where it has no rows."""
    if not has_length(loader) or len(loader) > 0:
        return
    dataset = getattr(loader, "dataset", None)
    num_rows = len(dataset) if dataset is not None and has_length(dataset) else 0
    if num_rows == 0:
        raise DataError("The training set has no rows: nothing can be trained.")
    raise ArgumentError(
        f"dataloader_drop_last leaves no batch: {num_rows} training rows are fewer than the "
        f"{args.train_batch_size * args.world_size} of one batch "
        f"(per_device_train_batch_size={args.per_device_train_batch_size}, {args.world_size} process(es)). Leave "
        "dataloader_drop_last out, or lower per_device_train_batch_size."
    )


def check_rows(name: str, rows: Any, model: Any, collator: Any, num_seen: float = math.inf) -> None:
    """Looks at labels, and at lengths where the model has no more positions; of transformers' models and collators.

    Others may do anything with rows, and so do transforms; models that count positions from their padding token take
    longer rows of padding. Cost: one look at a column, or two.

    Args:
        name: of the data, for messages.
        rows: a `Dataset`, or a list of dictionaries, whose lengths are not looked at.
        num_seen: so many rows are read; where there are more, a row may not come up, and none is looked at.

    Raises:
        DataError: a label that is text, None to train on, or a class the model does not have; a row that is too long.
    """
    inner, is_list = unwrap_peft(model), isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    is_read = is_list or (isinstance(rows, datasets.Dataset) and rows.format["type"] != "custom")
    modules = f"{type(inner).__module__} {getattr(collator, '__module__', '')}"
    if not is_read or not 0 < len(rows) <= num_seen or modules.count("transformers.") < 2:
        return
    kind, config, names = type(inner).__name__, inner.config, {*column_names(rows)}
    is_one_of = config.num_labels > 1 and config.problem_type in (None, "single_label_classification")
    needed = f"a whole number from 0 to {config.num_labels - 1} (num_labels)" if is_one_of else "a number"
    for column in {"label", "labels"} & names if kind.endswith("ForSequenceClassification") else ():
        for i, value in enumerate([row.get(column) for row in rows] if is_list else column_values(rows, column)):
            is_other = is_one_of and isinstance(value, int) and value != -100 and not 0 <= value < config.num_labels
            if (value is None and name == "train") or isinstance(value, str) or is_other:  # else there is no loss
                raise DataError(f"{name} data, row {i}, column {column!r}: {value!r}, but {kind} takes {needed}.")
    layers = [part for path, part in inner.named_modules() if path.endswith((".position_embeddings", ".wpe"))]
    if len(layers) == 1 and getattr(layers[0], "padding_idx", 0) is None and "input_ids" in names and not is_list:
        tables = rows.select_columns(["input_ids"]).with_format("arrow").iter(10_000)
        lengths = np.concatenate([compute.list_value_length(table["input_ids"]).to_numpy() for table in tables])
        limit, row = layers[0].num_embeddings, int(lengths.argmax())
        if lengths[row] > limit:
            problem = f"{name} data, row {row}: {lengths[row]} tokens, but {kind} has {limit} positions."
            raise DataError(f"{problem} Cut rows when tokenizing: truncation=True, max_length={limit}.")


def check_weights(model: nn.Module, is_scaled: bool) -> None:
    """Names weights that train in float16, where small updates and the optimizer's squares are zero.

    Args:
        is_scaled: whether a loss scale is to be taken off their gradients, which torch refuses: ArgumentError.
    """
    half = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    text = f"{len(half)} weights that train are float16 ({shorten(half)}). Load the model with dtype=torch.float32 or "
    text += "make these float32 (p.data = p.data.float()); bf16=True or fp16=True then computes in half precision."
    if half and is_scaled:
        raise ArgumentError(text)
    if half:
        logger.warning("%s", text)


def without_compiling(trainer: Any) -> AbstractContextManager[Any]:
    """For a pass or two: a graph for these would take longer than all of them."""
    compiles = trainer.args.torch_compile or trainer._ext_planned.applied("compile")
    return torch.compiler.set_stance("force_eager") if compiles else nullcontext()


def shorten(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


# --- an evaluation before training ------------------------------------------------------------------------------------


def try_evaluation(trainer: Any) -> None:
    """Evaluates two batches of each set, for what would end the run at its first evaluation or save.

    Where these lack `metric_for_best_model`, all rows are looked at: names may be of classes. Nothing that training
    depends on changes. Left out: weights spread over processes, subclasses that evaluate their own way, streams,
    `batch_eval_metrics`, whose `compute_metrics` keeps sums, and `predict_with_generate`, since generating takes long.
    What fails otherwise is said: metrics may lack rows.

    Raises:
        ArgumentError: no number is called `metric_for_best_model`, or no checkpoint can hold a metric.
    """
    args, handler, compute = trainer.args, trainer.callback_handler, trainer.compute_metrics
    given, best = trainer._ext_eval_sets, trainer._ext_evaluator.best_metric_key
    hooks = {type(callback).on_evaluate.__module__.split(".")[0] for callback in handler.callbacks}
    if not hooks <= {"hf_ext", "transformers"}:  # others may add metrics
        best = "eval_"
    is_left_out = trainer._ext_backend.is_spread or find_override(trainer, *EVALUATION)
    if is_left_out or not _may_show_something(args, given, compute, best):
        return
    embeds = trainer._ext_parts.embedder.is_on
    sets = {prefix: trainer.embed_dataset(rows) for prefix, rows in given.items()} if embeds else given
    collator = trainer._get_collator_with_removed_columns(trainer.data_collator)
    found: dict[str, Any] | None = None

    def evaluate(most_rows: int) -> None:
        nonlocal found
        found = None
        metrics: dict[str, Any] = {}
        try:
            for prefix, rows in sets.items():
                places = np.unique(np.linspace(0, len(rows) - 1, min(most_rows, len(rows))).astype(int))
                # A collator that makes its generator when first called makes it for itself.
                one = copy.copy(collator)
                loader = DataLoader(Subset(rows, places.tolist()), args.eval_batch_size, collate_fn=one)
                asked = ("Evaluation", compute is None or None, trainer._ext_evaluator.ignore_keys, prefix)
                checked = compute and partial(_compute_checked, compute)
                metrics.update(trainer._ext_one_pass(loader, asked, checked).metrics or {})
            found = metrics
        except ArgumentError:
            raise
        except Exception as error:  # metrics may lack rows; what is wrong with them, an evaluation shows
            logger.warning("The evaluation is not checked before training: %s: %s", type(error).__name__, error)

    draws = (trainer, compute, trainer.compute_loss_func, collator, trainer.data_collator)
    holders = (*draws, *sets.values(), *given.values(), *trainer.model.modules())
    silent, team = replaced(handler, callbacks=[], eval_dataloader=None), trainer._ext_team
    quiet = warnings.catch_warnings(action="ignore")
    with kept_random_states(*holders), modes_kept(trainer.model), without_compiling(trainer), silent, quiet:
        for most_rows in (NUM_BATCHES * args.eval_batch_size, sys.maxsize):
            team.load_together(partial(evaluate, most_rows), trainer._ext_saver.describe_failure)
            if not team.agree([_lack(found, best)])[0]:
                return
    there = ", ".join(found or ()) or "nothing"
    raise ArgumentError(
        f"metric_for_best_model: evaluated before training there is no {best!r}, but {there}. Give one of these, or "
        f"nan at first{name_nearest(best, found or {})}"
    )


def _may_show_something(args: Any, sets: Mapping[str, Any], compute_metrics: Any, best: str) -> bool:
    """Whether an evaluation may end the run: without saves and a best model, no metric does; ours are known."""
    if args.eval_strategy == "no" or args.batch_eval_metrics or getattr(args, "predict_with_generate", False):
        return False
    if args.save_strategy == "no" and best == "eval_":
        return False
    names = getattr(compute_metrics, "names", ("loss",)) if isinstance(compute_metrics, RowMetrics | None) else None
    is_known = names and best in ("eval_", *(f"{prefix}_{name}" for prefix in sets for name in names))
    return not is_known and all(has_numbered_rows(rows) and len(rows) for rows in sets.values())


def _lack(metrics: dict[str, Any] | None, best: str) -> bool:
    # Of what Trainer measures itself, nothing is known here.
    if metrics is None or best == "eval_" or best.endswith(("_runtime", "_per_second")):
        return False
    return not isinstance(metrics.get(best, ""), Real | None)


def _compute_checked(compute: Callable[[Any], Any], prediction: Any) -> Any:
    """What `compute_metrics` returns; raises ArgumentError where checkpoints cannot hold it as JSON."""
    try:
        metrics = compute(prediction)
    except HfExtError as error:  # of so few rows there may be no score
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    if not isinstance(metrics, dict):
        raise ArgumentError(f"compute_metrics returned {type(metrics).__name__}: a dict of numbers is needed.")
    for name, value in denumpify_detensorize(metrics).items():
        try:
            json.dumps({name.strip(): value}, sort_keys=True)
        except (AttributeError, TypeError, ValueError) as error:
            problem = f"compute_metrics returned {name!r} as {type(value).__name__}, which no JSON holds: {error}."
            cure = f"Return one number, such as float(value); several (one per class) as '{name}_0', '{name}_1', ..."
            raise ArgumentError(f"{problem} {cure}") from None
    return metrics
