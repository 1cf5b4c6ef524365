"""Where stock data loading gives wrong results: text columns, evaluation sets, resumed orders; batches by tokens."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import datasets
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler, Subset
from transformers.trainer_utils import seed_worker

from ..data.columns import row_lengths
from ..data.length_grouping import LengthGroupedSampler
from ..data.masking import EPOCH_COLUMN
from ..data.streams import PassedRows, StreamBatchSampler, is_stream
from ..data.token_budget import TokenBudgetBatchSampler, count_tokens
from ..errors import ArgumentError

logger = logging.getLogger(__name__)


class DataLoaderMixin:
    """Keeps text columns for collators that read them, evaluation in the order of the data, and loaders apart.

    Where the plan applied `token_budget`, training batches come from a `TokenBudgetBatchSampler`. Training streams are
    read by a `StreamBatchSampler`, pass after pass in one long epoch; `data_position` says how far.

    Raises (when training starts):
        ArgumentError: a training stream together with Accelerate's `split_batches` or `dispatch_batches`.
    """

    args: Any
    plan: Any
    accelerator: Any
    data_collator: Any
    train_dataset: Any
    eval_dataset: Any
    state: Any
    _resume_position: dict[str, Any] | None = None  # from a checkpoint; whoever resumes sets it before training
    _stream_sampler: StreamBatchSampler | None = None
    _batches_before: int | None = None  # batches of the run that the stream sampler did not count

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
        if not self._reads_text():
            stock = super()._get_train_sampler(train_dataset)  # type: ignore[misc]
            return LengthGroupedSampler(stock.lengths, stock.batch_size, self._data_seed)
        text = getattr(rows, "live", rows)  # of rows whose frozen inputs are cached, what is left to encode
        if text is None:
            return RandomSampler(rows)
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return LengthGroupedSampler(row_lengths(text, self.data_collator.columns), batch, self._data_seed)

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
            self._stream_sampler = None
        if is_training and is_stream(dataset):
            return self._get_stream_dataloader(dataset, description, batch_size)
        if is_training and self._has_applied("token_budget"):
            sampler = self._make_token_budget_sampler(dataset)
            return _hand_epoch_on(self._make_loader(dataset, sampler, description), sampler)
        loader = super()._get_dataloader(  # type: ignore[misc]
            dataset, description, batch_size, *args, is_training=is_training, **kwargs
        )
        rows = getattr(getattr(loader.batch_sampler, "batch_sampler", None), "sampler", None)
        return _hand_epoch_on(loader, rows) if isinstance(rows, LengthGroupedSampler) else loader

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

    def _get_stream_dataloader(self, stream: Any, description: str, batch_size: int) -> DataLoader:
        config = self.args.accelerator_config
        if config.split_batches or config.dispatch_batches:
            raise ArgumentError(
                "Every process reads a training stream itself: leave Accelerate's split_batches and dispatch_batches "
                "out of --accelerator_config."
            )
        if "epoch" in (self.args.eval_strategy, self.args.save_strategy, self.args.logging_strategy):
            logger.warning("A training stream is one epoch, however many passes: what happens per epoch, happens last.")
        masks_by_epoch = hasattr(self.data_collator, "set_epoch")  # and loaders fetch ahead, into the next pass
        self._stream_sampler = StreamBatchSampler(
            stream,
            batch_size,
            pass_column=EPOCH_COLUMN if masks_by_epoch else None,
            num_remembered=_num_batches_ahead(self.args),
        )
        self._batches_before = None
        return self._make_loader(PassedRows(), self._stream_sampler, description)

    def data_position(self) -> dict[str, Any] | None:
        """Where the training stream stands after the last optimizer step, for JSON; None for other data.

        None too where a resumed run has not begun and the checkpoint did not say: Trainer then drops batches.
        """
        if self._stream_sampler is None:
            return None
        if self._batches_before is None:
            return self._resume_position
        return self._stream_sampler.state_dict(self._num_batches_trained() - self._batches_before)

    def _num_batches_trained(self) -> int:
        """Batches of all processes in the optimizer steps of the run, as many as Trainer would drop."""
        return self.state.global_step * self.args.gradient_accumulation_steps * self.args.world_size

    def _run_epoch(self, **kwargs: Any) -> None:
        """As in Trainer; a stream whose position is known is not read again for the batches that Trainer drops."""
        if self._stream_sampler is not None:
            resumed = kwargs["resume_from_checkpoint"] is not None and kwargs["epoch"] == kwargs["epochs_trained"]
            dropped = kwargs["steps_trained_in_current_epoch"] * self.args.world_size if resumed else 0
            self._batches_before = self._num_batches_trained() - dropped
            if dropped and self._resume_position is not None:
                self._stream_sampler.load_state_dict(self._resume_position, dropped)
        super()._run_epoch(**kwargs)  # type: ignore[misc]

    def _make_token_budget_sampler(self, dataset: Any) -> TokenBudgetBatchSampler:
        text = getattr(dataset, "live", dataset)  # of rows whose frozen inputs are cached, what is left to encode
        sampler = TokenBudgetBatchSampler(
            count_tokens(text, self.data_collator, self.args.length_column_name),
            **self.plan["token_budget"].settings,
            seed=self._data_seed,
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


def _num_batches_ahead(args: Any) -> int:
    """Batches, over all processes, that loaders and Trainer may have fetched beyond the last optimizer step."""
    loaded = args.dataloader_num_workers * (args.dataloader_prefetch_factor or 2) + 2  # Accelerate fetches one more
    return args.world_size * (loaded + 2 * args.gradient_accumulation_steps)
