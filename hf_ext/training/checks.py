"""What would end a run later, or teach it nothing, is said before its first step, or in it.

Trainer reports success for runs of no step, and trains one where `max_steps` is 0.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
import torch
from pyarrow import compute
from torch import nn
from torch.utils.data import DataLoader, Subset
from transformers import TrainerCallback, TrainingArguments

from ..arguments.checks import check_choices
from ..arguments.names import name_nearest
from ..data.columns import column_names, column_values, has_numbered_rows
from ..data.random_states import kept_random_states
from ..errors import ArgumentError, DataError
from ..models.lora import unwrap_peft
from ..models.process_settings import replaced
from ..overrides import BATCHES, EVALUATION, find_override, find_own_loss
from ..speedups.sample import modes_kept

NUM_BATCHES = 2  # of each evaluation set
MIN_ROWS = 4  # of which nothing is known, for an error: one may be odd
NUM_NAMED = 5
_REMEDY = "Many tokenizers for proteins want blanks between residues, ' '.join(sequence), others want capitals."

logger = logging.getLogger(__name__)


class Checks(TrainerCallback):
    """Looks at rows, weights and metrics when a run begins, at tokens and gradients in its first step.

    Raises (when training begins, or in its first step):
        DataError: a label that is text, None to train on, or a class the model does not have; a row that is too long;
            text that the tokenizer does not know at all.
        ArgumentError: weights train in float16 under a loss scale; evaluations do not give `metric_for_best_model`.

    Cost: one look at a column or two; where that metric is the user's own, two batches of each evaluation set.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._has_seen = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Model and optimizer are ready, and nobody has begun to count."""
        trainer = self._trainer
        if not find_own_loss(trainer, trainer.compute_loss_func) and not find_override(trainer, *BATCHES):
            num_seen = state.max_steps * trainer.get_total_train_batch_size(args)
            check_rows("train", trainer.train_dataset, trainer.model, trainer.data_collator, num_seen)
            for name, rows in (trainer._ext_eval_sets if args.eval_strategy != "no" else {}).items():
                check_rows(name, rows, trainer.model, trainer.data_collator)
        if not trainer._ext_backend.is_spread:  # DeepSpeed keeps float32 of its own
            check_weights(trainer.model, getattr(trainer.accelerator, "scaler", None) is not None)
        if state.global_step == 0:  # a resumed run was looked at when it began
            check_best_metric(trainer)

    def see(self, batch: Any) -> None:
        """Looks whether the tokenizer, where the trainer or its collator has one, knows the text of the first batch."""
        tokenizer: Any = self._trainer.processing_class or getattr(self._trainer.data_collator, "tokenizer", None)
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        unknown = getattr(tokenizer, "unk_token_id", None)
        if self._has_seen or unknown is None or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return
        self._has_seen = True
        framing = {*tokenizer.all_special_ids} - {unknown}
        tokens = ids[torch.isin(ids, torch.tensor([*framing], device=ids.device), invert=True)]
        share = tokens.eq(unknown).float().mean().item()  # NaN where there is none
        text = f"{share:.0%} of the tokens of the first batch are {tokenizer.unk_token!r}. {_REMEDY}"
        if share == 1 and len(ids) >= MIN_ROWS:
            raise DataError(f"Nothing can be learned: {text}")
        if share > 0.5:
            logger.warning("%s", text)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """In the first step, names weights that a loss of the user's, or of a model from elsewhere, does not reach."""
        trainer = self._trainer
        if state.global_step > 0 or trainer._ext_backend.is_spread or not trainer._ext_losses.decide().is_foreign:
            return
        missing = [name for name, p in trainer.model.named_parameters() if p.requires_grad and p.grad is None]
        if missing:
            logger.warning(
                "%d trainable parameters get no gradient from the loss: %s.", len(missing), _shorten(missing)
            )


def check_training(args: TrainingArguments, rows: Any, model: Any = None) -> None:
    """Before training, and not before an evaluation, which needs no steps.

    Args:
        args: of the trainer.
        rows: that it will train on; None where somebody else makes its loader.
        model: that it will train.

    Raises:
        ArgumentError: the arguments ask for no step, or `dataloader_drop_last` leaves none; a word that is no choice
            was assigned to one after they were built; adapters whose ranks nobody would change (AdaLoRA).
        DataError: there are no rows.
    """
    check_choices(args)
    if has_numbered_rows(rows) and len(rows) == 0:
        raise DataError("The training set has no rows: nothing can be trained.")  # torch would speak of num_samples
    of_a_batch = args.train_batch_size * args.world_size
    if args.dataloader_drop_last and has_numbered_rows(rows) and len(rows) < of_a_batch:
        raise ArgumentError(
            f"dataloader_drop_last leaves no batch: {len(rows)} training rows are fewer than the {of_a_batch} of one "
            f"batch (per_device_train_batch_size={args.per_device_train_batch_size}, {args.world_size} process(es)). "
            "Leave dataloader_drop_last out, or lower per_device_train_batch_size."
        )
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


