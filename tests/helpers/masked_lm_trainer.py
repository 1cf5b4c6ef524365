"""The trainer that a run of masked language modelling has, of parts at hand."""

from typing import Any

from transformers import Trainer

from hf_ext.masked_lm.steps import MaskedLMData, build
from hf_ext.tasks.running import build_stock_trainer
from hf_ext.trainer import FastTrainer


def build_trainer(model: Any, args: Any, collator: Any, splits: dict[str, Any], explicit: Any) -> Trainer:
    """Of hf_ext where `explicit` is None; else stock Trainer, and `explicit` are the arguments that the user set."""
    unread: Any = None
    parts = build(unread, MaskedLMData(model, collator, unread, splits))
    return FastTrainer(args=args, **parts) if explicit is None else build_stock_trainer(args, explicit, **parts)
