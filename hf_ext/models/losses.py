"""Losses as sums over items, so that any split into micro-batches gives the same gradient.

Of heads of ours, and of transformers' own as sum over items / number of items in the whole effective batch.

transformers 5.24 averages each micro-batch on its own. With `accepts_loss_kwargs = False` (ESM) Trainer then takes the
mean of these means, so that a label in a short batch weighs more; without it (BERT, T5, ...: their `forward` takes any
keyword) Trainer believes that the model has divided by the number of items and adds the means up: gradients are as many
times too large as there are micro-batches, and as there are processes. Measured on masked language modelling in 4
micro-batches: ESM's gradient is 41 % off, BERT's 4.5 times too long.
Causal language models divide, but `eval_loss` is a mean of batch means; and of those whose class is not named
`...ForCausalLM` (GPT-2) Trainer counts each row's first token, which nothing predicts, as an item: with 14 tokens a row
the loss is 7 % too small. Image classifiers divide for single labels only.
Those of ESM C and ModernBERT divide; what the kind is for there is `eval_loss`, a mean of batch means everywhere.
`tests/test_upstream.py` says which divide.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.loss.loss_utils import LOSS_MAPPING

from .. import labels
from ..errors import ArgumentError, DataError
from ..files import Facts
from ..labels import UNKNOWN, LabelKind
from .kernels.replaced_forwards import has_forward_of, is_from
from .regression_losses import regression_loss

CERTAIN = 1e-6  # 1 - probability: below it a power below 1 would have no gradient

# --- by kind of label -------------------------------------------------------------------------------------------------


def class_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes cross entropy of each label, of the shape of `labels`; where a label is `UNKNOWN` it counts nothing.

    Args:
        logits: (..., classes) for numbers of classes; of the shape of `labels` where these are 0 or 1, float.
    """
    if labels.is_floating_point():
        return functional.binary_cross_entropy_with_logits(logits, labels.clamp(min=0), reduction="none")
    return _cross_entropy(logits, labels, "none").view_as(labels)


class NumberLoss:
    """The loss of labels that are numbers, which the model standardises: `config.loss`.

    Args:
        config: of an `AffinityModel`.
    """

    def __init__(self, config: Any):
        self.config = config

    def of_labels(self, output: Tensor, labels: Tensor, bounds: Tensor | None) -> Tensor:
        """Returns the loss of each label, of the shape of `labels`; `output` is the head's, `bounds` as there."""
        config = self.config
        mean, std = self._scale(output)
        standardised = (labels.float() - mean) / std
        return regression_loss(config.loss, output, standardised, bounds, config.huber_delta, config.tobit_scale)

    def to_logits(self, output: Tensor) -> Tensor:
        """Returns what the head puts out in label units."""
        mean, std = self._scale(output)
        return output * std + mean

    def to_output(self, logits: Tensor) -> Tensor:
        """Returns what the head put out."""
        mean, std = self._scale(logits)
        return (logits - mean) / std

    def _scale(self, like: Tensor) -> list[Any]:
        """Returns mean and standard deviation of labels: numbers, or of several values (k,) each."""
        scale = self.config.label_mean, self.config.label_std
        return [like.new_tensor(value) if isinstance(value, list) else value for value in scale]


class ClassLoss(NumberLoss):
    """The cross entropy of labels that are names, weighted where `config` says so; their `logits` are calibrated."""

    def of_labels(self, output: Tensor, labels: Tensor, bounds: Tensor | None) -> Tensor:
        """Returns cross entropies; the focal loss multiplies each by a power of 1 - probability (arXiv:1708.02002).

        Weighted ones are divided by the number of labels, too, and not by their weights, which differ from batch to
        batch: over all training rows balanced weights are 1 on average, however a step is split.
        """
        config = self.config
        losses = class_losses(output, labels)
        if config.loss == "focal":
            losses = losses * (-torch.expm1(-losses)).clamp(min=CERTAIN) ** config.focal_gamma
        if not config.class_weights:
            return losses
        weights = output.new_tensor(config.class_weights)
        known = labels.clamp(min=0).long()
        return losses * (weights[known] if weights.ndim == 1 else torch.where(known > 0, weights[1], weights[0]))

    def to_logits(self, output: Tensor) -> Tensor:
        return output / self.config.temperature

    def to_output(self, logits: Tensor) -> Tensor:
        """Returns the logits: evaluations while training see the head before it is calibrated."""
        return logits


