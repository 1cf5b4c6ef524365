"""What would end a run later, or teach it nothing, is said before its first step, in it, or after an evaluation.

Trainer reports success for runs of no step, and trains one where `max_steps` is 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ..arguments import check_choices, name_nearest
from ..data import has_numbered_rows
from ..errors import ArgumentError, DataError
from ..evaluation import RowMetrics, metrics_of
from ..files import Json
from ..labels import list_some
from ..training_args import FastTrainingArguments
from .backends import Backend
from .early_stopping import Evaluation
from .host import EVALUATION, Host, find_override, name_evaluation_sets
from .losses import Losses

EARLY_FRACTION = 0.1  # of all steps, in which a fresh head may still be nearly constant
SAID_EARLY = ("bfloat16", "not finite predictions", "not finite references")  # that time does not fix
MIN_ROWS = 4  # of which nothing is known, for an error: one may be odd
_REMEDY = "Many tokenizers for proteins want blanks between residues, ' '.join(sequence), others want capitals."

logger = logging.getLogger(__name__)


class Checks(TrainerCallback):
    """Looks at weights and the name of the best metric when a run begins, at tokens and gradients in its first step.

    Raises (when training begins, or in its first step):
        DataError: text that the tokenizer does not know at all.
        ArgumentError: weights train in float16 under a loss scale; evaluations cannot give `metric_for_best_model`.
    """

    def __init__(self, trainer: Host, backend: Backend, losses: Losses):
        self._trainer = trainer
        self._backend = backend
        self._losses = losses
        self._has_seen = False

    def on_train_begin(self, *event: object, **kwargs: object) -> None:
        """Checks weights and the best metric's name, once model and optimizer are prepared."""
        trainer = self._trainer
        if not self._backend.is_sharded:  # DeepSpeed keeps float32 of its own
            check_weights(trainer.model, getattr(trainer.accelerator, "scaler", None) is not None)
        check_best_metric(trainer)

    def see(self, batch: object) -> None:
        """Looks whether the tokenizer, where the trainer or its collator has one, knows the text of the first batch."""
        tokenizer: Any = self._trainer.processing_class or getattr(self._trainer.data_collator, "tokenizer", None)
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        unknown = getattr(tokenizer, "unk_token_id", None)
        if self._has_seen or unknown is None or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return
        self._has_seen = True
        framing = {*tokenizer.all_special_ids} - {unknown}
        tokens = ids[torch.isin(ids, torch.tensor([*framing], device=ids.device), invert=True)]
        fraction = tokens.eq(unknown).float().mean().item()  # NaN where there is none
        text = f"{fraction:.0%} of the tokens of the first batch are {tokenizer.unk_token!r}. {_REMEDY}"
        if fraction == 1 and len(ids) >= MIN_ROWS:
            raise DataError(f"Nothing can be learned: {text}")
        if fraction > 0.5:
            logger.warning("%s", text)

    def on_pre_optimizer_step(self, *event: object, **kwargs: object) -> None:
        """Names, in the first step, weights that a loss of the user's, or of a model from elsewhere, does not reach."""
        trainer = self._trainer
        if trainer.state.global_step > 0 or self._backend.is_sharded or not self._losses.decide().is_foreign:
            return
        missing = [name for name, p in trainer.model.named_parameters() if p.requires_grad and p.grad is None]
        if missing:
            logger.warning(
                "%d trainable parameters get no gradient from the loss: %s.", len(missing), list_some(missing)
            )


