"""Where stock data loading gives wrong results for text columns and several evaluation sets; batches by tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import datasets
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import seed_worker

from ..data.columns import row_lengths
from ..data.token_budget import TokenBudgetBatchSampler, count_tokens


class DataLoaderMixin:
    """Keeps text columns for collators that read them, evaluation in the order of the data, and loaders apart.

    Where the plan applied `token_budget`, training batches come from a `TokenBudgetBatchSampler`.
    """

    args: Any
    plan: Any
    accelerator: Any
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

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, is_training: bool = False, **kwargs: Any
    ) -> Any:
        if is_training and self._has_applied("token_budget"):
            return self._get_token_budget_dataloader(dataset, description)
        return super()._get_dataloader(  # type: ignore[misc]
            dataset, description, batch_size, *args, is_training=is_training, **kwargs
        )

    def _get_token_budget_dataloader(self, dataset: Any, description: str) -> DataLoader:
        sampler = self._make_token_budget_sampler(dataset)
        collator = self.data_collator
        if isinstance(dataset, datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description)
        else:
            collator = self._get_collator_with_removed_columns(collator, description)
        workers = self.args.dataloader_num_workers
        loader = self.accelerator.prepare(
            DataLoader(
                dataset,
                batch_sampler=sampler,
                collate_fn=collator,
                num_workers=workers,
                pin_memory=self.args.dataloader_pin_memory,
                persistent_workers=self.args.dataloader_persistent_workers,
                multiprocessing_context=self.args.dataloader_multiprocessing_context,
                prefetch_factor=self.args.dataloader_prefetch_factor,
                in_order=self.args.dataloader_in_order,
                worker_init_fn=partial(seed_worker, num_workers=workers, rank=self.args.process_index),
            )
        )
        # accelerate 1.15's BatchSamplerShard does not hand the epoch on, and when Trainer skips what a resumed run has
        # seen it reaches no deeper: processes would resume in the batches of epoch 0. Remove when it has `set_epoch`.
        if loader.batch_sampler is not sampler:
            loader.batch_sampler.set_epoch = sampler.set_epoch
        return loader

    def _make_token_budget_sampler(self, dataset: Any) -> TokenBudgetBatchSampler:
        text = getattr(dataset, "live", dataset)  # of rows whose frozen inputs are cached, what is left to encode
        sampler = TokenBudgetBatchSampler(
            count_tokens(text, self.data_collator, self.args.length_column_name),
            **self.plan["token_budget"].settings,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            packed=self._has_applied("packing"),
            world_size=self.args.world_size,
        )
        share = "budget_used" if sampler.packed else "real_tokens"
        evidence = {"batches_per_epoch": len(sampler), share: round(sampler.efficiency(), 4)}
        self.record_evidence("token_budget", **evidence)  # type: ignore[attr-defined]
        return sampler

    def _has_applied(self, name: str) -> bool:
        """Whether the plan knows a speed-up of this name and applied it."""
        return any(d.name == name and d.status == "applied" for d in self.plan.decisions)

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
