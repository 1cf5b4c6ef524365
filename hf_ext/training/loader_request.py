"""What Trainer wants a loader of, and its own means of making one, handed over for one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
from torch.utils.data import DataLoader, Sampler
from transformers import TrainingArguments
from transformers.trainer_utils import seed_worker


@dataclass(frozen=True)
class LoaderRequest:
    """One call of Trainer's `_get_dataloader`; never kept, since all of it may be another at the next.

    Attributes:
        dataset, description, batch_size: as Trainer gives them; rows per process and batch.
        collator: of the trainer.
        sampler: makes Trainer's sampler of a dataset; may be None.
        prepare: Accelerate's.
        remove_columns: of a table and a description, the table without the columns that the model does not read.
        bare_collator: of a collator and a description, one that takes such columns out of plain rows.
        stock: makes Trainer's own loader of `dataset`.
    """

    dataset: Any
    description: str
    batch_size: int
    collator: Any
    sampler: Callable[[Any], Any] | None
    prepare: Callable[[DataLoader], DataLoader]
    remove_columns: Callable[[Any, str], Any]
    bare_collator: Callable[[Any, str], Any]
    stock: Callable[[], DataLoader]

    def wanted_rows(self) -> Any:
        """`dataset`; of a table, without the columns that the model does not read."""
        is_table = isinstance(self.dataset, datasets.Dataset)
        return self.remove_columns(self.dataset, self.description) if is_table else self.dataset

    def make(self, args: TrainingArguments, rows: Any, sampler: Sampler) -> DataLoader:
        """A prepared loader of those batches of `rows` that `sampler` names, with Trainer's settings."""
        is_table = isinstance(rows, datasets.Dataset)
        workers = args.dataloader_num_workers
        return self.prepare(
            DataLoader(
                rows,
                batch_sampler=sampler,
                collate_fn=self.collator if is_table else self.bare_collator(self.collator, self.description),
                num_workers=workers,
                pin_memory=args.dataloader_pin_memory,
                persistent_workers=args.dataloader_persistent_workers,
                multiprocessing_context=args.dataloader_multiprocessing_context,
                prefetch_factor=args.dataloader_prefetch_factor,
                in_order=args.dataloader_in_order,
                worker_init_fn=partial(seed_worker, num_workers=workers, rank=args.process_index),
            )
        )
