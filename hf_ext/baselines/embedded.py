"""Embeddings that heads and baselines read: of frozen encoders, and of trained ones as they were before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data import (
    SequenceCollator,
    batches_by_tokens,
    read_columns,
)
from ..embeddings import encode_finite, factorize, join_parts, take_rows
from ..models import AffinityModel, build_config, in_float32
from ..speedups import Run, halve_encoders
from ..training import encode_sequences

if TYPE_CHECKING:
    from ..trainer import FastTrainer


Encode = Callable[[str, Sequence[str]], Tensor]

TOKENS_PER_BATCH = 8192  # sequences times their longest; what an encoder needs of memory beside its weights


def embed_distinct(
    model: AffinityModel,
    collator: SequenceCollator,
    name: str,
    sequences: Sequence[str],
    *,
    device: torch.device,
) -> Tensor:
    """Pools embeddings of input `name`: (n, width), float32, on the CPU; in float32 where half precision overflows.

    Args:
        sequences: distinct; parts of a pair are joined by `|`.

    Raises:
        NotFiniteError: some are NaN or infinite.
    """
    encode = partial(encode_sequences, model, collator, name, device=device)
    exactly = in_float32(model, name, encode)
    table = torch.empty(len(sequences), model.embedding_sizes[name])
    for chosen in batches_by_tokens([*map(len, sequences)], TOKENS_PER_BATCH):
        given = [sequences[i] for i in chosen]
        values, *_ = encode_finite(encode, exactly, given)
        table[torch.tensor(chosen)] = values.float()
    return table


def encode_as_before(trainer: FastTrainer, rows: Any) -> Encode:
    """Embeds with the encoders as they were before training: frozen ones through the cache.

    Encoders compute with the kernels of the run; where it trained in half precision so do they, as far as rounding
    allows it (`encoder_precision`).

    Args:
        trainer: of a model with one tower that trains, or more.
        rows: training rows, of which some tell what rounding leaves.

    Raises:
        ArgumentError: an encoder's folder is gone, damaged, or holds other weights than those the model began with.

    Cost: one more copy of these encoders in memory, read from where they came from.
    """
    specs = trainer.model.config.encoder_specs
    device = torch.device(trainer.args.device)
    trained = [i for i, spec in enumerate(specs) if spec.training != "frozen"]
    encoders = [replace(specs[i], training="frozen", lora={}, masked_head=False) for i in trained]
    towers = [
        replace(tower, encoder=trained.index(tower.encoder))
        for tower in trainer.model.config.tower_specs
        if tower.encoder in trained
    ]
    with torch.random.fork_rng(devices=[]):  # the twin's head is drawn, and never used
        twin: Any = AffinityModel(build_config(encoders, towers, head_sizes=[]))
    twin.to(device)
    twin.transform_encoders(trainer.plan.speed_up)
    twin.attach_encoders()
    if trainer.plan.applied("precision"):
        halve_encoders(Run(trainer.args, twin, trainer.data_collator, rows), trainer.plan.hardware)
    pretrained = partial(embed_distinct, twin, trainer.data_collator, device=device)

    def encode(name: str, sequences: Sequence[str]) -> Tensor:
        if name in twin.embedding_sizes:
            return pretrained(name, sequences)
        return trainer.encode_distinct(name, sequences)

    return encode


def pooled_features(trainer: FastTrainer, dataset: Any, encode: Encode | None = None) -> np.ndarray:
    """Returns what the head sees, embeddings and numbers, one row per row of `dataset`: (n, sum of widths), float32.

    Where a row lacks an input, what the head puts there: once it is known, the mean of the training rows that have it.

    `encode` makes them, of the name of an input and distinct sequences; None: the model's own encoders.

    Cost: with the embedding cache a look-up; otherwise each distinct sequence is encoded once.
    """
    encode = encode or trainer.encode_distinct
    blocks = []
    collator = trainer.data_collator
    for name in trainer.model.embedding_sizes:
        numbers, inputs = factorize(
            read_columns(dataset, collator.columns[name]),
            name in collator.optional_inputs,
        )
        sequences = [join_parts(parts) for parts in inputs]
        by_length = sorted(range(len(sequences)), key=lambda i: (len(sequences[i]), sequences[i]))
        values = encode(name, [sequences[i] for i in by_length])
        places = np.append(np.argsort(by_length), -1)  # -1, of a row that lacks the input, stays -1
        places = places.astype(np.int64)
        index = torch.from_numpy(places[numbers])
        block = take_rows(values, index)
        if (index < 0).any():
            block[index < 0] = trainer.model.fill_of(name).to(block)
        blocks.append(block.numpy())
    return np.concatenate([*blocks, collator.numbers.matrix(dataset)], axis=1)
