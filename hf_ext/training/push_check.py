"""Whether the model that comes back from the Hub is the one that was trained."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..hub.reloading import (
    can_reload,
    check_tokenizer,
    compare_predictions,
    list_local_references,
    reload_collator,
    reload_model,
)
from ..training_args import FastTrainingArguments

NUM_ROWS = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedInputs:
    """How the trained model's inputs are made.

    Attributes:
        tokenizer: None where rows come as numbers.
        collator: what makes a batch of rows.
        datasets: rows are taken from the first that has some; None and dictionaries of datasets are fine.
        prepare: makes a batch on the model's device, from a collator and rows, as for training.
    """

    tokenizer: Any
    collator: Any
    datasets: Iterable[Any]
    prepare: Callable[[Any, list[Any]], Any]

    def rows(self) -> list[Any]:
        """The first 16."""
        for dataset in itertools.chain(*(d.values() if isinstance(d, dict) else [d] for d in self.datasets)):
            if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
                rows = [dataset[i] for i in range(min(NUM_ROWS, len(dataset)))]
            else:
                rows = [] if dataset is None else list(itertools.islice(dataset, NUM_ROWS))
            if rows:
                return rows
        return []


def check_download(
    folder: Path, args: FastTrainingArguments, model: Any, accelerator: Any, inputs: TrainedInputs, is_spread: bool
) -> str:
    """What is known of the downloaded model in `folder`, as a sentence; for the main process.

    Args:
        model: the trained one, on its device.
        is_spread: whether FSDP or DeepSpeed spreads its weights over processes.

    Raises:
        HubError: it does not load, or predicts otherwise than `model`; see `compare_predictions`.

    Cost: a second model in memory, referenced encoders and base models included, and 16 rows through both.
    """
    _warn_of_references(model)
    if isinstance(inputs.tokenizer, PreTrainedTokenizerBase):
        check_tokenizer(inputs.tokenizer, folder)
    if is_spread:
        return "the bytes are the same; predictions were not compared, since weights are spread over processes"
    if not can_reload(model):
        return f"the bytes are the same; predictions were not compared, since {type(model).__name__} does not load"
    rows = inputs.rows()
    again = reload_model(model, folder).to(args.device)
    if not rows:
        return "the bytes are the same and load; predictions were not compared, since there are no rows"
    collators = (inputs.collator, reload_collator(inputs.collator, folder))
    batch, batch_again = (inputs.prepare(collator, rows) for collator in collators)
    model = accelerator.unwrap_model(model)
    loaded = set(getattr(model, "encoders", ()))
    precision = accelerator.autocast() if args.bf16 or args.fp16 else None
    try:
        return str(compare_predictions(model, batch, again, batch_again, precision))
    finally:
        if set(getattr(model, "encoders", ())) != loaded:  # predicting from sequences brought them back
            model.release_encoders()


def _warn_of_references(model: Any) -> None:
    for name in list_local_references(model):
        reason = f"{name} is a folder of this machine" if name else "its base model has no name"
        logger.warning(
            "The model on the Hub cannot be loaded elsewhere: %s, and its name was pushed, not its weights. Train "
            "with an encoder of the Hub, or with --save_full (affinity models), or push merged weights.",
            reason,
        )