def check_rows(name: str, rows: Any, model: Any, collator: Any, num_seen: float = math.inf) -> None:
    """Looks at labels and lengths of a `Dataset`, for models and collators of transformers, which take no others.

    Models that count positions from their padding token take longer rows of padding.

    Args:
        name: of the data, for messages.
        num_seen: so many rows are read; where there are more, a row may not come up, and none is looked at.

    Raises:
        DataError: see `Checks`.
    """
    inner = unwrap_peft(model)
    modules = f"{type(inner).__module__} {getattr(collator, '__module__', '')}"
    is_plain = isinstance(rows, datasets.Dataset) and rows.format["type"] != "custom"
    if not is_plain or not 0 < len(rows) <= num_seen or modules.count("transformers.") < 2:
        return
    kind, config, names = type(inner).__name__, inner.config, {*column_names(rows)}
    is_one_of = config.num_labels > 1 and config.problem_type in (None, "single_label_classification")
    needed = f"a whole number from 0 to {config.num_labels - 1} (num_labels)" if is_one_of else "a number"
    for column in {"label", "labels"} & names if kind.endswith("ForSequenceClassification") else ():
        for i, value in enumerate(column_values(rows, column)):
            is_other = is_one_of and isinstance(value, int) and value != -100 and not 0 <= value < config.num_labels
            if (value is None and name == "train") or isinstance(value, str) or is_other:  # else there is no loss
                raise DataError(f"{name} data, row {i}, column {column!r}: {value!r}, but {kind} takes {needed}.")
    layers = [part for path, part in inner.named_modules() if path.endswith((".position_embeddings", ".wpe"))]
    if len(layers) == 1 and getattr(layers[0], "padding_idx", 0) is None and "input_ids" in names:
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
    text = f"{len(half)} weights that train are float16 ({_shorten(half)}). Load the model with dtype=torch.float32 or "
    text += "make these float32 (p.data = p.data.float()); bf16=True or fp16=True then computes in half precision."
    if half and is_scaled:
        raise ArgumentError(text)
    if half:
        logger.warning("%s", text)


def check_best_metric(trainer: Any) -> None:
    """Raises ArgumentError where evaluations will not give `metric_for_best_model`, which ends a run at the first one.

    Names that nobody knows are tried, on two batches of each set. Not looked at: weights spread over processes,
    subclasses that evaluate their own way, and callbacks of the user's that may add metrics.
    """
    args, sets = trainer.args, trainer._ext_eval_sets
    asked = args.metric_for_best_model if args.eval_strategy != "no" else None
    hooks = {type(callback).on_evaluate.__module__.split(".")[0] for callback in trainer.callback_handler.callbacks}
    is_left = (
        trainer._ext_backend.is_spread or find_override(trainer, *EVALUATION) or hooks - {"hf_ext", "transformers"}
    )
    if asked is None or is_left or asked.endswith(("_runtime", "_per_second")):  # measured by Trainer
        return
    best, names = f"eval_{asked.removeprefix('eval_')}", {"loss", *getattr(trainer.compute_metrics, "names", ())}
    found: Any = {f"{prefix}_{name}" for prefix in sets for name in names}
    if best not in found and trainer.compute_metrics is not None:
        found = _try_evaluation(trainer)
    if found is not None and best not in found:
        raise ArgumentError(
            f"metric_for_best_model: evaluated before training there is no {best!r}, but {', '.join(sorted(found))}. "
            f"Give one of these, or return it as nan where it has no value{name_nearest(best, found)}"
        )


def _try_evaluation(trainer: Any) -> dict[str, Any] | None:
    """Metrics of two batches of each set, spread over it; None where they cannot be had, which is said.

    Nothing that training depends on changes. Streams, `batch_eval_metrics`, whose `compute_metrics` keeps sums, and
    `predict_with_generate`, since generating takes long, are not tried.
    """
    args, sets = trainer.args, trainer._ext_eval_sets
    found: dict[str, Any] = {}
    is_slow = args.batch_eval_metrics or getattr(args, "predict_with_generate", False)
    if is_slow or not all(has_numbered_rows(rows) and len(rows) for rows in sets.values()):
        return None
    if trainer._ext_parts.embedder.is_on:
        sets = {prefix: trainer.embed_dataset(rows) for prefix, rows in sets.items()}
    collator = trainer._get_collator_with_removed_columns(trainer.data_collator)
    draws = (trainer, trainer.compute_metrics, trainer.compute_loss_func, collator, trainer.data_collator)
    silent = replaced(trainer.callback_handler, callbacks=[], eval_dataloader=None)
    kept = kept_random_states(*draws, *sets.values(), *trainer.model.modules())
    with kept, modes_kept(trainer.model), silent, warnings.catch_warnings(action="ignore"):
        try:
            for prefix, rows in sets.items():
                places = np.linspace(0, len(rows) - 1, min(NUM_BATCHES * args.eval_batch_size, len(rows))).astype(int)
                # A collator that makes its generator when first called makes it for itself.
                one = copy.copy(collator)
                loader = DataLoader(Subset(rows, np.unique(places).tolist()), args.eval_batch_size, collate_fn=one)
                found |= trainer.evaluation_loop(loader, "Evaluation", metric_key_prefix=prefix).metrics or {}
        except Exception as error:  # metrics may lack rows; what is wrong with them, an evaluation shows
            logger.warning("The evaluation is not checked before training: %s: %s", type(error).__name__, error)
            return None
    return found


def _shorten(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