def balanced_weights(kind: LabelKind, facts: Facts) -> list[Any]:
    """Computes weights with which each class counts as much as others: one each; of several labels [lacking, having].

    A class of m of n labels weighs n / (k * m), where k classes occur, as `class_weight="balanced"` of scikit-learn
    has it; of several labels each is two classes. What does not occur weighs 1. `facts`: `kind.facts_of` of rows.
    """
    counts = np.array([*facts["counts"].values()])
    if kind.num_classes is None:
        counts = np.stack([facts["num_known"] - counts, counts])
    occurs = counts > 0
    weights = counts.sum(0) / (occurs.sum(0) * np.maximum(counts, 1))
    return np.where(occurs, weights, 1.0).tolist()


LOSSES: dict[type[LabelKind], type[NumberLoss]] = {
    labels.Number: NumberLoss,
    labels.Numbers: NumberLoss,
    labels.Classes: ClassLoss,
    labels.LabelColumns: ClassLoss,
    labels.LabelSets: ClassLoss,
    labels.ResidueClasses: ClassLoss,
    labels.ResidueNumbers: NumberLoss,
}


# --- heads of transformers --------------------------------------------------------------------------------------------


# Items: labels that are not -100; those but for each row's first; labels of whole sequences, images, ...
LossKind = Literal["tokens", "next_tokens", "sequences"]

_FAMILIES = ("Albert", "Bert", "Electra", "Esm", "Esmc", "RoFormer", "Roberta")
_TEXT = ("DistilBert", "GPT2", "ModernBert")
_IMAGES = ("Beit", "ConvNext", "Dinov2", "ResNet", "Swin", "ViT")
_CAUSAL = ("GPTNeoX", "Gemma", "Llama", "Mistral", "OPT", "Phi3", "Qwen2", "Qwen3", "SmolLM3")
LOSS_KINDS: dict[str, LossKind] = {
    **{f"{family}ForMaskedLM": "tokens" for family in (*_FAMILIES, "ModernBert")},
    **{f"{family}ForTokenClassification": "tokens" for family in (*_FAMILIES, "T5")},
    **{f"{family}ForSequenceClassification": "sequences" for family in (*_FAMILIES, *_TEXT, "T5")},
    **{f"{family}ForImageClassification": "sequences" for family in _IMAGES},
    **{f"{family}ForCausalLM": "next_tokens" for family in _CAUSAL},
    "GPT2LMHeadModel": "next_tokens",
    "T5ForConditionalGeneration": "tokens",
}


def find_loss_kind(model: nn.Module) -> LossKind | None:
    """Finds what the loss of `model` counts; None where its loss is not known to be that of a class in `LOSS_KINDS`.

    A subclass is covered as long as its `forward` and its `loss_function` are those of transformers, and no user put
    others on the model. A model of ours that computes its loss with `exact_loss` says so by itself, as `loss_kind`.
    """
    for base in type(model).__mro__:
        if base.__module__.startswith("transformers.models.") and base.__name__ in LOSS_KINDS:
            return LOSS_KINDS[base.__name__] if has_loss_of(model, base) else None
        if "loss_kind" in vars(base):
            return base.loss_kind if has_forward_of(model, base) else None  # type: ignore[attr-defined]
    return None