def check_training(args: FastTrainingArguments, rows: Any, model: nn.Module | None) -> None:
    """Refuses what cannot train, before training, and not before an evaluation, which needs no steps.

    Args:
        args: of the trainer.
        rows: that it will train on; None where the user's code makes its loader.
        model: that it will train.

    Raises:
        ArgumentError: the arguments ask for no step, or `dataloader_drop_last` leaves none; a word that is no choice
            was assigned to one after they were built; adapters whose ranks would never change (AdaLoRA).
        DataError: there are no rows.
    """
    check_choices(args)
    if not {"activation_checkpointing", "gradient_checkpointing"} & args.explicit_fields:
        # That of a preset, which is for any model; where the user typed it, Trainer says that this one cannot.
        can = getattr(model, "supports_gradient_checkpointing", False)
        args.activation_checkpointing = bool(args.activation_checkpointing and can)
    if has_numbered_rows(rows) and len(rows) == 0:
        raise DataError("The training set has no rows: nothing can be trained.")  # torch would speak of num_samples
    of_a_batch = args.train_batch_size * args.world_size
    if args.dataloader_drop_last and has_numbered_rows(rows) and len(rows) < of_a_batch:
        raise ArgumentError(
            f"dataloader_drop_last leaves no batch: {len(rows)} training rows are fewer than the {of_a_batch} of one "
            f"batch (per_device_train_batch_size={args.per_device_train_batch_size}, {args.world_size} process(es)). "
            "Leave dataloader_drop_last out, or lower per_device_train_batch_size."
        )
    every = args.keep_every_epochs or 0
    is_too_short = args.max_steps < 0 and args.num_train_epochs < every
    if every and (is_too_short or args.save_strategy == "best" or not has_numbered_rows(rows or [])):
        raise ArgumentError(
            f"keep_every_epochs={every}: needs that many epochs (num_train_epochs={args.num_train_epochs:g}) of rows "
            "whose number is known, which streams do not have, and another --save_strategy than best."
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


def check_weights(model: nn.Module, is_scaled: bool) -> None:
    """Names weights that train in float16, where small updates and the optimizer's squares are zero.

    Args:
        is_scaled: whether a loss scale is to be taken off their gradients, which torch refuses: ArgumentError.
    """
    half = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    text = (
        f"{len(half)} weights that train are float16 ({list_some(half)}). Load the model with dtype=torch.float32 or "
    )
    text += "make these float32 (p.data = p.data.float()); bf16=True or fp16=True then computes in half precision."
    if half and is_scaled:
        raise ArgumentError(text)
    if half:
        logger.warning("%s", text)


def check_best_metric(trainer: Host) -> None:
    """Raises ArgumentError where evaluations cannot give `metric_for_best_model`, which ends a run at the first one.

    Of a `compute_metrics` that does not tell its `names`, any name of one of the evaluation sets may be. Not looked at:
    subclasses that evaluate their own way, and callbacks of the user's that may add metrics.
    """
    args = trainer.args
    sets = name_evaluation_sets(trainer.eval_dataset)
    asked = args.metric_for_best_model if args.eval_strategy != "no" else None
    hooks = {type(callback).on_evaluate.__module__.split(".")[0] for callback in trainer.callback_handler.callbacks}
    if asked is None or hooks - {"hf_ext", "transformers"} or find_override(trainer, *EVALUATION):
        return
    best = f"eval_{asked.removeprefix('eval_')}"
    names = {"loss", *getattr(trainer.compute_metrics, "names", ())}
    found = {f"{prefix}_{name}" for prefix in sets for name in names}
    may_be_own = trainer.compute_metrics is not None and not hasattr(trainer.compute_metrics, "names")
    is_of_a_set = best.startswith(tuple(f"{prefix}_" for prefix in sets))
    is_measured = asked.endswith(("_runtime", "_per_second"))  # by Trainer
    if best not in found and not (is_of_a_set and (may_be_own or is_measured)):
        raise ArgumentError(
            f"metric_for_best_model: evaluations give no {best!r}, but {', '.join(sorted(found))}"
            f"{' and more of these sets' if may_be_own else ''}. Give one of these{name_nearest(best, found)}"
        )


# --- predictions that collapse ----------------------------------------------------------------------------------------


class CollapseAlarm:
    """Warns when predictions collapse while a model trains: few values, small deviation, bfloat16 rounding, one class.

    Looks at every evaluation that the loop asks for, of one number per row with labels that are no classes, and of
    other kinds of labels where `compute_metrics` is a `RowMetrics` of them. Each alarm is said once until it goes away,
    and stands in `alarms` ("step", "name" of the evaluation set, "alarms"). Within the learning rate's warm-up and the
    first tenth of the steps only rounding and values that are not finite are alarming.
    Logged: `eval_num_distinct` and `eval_spread_ratio` (the predictions'
    standard deviation divided by the labels').

    Cost: two sorts per evaluation: 10 ms for 26,000 rows.
    """

    name = "collapse_alarm"

    def __init__(self, trainer: Host):
        self._trainer = trainer
        self.alarms: list[Json] = []
        self._said: dict[str, list[str]] = {}  # name of the evaluation set -> which alarms hold

    def see(self, evaluation: Evaluation) -> dict[str, float]:
        """Says what is alarming; returns how much the predictions vary."""
        compute = self._trainer.compute_metrics
        predictions = evaluation.predictions
        metrics = metrics_of(compute.kind if isinstance(compute, RowMetrics) else None)
        if not metrics.can_examine(predictions, evaluation.labels):
            return {}
        args = self._trainer.args
        state = self._trainer.state
        name = evaluation.name
        step = state.global_step
        prefix = f"eval_{name}_" if name else "eval_"
        report, alarms = metrics.examine(metrics.kind.to_predictions(predictions), evaluation.labels)
        is_early = step <= max(args.get_warmup_steps(state.max_steps), EARLY_FRACTION * state.max_steps)
        due = {about: text for about, text in alarms.items() if not is_early or about in SAID_EARLY}
        new = [text for about, text in due.items() if about not in self._said.get(name, [])]
        of = f" ({name})" if name else ""
        if new:
            self.alarms.append({"step": step, "name": name, "alarms": new})
        if new and args.process_index == 0:
            logger.warning("ALARM at step %d%s: %s", step, of, " ".join(new))
        self._said[name] = [*due]
        logged = {"num_distinct": report["num_distinct"], "spread_ratio": report["spread_ratio"]}
        return {f"{prefix}{key}": float(value) for key, value in logged.items() if value is not None}

    def state(self) -> Json | None:
        """Returns what was said, for a checkpoint; None where nothing was looked at."""
        return {"alarms": self.alarms, "said": self._said} if self._said else None

    def load(self, tree: Json | None) -> None:
        """Restores what the run was that gave this state; afresh without one."""
        self.alarms, self._said = (tree["alarms"], tree["said"]) if tree else ([], {})
