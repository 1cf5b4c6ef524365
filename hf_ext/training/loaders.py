"""Where stock data loading gives wrong results: text columns, evaluation sets, resumed orders; batches by tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import datasets
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import TrainerCallback, TrainerState
from transformers.trainer_pt_utils import AcceleratorConfig

from ..data.columns import has_numbered_rows, row_lengths
from ..data.even_batches import EvenBatchSampler, RepeatedRows
from ..data.length_grouping import LengthGroupedSampler
from ..data.streams import PassedRows, StreamPassSampler, is_split_by_node, is_stream
from ..data.token_budget import TokenBudgetBatchSampler, count_tokens
from ..errors import ArgumentError
from ..training_args import FastTrainingArguments
from .loader_request import LoaderRequest
from .planned import PlannedRun
from .stream_loaders import StreamLoaders


class Loaders(TrainerCallback):
    """Makes the loaders of a run; where nothing is to be done otherwise, they are Trainer's.

    Where the plan applied `token_budget`, training batches come from a `TokenBudgetBatchSampler`; streams are read by
    `StreamLoaders`.

    On several processes every training row comes once an epoch, and optimizer steps hold the rows they hold on one
    (`EvenBatchSampler`), where the loss is a sum over items by their number, which tells a short batch from a full one.
    Elsewhere (a mean of means, `split_batches`, `dataloader_drop_last`, `batch_rebalance`) Accelerate repeats or drops
    rows at the end of an epoch.
    """

    name = "data_position"

    def __init__(self, args: FastTrainingArguments, planned: PlannedRun):
        self._state = TrainerState()  # of the training at hand
        self._args, self._planned = args, planned
        self._streams = StreamLoaders(args)
        self._even: EvenBatchSampler | TokenBudgetBatchSampler | None = None

    # --- loaders ----------------------------------------------------------------------------------------------------

    def train(self, request: LoaderRequest, counts_items: Callable[[], bool]) -> DataLoader:
        """The training loader.

        Args:
            request: what Trainer asks for.
            counts_items: whether the loss is a sum over items by their number; asked on several processes alone.

        Raises:
            ArgumentError: a stream together with Accelerate's `split_batches` or `dispatch_batches`, or with a share
                for each process (`split_dataset_by_node`); on several processes `dispatch_batches` alone, with any
                rows.
        """
        self._streams.forget()
        self._even = None
        check_dispatch(request.dataset, self._args)
        if is_stream(request.dataset):
            return self._streams.train(request)
        if self._planned.applied("token_budget"):
            sampler = self._sample_by_tokens(request)
            self._even = sampler if self._deals_evenly(counts_items) else None
            return _hand_epoch_on(request.make(self._args, request.wanted_rows(), sampler), sampler)
        if has_numbered_rows(request.dataset) and self._deals_evenly(counts_items):
            return self._deal_evenly(request)
        return _make_stock(request)

    def evaluation(self, request: LoaderRequest) -> DataLoader:
        """A loader of rows to evaluate or predict.

        Raises:
            DataError: processes read different rows of a stream.
        """
        rows, args = request.dataset, self._args
        if args.world_size > 1 and is_stream(rows):
            return self._streams.evaluation(request)
        # Workers would each read all of it, or shards of it in turns.
        if args.world_size == 1 and args.dataloader_num_workers > 1 and isinstance(rows, TorchIterableDataset):
            return request.make(args, PassedRows(), StreamPassSampler(rows, None, request.batch_size))
        return _make_stock(request)

    def sampler(self, rows: Any, collator: Any, stock: Callable[[], Any]) -> Any:
        """The sampler of training rows; `stock` makes Trainer's.

        transformers 5.23 groups by a column of token ids or of lengths; text has neither.
        """
        args = self._args
        if not (args.train_sampling_strategy == "group_by_length" and hasattr(rows, "__len__")):
            return stock()
        # Of all processes: the order is then the same on any number that makes the same steps.
        rows_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        if not reads_text(collator):
            return LengthGroupedSampler(stock().lengths, rows_per_step, self._seed)
        text = getattr(rows, "live", rows)  # of rows whose frozen inputs are cached, what is left to encode
        if text is None:
            return RandomSampler(rows)
        return LengthGroupedSampler(row_lengths(text, collator.columns), rows_per_step, self._seed)

    @property
    def _seed(self) -> int:
        return self._args.seed if self._args.data_seed is None else self._args.data_seed

    # --- one epoch on several processes -----------------------------------------------------------------------------

    def _deals_evenly(self, counts_items: Callable[[], bool]) -> bool:
        """Whether an epoch's last rows can be shared out unevenly: only where the loss counts items."""
        args = self._args
        if args.world_size == 1 or _accelerator_config(args).split_batches or args.dataloader_drop_last:
            return False
        return args.train_sampling_strategy != "batch_rebalance" and counts_items()

    def _deal_evenly(self, request: LoaderRequest) -> DataLoader:
        rows = request.wanted_rows()
        assert request.sampler is not None  # Trainer has one for training
        sampler = request.sampler(rows)
        self._even = EvenBatchSampler(sampler, request.batch_size, self._args.world_size)
        loader = request.make(self._args, rows, self._even)
        return _hand_epoch_on(loader, sampler) if isinstance(sampler, LengthGroupedSampler) else loader

    def _sample_by_tokens(self, request: LoaderRequest) -> TokenBudgetBatchSampler:
        args, rows = self._args, request.dataset
        text = getattr(rows, "live", rows)  # of rows whose frozen inputs are cached, what is left to encode
        sampler = TokenBudgetBatchSampler(
            count_tokens(text, request.collator, args.length_column_name),
            **self._planned.plan["token_budget"].settings,
            seed=self._seed,
            packed=self._planned.applied("packing"),
            world_size=args.world_size,
            passes_per_step=args.gradient_accumulation_steps,
        )
        share = "budget_used" if sampler.packed else "real_tokens"
        evidence = {"batches_per_epoch": len(sampler), share: round(sampler.efficiency(), 4)}
        self._planned.record("token_budget", **evidence)
        return sampler

    def mark_repeated(self, batches: Iterator[Any], gradient_state: Any) -> Iterator[Any]:
        """`batches` of an epoch, of which a last one of rows that another process has is marked as such."""
        even = self._even
        has_repeated = even is not None and self._args.process_index >= even.world_size - even.num_repeated
        return _mark_last(batches, gradient_state) if has_repeated else batches

    # --- where a training stream stands -----------------------------------------------------------------------------

    def position(self, step: int) -> dict[str, Any] | None:
        """Where the training stream stands after optimizer step `step`: see `StreamLoaders.position`."""
        return self._streams.position(step)

    def begin_epoch(self, step: int, num_dropped: int | None) -> None:
        """Before Trainer reads the epoch's first batch: see `StreamLoaders.begin_epoch`."""
        self._streams.begin_epoch(step, num_dropped)

    def state(self) -> dict[str, Any] | None:
        """`position` after the last optimizer step."""
        return self.position(self._state.global_step)

    def load(self, tree: dict[str, Any] | None) -> None:
        """Takes the position in the checkpoint that the run continues; None where it did not say, or is a new one."""
        self._streams.resumed_at = tree

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here on Trainer keeps this one."""
        self._state = state


def check_dispatch(rows: Any, args: FastTrainingArguments) -> None:
    """Raises ArgumentError where Accelerate would hand out rows that every process reads itself."""
    config, streams = _accelerator_config(args), is_stream(rows)
    if streams and (config.split_batches or config.dispatch_batches):
        raise ArgumentError(
            "Every process reads a training stream itself: leave Accelerate's split_batches and dispatch_batches "
            "out of --accelerator_config."
        )
    if streams and is_split_by_node(rows):
        raise ArgumentError(
            "The training stream was split for processes (split_dataset_by_node): every process reads all of it "
            "and trains on its share. Leave the split out."
        )
    if config.dispatch_batches and not config.split_batches and args.world_size > 1:
        # It joins the batches of all processes into one: of unequal width they fail on the main process, while the
        # others wait.
        raise ArgumentError(
            "Every process reads its training rows itself: leave Accelerate's dispatch_batches out of "
            "--accelerator_config."
        )


def _accelerator_config(args: FastTrainingArguments) -> AcceleratorConfig:
    return cast(AcceleratorConfig, args.accelerator_config)  # what the arguments make of a dictionary or a path


def reads_text(collator: Any) -> bool:
    """Whether a collator reads columns of text, which Trainer would remove since no model does."""
    return hasattr(collator, "columns")


def in_order(rows: Any, world_size: int) -> SequentialSampler | None:
    """The sampler of rows to evaluate; None where Accelerate deals them out, or for a stream."""
    # With group_by_length, transformers 5.23 also reorders evaluation, so predictions do not line up with the rows
    # (https://github.com/huggingface/transformers/pull/33514). Remove when `predict` keeps the order of the data.
    return SequentialSampler(rows) if hasattr(rows, "__len__") and world_size <= 1 else None


def take_rows(dataset: Any, rows: Any) -> Any:
    """The rows of a map-style dataset with these numbers, in this order."""
    if isinstance(dataset, datasets.Dataset):
        return dataset.select(rows)
    return Subset(dataset, list(map(int, rows)))


def _make_stock(request: LoaderRequest) -> DataLoader:
    loader = request.stock()
    sampler = getattr(getattr(loader.batch_sampler, "batch_sampler", None), "sampler", None)
    return _hand_epoch_on(loader, sampler) if isinstance(sampler, LengthGroupedSampler) else loader


def _hand_epoch_on(loader: DataLoader, sampler: Any) -> DataLoader:
    """`loader`, which now tells `sampler` the epoch on several processes too."""
    # accelerate 1.15's BatchSamplerShard does not hand the epoch on, and when Trainer skips what a resumed run has
    # seen it reaches no deeper: processes would resume in the batches of epoch 0. Remove when it has `set_epoch`.
    if loader.batch_sampler is not sampler:
        vars(loader.batch_sampler)["set_epoch"] = sampler.set_epoch
    return loader


def _mark_last(batches: Iterator[Any], gradient_state: Any) -> Iterator[Any]:
    for batch in batches:
        yield RepeatedRows(batch) if gradient_state.end_of_dataloader else batch
