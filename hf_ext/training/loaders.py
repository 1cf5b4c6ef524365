"""Loaders of a run: text columns, rows by length or by tokens, every row once an epoch on several processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import datasets
from accelerate.utils import gather_object
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, Subset
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import seed_worker

from ..data import (
    EPOCH_COLUMN,
    START,
    EvenBatchSampler,
    LengthGroupedSampler,
    PassedRows,
    RepeatedRows,
    StreamBatchSampler,
    TokenBudgetBatchSampler,
    count_tokens,
    has_numbered_rows,
    is_split_by_node,
    is_stream,
    reads_text,
    row_lengths,
)
from ..errors import ArgumentError, DataError
from ..files import Json
from ..models import replaced
from .host import Host, Rows, find_override
from .run_plan import PlannedRun

logger = logging.getLogger(__name__)


MakeSampler = Callable[[Any], Sampler]


class Loaders(TrainerCallback):
    """Makes the loaders of a run; where nothing is to be done otherwise, they are Trainer's.

    Where the plan applied `token_budget`, training batches come from a `TokenBudgetBatchSampler`; those of a training
    stream, which is one long epoch of pass after pass, from a `StreamBatchSampler`: every process reads it in full and
    collates its share of the rows, so that no number of shards matters.

    On several processes every training row comes once an epoch, and optimizer steps hold the rows they hold on one
    (`EvenBatchSampler`), where the loss is a sum over items by their number, which tells a short batch from a full one.
    Elsewhere (a mean of means, `split_batches`, `dataloader_drop_last`, `batch_rebalance`) Accelerate repeats or drops
    rows at the end of an epoch.
    """

    name = "data_position"

    def __init__(self, trainer: Host, planned: PlannedRun):
        self._trainer = trainer
        self._planned = planned
        self._epoch = 0  # the next one
        self._stream: StreamBatchSampler | None = None
        self._even: EvenBatchSampler | TokenBudgetBatchSampler | None = None

    # --- training ---------------------------------------------------------------------------------------------------

    def train(
        self, rows: Rows, batch_size: int, sampler_fn: MakeSampler, make_stock: Callable[..., DataLoader]
    ) -> DataLoader:
        """Makes the training loader.

        Args:
            rows: the dataset; `batch_size`: rows per process and batch.
            sampler_fn: makes Trainer's sampler, or a subclass's, of a dataset.
            make_stock: makes Trainer's own loader of rows, with such a function.

        Raises:
            ArgumentError: a stream together with Accelerate's `split_batches` or `dispatch_batches`, or with a share
                for each process (`split_dataset_by_node`); on several processes `dispatch_batches` alone, with any
                rows.
            DataError: there are no rows.
        """
        args = self._trainer.args
        self._stream = self._even = None
        self._check_dispatch(rows)
        is_stock = getattr(sampler_fn, "__func__", None) is Trainer._get_train_sampler
        if is_stock and args.train_sampling_strategy == "group_by_length":
            sampler_fn = partial(self._group_by_length, sampler_fn)
        if is_stream(rows):
            self._stream = self._read_stream(rows, batch_size)
            return self._make(PassedRows(), self._stream)
        if self._planned.applied("token_budget"):
            by_tokens = self._sample_by_tokens(rows)
            self._even = by_tokens if self._deals_evenly() else None
            return self._make(rows, by_tokens)
        if has_numbered_rows(rows) and self._deals_evenly():
            self._even = EvenBatchSampler(sampler_fn(rows), batch_size, args.world_size)
            return self._make(rows, self._even)
        return make_stock(rows, sampler_fn=sampler_fn, is_training=True)

    def _check_dispatch(self, rows: Rows) -> None:
        """Refuses batches that Accelerate would join over processes: of unequal width they fail on one, others wait."""
        config = self._trainer.args.accelerator_config
        is_streamed = is_stream(rows)
        hands_out = config.dispatch_batches and not config.split_batches and self._trainer.args.world_size > 1
        if hands_out or (is_streamed and (config.split_batches or config.dispatch_batches)):
            raise ArgumentError(
                "Every process reads its training rows itself: leave Accelerate's dispatch_batches out of "
                "--accelerator_config, with a stream split_batches too."
            )
        if is_streamed and is_split_by_node(rows):
            raise ArgumentError(
                "The training stream was split for processes (split_dataset_by_node): every process reads all of it "
                "and trains on its share. Leave the split out."
            )

    def _deals_evenly(self) -> bool:
        """Tells whether an epoch's last rows can be shared out unevenly: only where the loss counts items."""
        args = self._trainer.args
        if args.world_size == 1 or args.accelerator_config.split_batches or args.dataloader_drop_last:
            return False
        return args.train_sampling_strategy != "batch_rebalance" and self._trainer.loss_counts_items()

    def _group_by_length(self, make_stock: Callable[[Any], Any], rows: Any) -> Sampler:
        """Groups text, too: transformers needs a column of token ids or of lengths."""
        args = self._trainer.args
        collator = self._trainer.data_collator
        # Of all processes: the order is then the same on any number that makes the same steps.
        rows_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        if not reads_text(collator):
            return LengthGroupedSampler(make_stock(rows).lengths, rows_per_step, self._seed)
        text = getattr(rows, "live", rows)  # of rows whose frozen inputs are cached, what is left to encode
        if text is None:
            return RandomSampler(rows)
        return LengthGroupedSampler(row_lengths(text, collator.columns), rows_per_step, self._seed)

    def _read_stream(self, stream: Rows, batch_size: int) -> StreamBatchSampler:
        args = self._trainer.args
        if "epoch" in (args.eval_strategy, args.save_strategy, args.logging_strategy):
            logger.warning("A training stream is one epoch, however many passes: what happens per epoch, happens last.")
        # Batches, over all processes, that loaders and Trainer may have fetched beyond the last optimizer step.
        loaded = args.dataloader_num_workers * (args.dataloader_prefetch_factor or 2) + 2  # accelerate fetches one more
        by_epoch = hasattr(self._trainer.data_collator, "set_epoch")  # and loaders fetch ahead, into the next pass
        return StreamBatchSampler(
            stream,
            batch_size,
            pass_column=EPOCH_COLUMN if by_epoch else None,
            num_remembered=args.world_size * (loaded + 2 * args.gradient_accumulation_steps),
        )

    def _sample_by_tokens(self, rows: Rows) -> TokenBudgetBatchSampler:
        args = self._trainer.args
        planned = self._planned
        sampler = TokenBudgetBatchSampler(
            count_tokens(getattr(rows, "live", rows), self._trainer.data_collator, args.length_column_name),
            **planned.plan["token_budget"].settings,
            seed=self._seed,
            packed=planned.applied("packing"),
            world_size=args.world_size,
            passes_per_step=args.gradient_accumulation_steps,
        )
        tokens = int(sampler.totals.sum()) // len(sampler)
        planned.record("token_budget", batches_per_epoch=len(sampler), tokens_per_batch=tokens)
        return sampler

    @property
    def _seed(self) -> int:
        args = self._trainer.args
        return args.seed if args.data_seed is None else args.data_seed

    def _make(self, rows: Any, sampler: Sampler) -> DataLoader:
        """Makes a prepared loader of those training batches of `rows` that `sampler` names, with Trainer's settings."""
        trainer = self._trainer
        args = trainer.args
        collator = trainer.data_collator
        if isinstance(rows, datasets.Dataset):
            rows = trainer._remove_unused_columns(rows, "Training")
        else:
            collator = trainer._get_collator_with_removed_columns(collator, "Training")
        loader: DataLoader = DataLoader(
            rows,
            batch_sampler=sampler,
            collate_fn=collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
            in_order=args.dataloader_in_order,
            worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
        )
        return trainer.accelerator.prepare(loader)

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, rows: Any, make_stock: Callable[[Any], DataLoader]) -> DataLoader:
        """Makes a loader of rows to evaluate or predict, in the order of the data.

        Several processes read a stream into memory, each all of it, since Accelerate 1.15 joins batches of unequal
        width and takes out no row that it repeated where there is no length.

        Raises:
            DataError: processes read different rows of a stream.
        """
        args = self._trainer.args
        num_workers = self._trainer.args.dataloader_num_workers
        if args.world_size > 1 and is_stream(rows):
            rows = list(rows)
            counts = gather_object([len(rows)])
            if len(set(counts)) > 1:
                raise DataError(
                    f"The processes read different rows of the evaluation stream ({counts}): every one reads all of it "
                    "and looks at its share. Leave split_dataset_by_node and shuffles without a seed out, or read it "
                    "into memory (list(stream)) beforehand."
                )
        if isinstance(rows, TorchIterableDataset):  # several would each read all of it, or shards of it in turns
            num_workers = min(1, num_workers)
        # With group_by_length, transformers 5.24 also reorders evaluation, so predictions do not line up with the rows
        # (https://github.com/huggingface/transformers/pull/33514). Remove when `predict` keeps the order of the data.
        with replaced(args, train_sampling_strategy="random", dataloader_num_workers=num_workers):
            return make_stock(rows)

    # --- a run ------------------------------------------------------------------------------------------------------

    def on_train_begin(self, *event: object, **kwargs: object) -> None:
        """Says what a continued run cannot go on with exactly."""
        state = self._trainer.state
        self._epoch = int(state.epoch or 0)
        if state.global_step and not self._trainer.args.ignore_data_skip:
            for problem in self._name_inexact(kwargs.get("train_dataloader")):
                logger.warning("%s: this run may go on otherwise than if it had not ended (docs/limits.md).", problem)

    def _name_inexact(self, loader: object) -> Iterator[str]:
        trainer = self._trainer
        if find_override(trainer, "_get_train_sampler", "get_train_dataloader"):
            yield "The order of rows is the class's own, which generators without a seed may draw"
        if getattr(loader, "persistent_workers", False):
            yield "Workers of the class's own loader live on (persistent_workers)"
        if getattr(trainer.data_collator, "mlm", False):  # of transformers; whether others draw is not known
            yield f"{type(trainer.data_collator).__name__} draws masks at random, which MaskedLMCollator does not"

    def on_epoch_begin(self, *event: object, train_dataloader: DataLoader | None = None, **kwargs: object) -> None:
        """Tells samplers the epoch: accelerate 1.15 reaches no further than it must, and not behind what is skipped."""
        sampler = getattr(train_dataloader, "batch_sampler", None)
        while sampler is not None:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self._epoch)
            sampler = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))
        self._epoch += 1

    def mark_repeated(self, batches: list[Any]) -> None:
        """Marks an epoch's last batch where its rows are another process's."""
        trainer = self._trainer
        even = self._even
        if even is None or not batches or not trainer.accelerator.gradient_state.end_of_dataloader:
            return
        if trainer.args.process_index >= even.world_size - even.num_repeated:
            batches[-1] = RepeatedRows(batches[-1])

    def state(self) -> Json | None:
        """Returns where the training stream stands after the last optimizer step, for JSON; None for other data."""
        return None if self._stream is None else self._stream.state_dict(self._num_batches)

    def load(self, tree: Json | None) -> None:
        """Continues from the position in the checkpoint that the run continues.

        Where that did not say it, Trainer reads and drops what it has seen; with `ignore_data_skip` the first row comes
        next.
        """
        args = self._trainer.args
        if self._stream is None:
            return
        if args.ignore_data_skip:
            self._stream.load_state_dict(START, self._num_batches, num_dropped=0)
        elif tree is not None:
            unchecked = {} if {"data", "all"}.isdisjoint(args.allow_changed) else {"last_row": None}
            self._stream.load_state_dict({**tree, **unchecked}, self._num_batches)

    @property
    def _num_batches(self) -> int:
        """Batches of all processes in the optimizer steps of the run so far, as many as Trainer would drop."""
        args = self._trainer.args
        return self._trainer.state.global_step * args.gradient_accumulation_steps * args.world_size


def take_rows(dataset: Rows, rows: Sequence[int]) -> Dataset:
    """Takes the rows of a map-style dataset with these numbers, in this order."""
    if isinstance(dataset, datasets.Dataset):
        return dataset.select(rows)
    return Subset(cast(Dataset, dataset), list(map(int, rows)))
