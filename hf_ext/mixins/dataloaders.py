"""Four places where stock data loading gives wrong results for text columns and several evaluation sets."""

from __future__ import annotations

from typing import Any

from torch.utils.data import RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..data.columns import row_lengths


class DataLoaderMixin:
    """Keeps text columns for collators that read them, evaluation in the order of the data, and loaders apart."""

    args: Any
    data_collator: Any
    train_dataset: Any
    eval_dataset: Any

    def _reads_text(self) -> bool:
        return hasattr(self.data_collator, "columns")

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        if self._reads_text():
            return dataset
        return super()._remove_unused_columns(dataset, description)  # type: ignore[misc]

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        if self._reads_text():
            return data_collator
        return super()._get_collator_with_removed_columns(data_collator, description)  # type: ignore[misc]

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        # transformers 5.23 groups by a column of token ids or of lengths; text has neither.
        rows = self.train_dataset if train_dataset is None else train_dataset
        by_length = self.args.train_sampling_strategy == "group_by_length"
        if not (by_length and self._reads_text() and hasattr(rows, "__len__")):
            return super()._get_train_sampler(train_dataset)  # type: ignore[misc]
        text = getattr(rows, "live", rows)  # of rows whose frozen inputs are cached, what is left to encode
        if text is None:
            return RandomSampler(rows)
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return LengthGroupedSampler(batch, lengths=row_lengths(text, self.data_collator.columns))

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        # With group_by_length, transformers 5.23 also reorders evaluation, so predictions do not line up with the rows
        # (https://github.com/huggingface/transformers/pull/33514). Remove when `predict` keeps the order of the data.
        if hasattr(eval_dataset, "__len__") and self.args.world_size <= 1:
            return SequentialSampler(eval_dataset)
        return None

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        # With persistent workers, transformers 5.23 hands out the first loader for any dataset passed to `evaluate`.
        if not isinstance(eval_dataset, str):
            rows = self.eval_dataset if eval_dataset is None else eval_dataset
            if rows is not self.__dict__.get("_rows_of_eval_loader"):
                self.__dict__.get("_eval_dataloaders", {}).pop("eval", None)
            self._rows_of_eval_loader = rows
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