def has_loss_of(model: Any, family: Any) -> bool:
    """Returns whether `model` computes the loss of a class of transformers: by its forward and its loss function.

    transformers finds the function by the name of the class: for a subclass of another name it may be another one,
    that of causal language models.
    """
    if not has_forward_of(model, family):
        return False
    if "loss_function" not in inspect.unwrap(family.forward).__code__.co_names:  # computed right there, as ESM-2's
        return True
    named = next((name for name in LOSS_MAPPING if family.__name__.endswith(name)), "ForCausalLM")
    return model.loss_function is LOSS_MAPPING[named] and is_from(model.loss_function, ("transformers",))


def exact_loss(
    kind: LossKind,
    config: Any,
    logits: Tensor,
    labels: Tensor | None,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """Divides the summed losses of all items in this batch by the number of items in the whole effective batch.

    Args:
        kind: "tokens": cross entropy of `logits` (n, tokens, classes) with `labels` (n, tokens), -100 left out;
            "next_tokens": of each position's logits with the label after it.
            "sequences": by `config.problem_type`, found from the first labels where it is None, as in transformers:
            mean squared error (regression), cross entropy (single label; -100 left out) or binary cross entropy
            (several labels), of `logits` (n, num_labels).
        config: the model's.
        num_items: items in the effective batch; None: those in this batch.

    Returns:
        Scalar, float32 (float64 for float64 logits). Zero where there is no item at all, instead of NaN.

    Raises:
        DataError: `labels` is None.
        ArgumentError: `config.problem_type` is none of the three.
    """
    if labels is None:
        raise DataError("The training batches have no 'labels': the collator must make them.")
    logits, labels = aligned(kind, logits, labels.to(logits.device))
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    total = _sequence_loss(config, logits, labels) if kind == "sequences" else _cross_entropy(logits, labels)
    if num_items is None:
        num_items = _items(labels).sum()
    return total / torch.as_tensor(num_items, device=total.device).clamp(min=1)


def sum_loss_rows(kind: LossKind, config: Any, logits: Tensor, labels: Tensor) -> Tensor:
    """Sums what each row adds to `exact_loss`, so that batches of any size add up to one mean: (n, 2), float32.

    Args:
        kind, config, logits, labels: as in `exact_loss`.

    Returns:
        Summed loss and number of items of each row; of no item both are 0.

    Cost: the loss once more.
    """
    logits, labels = aligned(kind, logits.float(), labels.to(logits.device))
    is_whole = kind == "sequences"
    losses = _sequence_loss(config, logits, labels, "none") if is_whole else _cross_entropy(logits, labels, "none")
    return torch.stack([each.reshape(len(labels), -1).float().sum(1) for each in (losses, _items(labels))], dim=1)


def aligned(kind: LossKind, logits: Any, labels: Tensor) -> tuple[Any, Tensor]:
    """Returns logits and labels, position by position what predicts and what is predicted."""
    return (logits[:, :-1], labels[:, 1:]) if kind == "next_tokens" else (logits, labels)


def _items(labels: Tensor) -> Tensor:
    """Marks what counts in a batch: labels that are measurements (float), of classes those that are not -100."""
    return torch.ones_like(labels, dtype=torch.bool) if labels.is_floating_point() else labels.ne(UNKNOWN)


def _cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction=reduction)


def _sequence_loss(config: Any, logits: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    if config.problem_type is None:  # transformers' rule
        config.problem_type = (
            "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
        )
        if config.num_labels == 1:
            config.problem_type = "regression"
    problem = config.problem_type
    if problem == "regression":
        return functional.mse_loss(logits.reshape(-1), labels.reshape(-1), reduction=reduction)
    if problem == "single_label_classification":
        return _cross_entropy(logits, labels, reduction)
    if problem == "multi_label_classification":
        return functional.binary_cross_entropy_with_logits(logits, labels, reduction=reduction)
    raise ArgumentError(
        f"problem_type={problem!r}: allowed are regression, single_label_classification, multi_label_classification."
    )
