"""Embeddings without a trainer: of a saved model, and of a fine-tuned one's encoders as they were before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..data.batching import batches_by_tokens
from ..data.tokenization import SequenceCollator
from ..embeddings.encode import encode_finite
from ..models.affinity import AffinityModel, in_float32
from ..models.configuration import build_config
from ..training.embedding_cache import encode_sequences

TOKENS_PER_BATCH = 8192  # sequences times their longest; what an encoder needs of memory beside its weights


def embed_distinct(
    model: AffinityModel, collator: SequenceCollator, name: str, sequences: Sequence[str], *, device: torch.device
) -> torch.Tensor:
    """Pooled embeddings of input `name`: (n, width), float32, on the CPU; in float32 where half precision overflows.

    Args:
        sequences: distinct; parts of a pair are joined by `|`.

    Raises:
        NotFiniteError: some are NaN or infinite.
    """
    encode = partial(encode_sequences, model, collator, name, device=device)
    exactly = in_float32(model, name, encode)
    table = torch.empty(len(sequences), model.embedding_sizes[name])
    for chosen in batches_by_tokens([*map(len, sequences)], TOKENS_PER_BATCH):
        table[torch.tensor(chosen)] = encode_finite(encode, exactly, [sequences[i] for i in chosen])[0].float()
    return table


def load_pretrained_towers(
    model: AffinityModel, collator: Any, device: torch.device
) -> tuple[list[str], Callable[[str, Sequence[str]], torch.Tensor]]:
    """The inputs whose towers a model trains, and `embed_distinct` with the published weights of these.

    Args:
        model: with one tower that trains, or more.
        collator: makes its inputs.
        device: where to encode.

    Raises:
        ArgumentError: an encoder's folder is gone, damaged, or holds other weights than those the model began with.

    Cost: one more copy of these encoders in memory, read from where they came from.
    """
    specs = model.config.encoder_specs
    trained = [i for i, spec in enumerate(specs) if spec.training != "frozen"]
    encoders = [replace(specs[i], training="frozen", lora={}) for i in trained]
    towers = [
        replace(tower, encoder=trained.index(tower.encoder))
        for tower in model.config.tower_specs
        if tower.encoder in trained
    ]
    with torch.random.fork_rng(devices=[]):  # the twin's head is drawn, and never used
        twin: Any = AffinityModel(build_config(encoders, towers, head_sizes=[]))
    twin.to(device)
    twin.attach_encoders()
    return [*twin.embedding_sizes], partial(embed_distinct, twin, collator, device=device)
