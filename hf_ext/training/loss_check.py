"""Before the first step: whether the user's own loss reaches the weights, and whether his metrics can be kept."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset
from transformers.trainer_utils import denumpify_detensorize

from ..argument_names import name_nearest
from ..data.columns import has_numbered_rows
from ..data.random_states import kept_random_states
from ..data.streams import is_stream
from ..errors import ArgumentError, HfExtError
from ..evaluation.row_metrics import RowMetrics
from ..plan import Plan
from ..speedups.base import recomputes
from ..speedups.sample_rows import modes_kept
from ..training_args import FastTrainingArguments
from .evaluation_schedule import is_evaluated
from .losses import DecidedLoss

NUM_ROWS = 8
NUM_BATCHES = 2
NUM_NAMED = 5
_OWN = ("hf_ext", "transformers", "peft")  # losses that are tested where they are written
_CURES = "Compute it from the outputs with torch operations: .item(), .detach(), numpy and torch.no_grad() cut it off."

logger = logging.getLogger(__name__)


class LossCheck:
    """One forward and one backward pass on a few training rows, where the loss is not ours or transformers' own.

    Such a loss is a `compute_loss_func`, a `compute_loss` of a subclass, or that of a model class from elsewhere. The
    rows (8, or a batch where that is smaller) are spread evenly over the training data. Nothing that training depends
    on changes: gradients are not accumulated, modes and random states are put back, the data loader is not read.
    Resumed runs were checked when they began. Left out, with a line in the log: streams, FSDP and DeepSpeed, whose
    passes cannot be repeated outside a step, reentrant activation checkpointing, which lacks `autograd.grad`, data
    loaders that do not read rows by number, and a `training_step` of the user's. So is, with a warning, a loss that
    needs more than a step has made of the trainer; on several processes, which must not part ways, that is an error.

    Warns of trainable parameters that get no gradient, or zero only; and, where steps are split, of a loss that is to
    divide by `num_items_in_batch` and is the same for twice as many items.

    Raises (when training starts):
        ArgumentError: the loss is no scalar, not finite (a warning with `nan_policy="skip"`), detached from the model,
            or, where speed-ups are asked for, does not change with any trainable parameter (else a warning).

    Cost: once, one step of 8 rows without an optimizer; their forward pass again where steps are split.
    """

    def __init__(self, args: FastTrainingArguments, plan: Plan):
        self._args = args
        self._compiles = bool(args.torch_compile) or any(
            d.name == "compile" and d.status == "applied" for d in plan.decisions
        )

    @property
    def num_parts(self) -> int:
        """How many losses Trainer adds up in a step, where it takes them for shares of one."""
        args = self._args
        return args.gradient_accumulation_steps * (args.world_size if args.average_tokens_across_devices else 1)

    def why_left_out(self, loader: Any, dataset: Any, is_spread: bool, override: str | None) -> str | None:
        """The reason not to check; None where there is none.

        Args:
            dataset: the training data; `loader`: what reads it.
            is_spread: whether FSDP or DeepSpeed holds the weights.
            override: who overrides `training_step`.
        """
        args = self._args
        if override:
            return f"{override} may do other things with it than it is checked for"
        if is_spread:
            return "FSDP and DeepSpeed hold the weights in parts"
        if is_stream(dataset):
            return "the training data is a stream"
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None or not has_numbered_rows(loader.dataset):
            return "the data loader does not read rows by their number"
        recomputing: Any = args.activation_checkpointing_kwargs or {}
        if args.activation_checkpointing and recomputing.get("use_reentrant"):
            return "activation checkpointing is reentrant"
        return None

    def attempt(self, check: Callable[[], None], reason: str | None, what: str = "loss") -> None:
        """Calls `check`, unless there is a `reason` not to, or says why it could not be done."""
        if reason is not None:
            logger.info("The %s is not checked before training: %s.", what, reason)
            return
        try:
            check()
        except Exception as error:  # whatever the user's code lacks outside a step: what is wrong in one, shows there
            is_loss = what == "loss"  # metrics are those of all processes, and may lack rows
            if isinstance(error, HfExtError if is_loss else ArgumentError) or (self._args.world_size > 1 and is_loss):
                raise
            logger.warning("The %s is not checked before training: %s: %s", what, type(error).__name__, error)

    def check(
        self, model: nn.Module, loader: DataLoader, compute: Callable[[Any], Any], name: str, draws: tuple[Any, ...]
    ) -> None:
        """Checks a loss on rows of `loader`'s dataset; see the class.

        Args:
            compute: the loss of a batch as the collator made it, as a training step computes it.
            name: of the loss, which messages begin with.
            draws: what may have generators of its own, beside the model and the data.
        """
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        draws = (*draws, *model.modules(), loader.dataset, loader.collate_fn)
        with (
            kept_random_states(*draws, getattr(loader.collate_fn, "data_collator", None)),
            self.modes_kept(model, recomputes(self._args)),
        ):
            rows = spread_rows(loader.dataset, min(NUM_ROWS, self._args.train_batch_size))
            loss = compute(next(iter(load_rows(loader.dataset, rows, loader.collate_fn, len(rows)))))
            self._check_value(loss, name)
            gradients = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
        missing = [name for name, gradient in zip(named, gradients) if gradient is None]
        zero = [name for name, gradient in zip(named, gradients) if gradient is not None and not gradient.any()]
        if len(missing) + len(zero) == len(named):
            text = (
                f"{name} does not change with any of the {len(named)} trainable parameters: all gradients are "
                f"{'zero' if zero else 'missing'}, so that training would change nothing. {_CURES}"
            )
            if self._args.speedups:
                raise ArgumentError(text)
            logger.warning("On the first rows: %s", text)  # on others it may, and Trainer would train
            return
        # LoRA's first matrix is multiplied by a second one that begins at zero.
        zero = [name for name in zero if "lora_A" not in name]
        for names, what in ((missing, "no gradient"), (zero, "a gradient of zero")):
            if names:
                logger.warning("%d trainable parameters get %s from the loss: %s.", len(names), what, _shorten(names))

    def warn_of_mean(self, name: str, loss: Any, twice: Any) -> None:
        """Where `twice`, for twice as many items in the step, is no other than `loss`."""
        if torch.is_tensor(loss) and torch.equal(loss, twice) and loss.any():
            logger.warning(
                "%s does not change with num_items_in_batch, and Trainer adds up the losses of a step's %d batches: if "
                "it is a mean, gradients are %d times too large. Divide a sum by num_items_in_batch.",
                *(name, self.num_parts, self.num_parts),
            )

    @contextmanager
    def modes_kept(self, model: nn.Module, trains: bool = False) -> Iterator[None]:
        """Evaluation mode (training mode where activations must be recomputed to fit); modes and buffers restored."""
        # A graph for one pass would take longer than all of it.
        with modes_kept(model), torch.compiler.set_stance("force_eager") if self._compiles else nullcontext():
            model.train(trains)
            yield

    def _check_value(self, loss: Any, name: str) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            given = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ArgumentError(f"{name} returned {given}: one number as a torch tensor is needed, such as a mean.")
        if not loss.requires_grad:
            raise ArgumentError(f"{name} is detached from the model: it has no gradient, so nothing trains. {_CURES}")
        if not torch.isfinite(loss):
            text = f"{name} is {loss.item()} on the first batch, before any step: look at its logarithms and divisions."
            if self._args.nan_policy != "skip":
                raise ArgumentError(text)
            logger.warning("%s", text)


def name_loss(loss: DecidedLoss, override: str | None) -> str:
    """A loss for messages; `override`: who overrides `compute_loss`."""
    if loss.is_users:
        return f"compute_loss_func ({getattr(loss.function, '__qualname__', loss.function)})"
    return f"The loss of {override or type(loss.model).__name__}"


def is_foreign(loss: DecidedLoss, override: str | None) -> bool:
    """Whether neither hf_ext nor transformers nor PEFT wrote the loss; `override`: who overrides `compute_loss`."""
    if loss.is_users or override is not None:
        return True
    definer = next(base for base in type(loss.model).__mro__ if "forward" in vars(base))
    return definer.__module__.split(".")[0] not in _OWN


def spread_rows(dataset: Any, number: int) -> np.ndarray:
    """Numbers of as many rows, from all over the data."""
    return np.unique(np.linspace(0, len(dataset) - 1, min(number, len(dataset))).astype(int))


def load_rows(dataset: Any, rows: np.ndarray, collator: Any, batch_size: int) -> DataLoader:
    """Batches of these rows; a collator that makes its generator when first called makes it for itself."""
    return DataLoader(Subset(dataset, rows.tolist()), batch_size, collate_fn=copy.copy(collator))


def _shorten(names: list[str]) -> str:
    more = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


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


# --- metrics --------------------------------------------------------------------------------------------------------


def is_tried(args: Any, sets: Mapping[str, Any], compute_metrics: Any, best: str) -> bool:
    """Whether an evaluation may show something new; of rows by number, since a stream is not read twice.

    Nor is it tried with `batch_eval_metrics`, whose `compute_metrics` keeps sums, and `predict_with_generate`, since
    generating takes long. Without saves and a best model, no metric ends a run.

    Args:
        sets: evaluation sets by the prefix of their metrics.
        best: `metric_for_best_model` as it is logged.
    """
    if not is_evaluated(args) or args.batch_eval_metrics or getattr(args, "predict_with_generate", False):
        return False
    if args.save_strategy == "no" and best == "eval_":
        return False
    names = getattr(compute_metrics, "names", ("loss",)) if isinstance(compute_metrics, RowMetrics | None) else None
    is_known = names and best in ("eval_", *(f"{prefix}_{name}" for prefix in sets for name in names))
    return not is_known and all(has_numbered_rows(rows) and len(rows) for rows in sets.values())


def try_evaluation(size: int, sets: Any, collator: Any, compute: Any, best: str, evaluate: Any, number: Any) -> bool:
    """Whether the metrics of some rows of each set lack `best`; all rows may have it: names may be of classes.

    Args:
        size: rows of a batch.
        sets: evaluation sets by the prefix of their metrics; `collator` makes their batches.
        compute: `compute_metrics`, or None.
        best: `metric_for_best_model` as it is logged, "eval_" without one.
        evaluate: returns the metrics of a loader, given their prefix and `compute_metrics`.
        number: of rows of each set; None for all, which must have it.

    Raises:
        ArgumentError: no number is called `best`; or see `check_metrics`.
    """
    checked = compute and partial(check_metrics, compute)
    metrics: dict[str, Any] = {}
    for prefix, rows in sets.items():
        loader = load_rows(rows, spread_rows(rows, number or len(rows)), collator, size)
        metrics.update(evaluate(loader, prefix, checked) or {})
    # Of what Trainer measures itself, nothing is known here.
    if best == "eval_" or best.endswith(("_runtime", "_per_second")) or isinstance(metrics.get(best, ""), Real | None):
        return False
    if number is not None:
        return True
    found = f"there is no {best!r}, but {', '.join(metrics) or 'nothing'}. Give one of these, or nan at first"
    raise ArgumentError(f"metric_for_best_model: evaluated before training {found}{name_nearest(best, metrics)}")


def check_metrics(compute: Callable[[Any], Any], prediction: Any) -> Any:
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
