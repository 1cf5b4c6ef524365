"""Three places where stock data loading gives wrong results for text columns and several evaluation sets."""

from __future__ import annotations

from typing import Any

from torch.utils.data import SequentialSampler


class DataLoaderMixin:
    """Keeps text columns for collators that read them, evaluation in the order of the data, and loaders apart."""

    args: Any
    data_collator: Any

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

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        # With group_by_length, transformers 5.23 also reorders evaluation, so predictions do not line up with the rows
        # (https://github.com/huggingface/transformers/pull/33514). Remove when `predict` keeps the order of the data.
        if hasattr(eval_dataset, "__len__") and self.args.world_size <= 1:
            return SequentialSampler(eval_dataset)
        return None

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        # With persistent workers, transformers 5.23 hands out the first loader for any dataset passed to `evaluate`.
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            self.__dict__.pop("_eval_dataloaders", None)
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
