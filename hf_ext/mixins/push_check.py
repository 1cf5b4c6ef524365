"""Whether the model that comes back from the Hub is the one that was trained."""

from __future__ import annotations

import itertools
import logging
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

NUM_ROWS = 16

logger = logging.getLogger(__name__)


class PushCheckMixin:
    """Loads a downloaded model and compares its predictions for 16 rows with those of `trainer.model`."""

    args: Any
    model: Any
    accelerator: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    processing_class: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool

    def check_download(self, folder: Path) -> str:
        """What is known of the model in `folder`, as a sentence; for the main process.

        Raises:
            HubError: it does not load, or predicts otherwise than `trainer.model`; see `compare_predictions`.

        Cost: a second model in memory, referenced encoders and base models included, and 16 rows through both.
        """
        model = self.model
        for name in list_local_references(model):
            reason = f"{name} is a folder of this machine" if name else "its base model has no name"
            logger.warning(
                "The model on the Hub cannot be loaded elsewhere: %s, and its name was pushed, not its weights. Train "
                "with an encoder of the Hub, or with --save_full (affinity models), or push merged weights.",
                reason,
            )
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            check_tokenizer(tokenizer, folder)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return "the bytes are the same; predictions were not compared, since weights are spread over processes"
        if not can_reload(model):
            return f"the bytes are the same; predictions were not compared, since {type(model).__name__} does not load"
        rows = self._rows_to_compare()
        again = reload_model(model, folder).to(self.args.device)
        if not rows:
            return "the bytes are the same and load; predictions were not compared, since there are no rows"
        return str(self._compare(again, reload_collator(self.data_collator, folder), rows))

    def _compare(self, again: Any, collator: Any, rows: list[Any]) -> Any:
        model = self.accelerator.unwrap_model(self.model)
        loaded = set(getattr(model, "encoders", ()))
        batch, batch_again = (
            self._prepare_inputs(self._get_collator_with_removed_columns(one)(rows))  # type: ignore[attr-defined]
            for one in (self.data_collator, collator)
        )
        is_half = self.args.bf16 or self.args.fp16
        try:
            return compare_predictions(
                model, batch, again, batch_again, self.accelerator.autocast() if is_half else None
            )
        finally:
            if set(getattr(model, "encoders", ())) != loaded:  # predicting from sequences brought them back
                model.release_encoders()

    def _rows_to_compare(self) -> list[Any]:
        evaluated = self.eval_dataset
        several = [*evaluated.values()] if isinstance(evaluated, dict) else [evaluated]
        for dataset in [*several, self.train_dataset]:
            if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
                rows = [dataset[i] for i in range(min(NUM_ROWS, len(dataset)))]
            else:
                rows = [] if dataset is None else list(itertools.islice(dataset, NUM_ROWS))
            if rows:
                return rows
        return []
