"""Masked-language-model training: arguments, building model, collator and trainer, and scoring."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .results import EVALUATION_METRICS, compute_metrics, sum_rows
else:
    __getattr__, __dir__, __all__ = offer(__name__)
