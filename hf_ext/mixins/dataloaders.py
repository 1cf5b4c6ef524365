"""Where stock data loading gives wrong results: text columns, evaluation sets, resumed orders; batches by tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import datasets
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler, Subset
from transformers.trainer_utils import seed_worker

from ..data.columns import has_numbered_rows, row_lengths
from ..data.even_batches import EvenBatchSampler, RepeatedRows
from ..data.length_grouping import LengthGroupedSampler
from ..data.streams import is_split_by_node, is_stream
from ..data.token_budget import TokenBudgetBatchSampler, count_tokens
from ..errors import ArgumentError
from .stream_loading import StreamLoadingMixin


class DataLoaderMixin(StreamLoadingMixin):
    """Keeps text columns for collators that read them, evaluation in the order of the data, and loaders apart.

    Where the plan applied `token_budget`, training batches come from a `TokenBudgetBatchSampler`; streams are read by
    `StreamLoadingMixin`.

    On several processes every training row comes once an epoch, and optimizer steps hold the rows they hold on one
    (`EvenBatchSampler`), where the loss is a sum over items by their number, which tells a short batch from a full one.
    Elsewhere (a mean of means, `split_batches`, `dataloader_drop_last`, `batch_rebalance`) Accelerate repeats or drops
    rows at the end of an epoch.

    Raises (when training starts):
        ArgumentError: a training stream together with Accelerate's `split_batches` or `dispatch_batches`, or with a
            share for each process (`split_dataset_by_node`); on several processes `dispatch_batches` alone, with any
            rows.
    """

    args: Any
    plan: Any
    accelerator: Any
    data_collator: Any
    train_dataset: Any
    eval_dataset: Any
    state: Any
    _even_sampler: EvenBatchSampler | TokenBudgetBatchSampler | None = None

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
        if not (by_length and hasattr(rows, "__len__")):
            return super()._get_train_sampler(train_dataset)  # type: ignore[misc]
        # Of all processes: the order is then the same on any number that makes the same steps.
        rows_per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        if not self._reads_text():
            stock = super()._get_train_sampler(train_dataset)  # type: ignore[misc]
            return LengthGroupedSampler(stock.lengths, rows_per_step, self._data_seed)
        text = getattr(rows, "live", rows)  # of rows whose frozen inputs are cached, what is left to encode
        if text is None:
            return RandomSampler(rows)
        return LengthGroupedSampler(row_lengths(text, self.data_collator.columns), rows_per_step, self._data_seed)

    @property
    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        *args: Any,
        is_training: bool = False,
        rows: Any = None,
        **kwargs: Any,
    ) -> Any:
        if rows is not None:  # taken here, where frozen inputs are cached already: one table for all parts of a set
            dataset = take_rows(dataset, rows)
        if is_training:
            self.forget_stream()
            self._even_sampler = None
            self._check_dispatch(dataset)
        if is_training and is_stream(dataset):
            return self._get_stream_dataloader(dataset, description, batch_size)
        if is_training and self._has_applied("token_budget"):
            sampler = self._make_token_budget_sampler(dataset)
            self._even_sampler = sampler if self._deals_evenly() else None
            return _hand_epoch_on(self._make_loader(dataset, sampler, description), sampler)
        if is_training and has_numbered_rows(dataset) and self._deals_evenly():
            return self._get_even_dataloader(dataset, description, batch_size, kwargs["sampler_fn"])
        if self.args.world_size > 1 and is_stream(dataset):
            return self._get_stream_eval_dataloader(dataset, description, batch_size)
        loader = super()._get_dataloader(  # type: ignore[misc]
            dataset, description, batch_size, *args, is_training=is_training, **kwargs
        )
        rows = getattr(getattr(loader.batch_sampler, "batch_sampler", None), "sampler", None)
        return _hand_epoch_on(loader, rows) if isinstance(rows, LengthGroupedSampler) else loader

    def _check_dispatch(self, dataset: Any) -> None:
        config, streams = self.args.accelerator_config, is_stream(dataset)
        if streams and (config.split_batches or config.dispatch_batches):
            raise ArgumentError(
                "Every process reads a training stream itself: leave Accelerate's split_batches and dispatch_batches "
                "out of --accelerator_config."
            )
        if streams and is_split_by_node(dataset):
            raise ArgumentError(
                "The training stream was split for processes (split_dataset_by_node): every process reads all of it "
                "and trains on its share. Leave the split out."
            )
        if config.dispatch_batches and not config.split_batches and self.args.world_size > 1:
            # It joins the batches of all processes into one: of unequal width they fail on the main process, while the
            # others wait.
            raise ArgumentError(
                "Every process reads its training rows itself: leave Accelerate's dispatch_batches out of "
                "--accelerator_config."
            )

    def _deals_evenly(self) -> bool:
        """Whether an epoch's last rows can be shared out unevenly: only where the loss counts items."""
        args = self.args
        if args.world_size == 1 or args.accelerator_config.split_batches or args.dataloader_drop_last:
            return False
        return args.train_sampling_strategy != "batch_rebalance" and self.loss_counts_items()  # type: ignore[attr-defined]

    def _get_even_dataloader(self, dataset: Any, description: str, batch_size: int, sampler_fn: Any) -> DataLoader:
        if isinstance(dataset, datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description)
        rows = sampler_fn(dataset)
        self._even_sampler = EvenBatchSampler(rows, batch_size, self.args.world_size)
        loader = self._make_loader(dataset, self._even_sampler, description)
        return _hand_epoch_on(loader, rows) if isinstance(rows, LengthGroupedSampler) else loader

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; a last batch of rows that another process has is marked as such."""
        even = self._even_sampler
        if even is not None and self.args.process_index >= even.world_size - even.num_repeated:
            epoch_iterator = self._mark_last(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)  # type: ignore[misc]

    def _mark_last(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield RepeatedRows(batch) if self.accelerator.gradient_state.end_of_dataloader else batch

    def _make_loader(self, dataset: Any, sampler: Sampler, description: str) -> DataLoader:
        """A prepared loader of the batches of `sampler`, with Trainer's settings."""
        collator = self.data_collator
        if isinstance(dataset, datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description)
        else:
            collator = self._get_collator_with_removed_columns(collator, description)
        workers = self.args.dataloader_num_workers
        return self.accelerator.prepare(
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

    def _make_token_budget_sampler(self, dataset: Any) -> TokenBudgetBatchSampler:
        text = getattr(dataset, "live", dataset)  # of rows whose frozen inputs are cached, what is left to encode
        sampler = TokenBudgetBatchSampler(
            count_tokens(text, self.data_collator, self.args.length_column_name),
            **self.plan["token_budget"].settings,
            seed=self._data_seed,
            packed=self._has_applied("packing"),
            world_size=self.args.world_size,
            passes_per_step=self.args.gradient_accumulation_steps,
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
        # With persistent workers, transformers 5.23 hands out the first loader, also where the rows are others now.
        key = eval_dataset if isinstance(eval_dataset, str) else "eval"
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, str):
            rows = self.eval_dataset[rows]
        known = self.__dict__.setdefault("_rows_of_eval_loaders", {})
        if rows is not known.get(key):
            self.__dict__.get("_eval_dataloaders", {}).pop(key, None)
        known[key] = rows
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]


def _hand_epoch_on(loader: DataLoader, sampler: Any) -> DataLoader:
    """`loader`, which now tells `sampler` the epoch on several processes too."""
    # accelerate 1.15's BatchSamplerShard does not hand the epoch on, and when Trainer skips what a resumed run has
    # seen it reaches no deeper: processes would resume in the batches of epoch 0. Remove when it has `set_epoch`.
    if loader.batch_sampler is not sampler:
        loader.batch_sampler.set_epoch = sampler.set_epoch  # type: ignore[union-attr]
    return loader


def take_rows(dataset: Any, rows: Any) -> Any:
    """The rows of a map-style dataset with these numbers, in this order."""
    if isinstance(dataset, datasets.Dataset):
        return dataset.select(rows)
    return Subset(dataset, list(map(int, rows)))
