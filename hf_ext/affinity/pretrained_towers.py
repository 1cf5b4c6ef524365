"""A fine-tuned model's encoders as they were before: what their embeddings are worth without any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..data.batching import batches_by_tokens
from ..embeddings.encode import encode_finite
from ..models.affinity import AffinityModel
from ..models.configuration import build_config
from ..training.embedding_cache import encode_sequences

TOKENS_PER_BATCH = 4096  # sequences times the longest of them


class PretrainedTowers:
    """Encodes with the published weights of the towers that a model trains, each distinct sequence once.

    Args:
        model: with one tower that trains, or more.
        collator: makes its inputs.
        device: where to encode.

    Raises:
        ArgumentError: an encoder's folder is gone, damaged, or holds other weights than those the model began with.

    Cost: one more copy of these encoders in memory, read from where they came from.
    """

    def __init__(self, model: AffinityModel, collator: Any, device: torch.device) -> None:
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
        self._widths = twin.embedding_sizes
        self.names = [*self._widths]
        self._encode = partial(encode_sequences, twin, collator, device=device)
        self._known: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.names}

    def encode_distinct(self, name: str, sequences: Sequence[str]) -> torch.Tensor:
        """Embeddings of input `name`, (n, width) float32 on the CPU; parts of a pair are joined by `|`.

        Raises:
            NotFiniteError: some are NaN or infinite.
        """
        known = self._known[name]
        missing = sorted({one for one in sequences if one not in known})
        for chosen in batches_by_tokens([*map(len, missing)], TOKENS_PER_BATCH):
            batch = [missing[i] for i in chosen]
            known.update(zip(batch, encode_finite(partial(self._encode, name), None, batch)[0].float()))
        return torch.stack([known[one] for one in sequences]) if sequences else torch.empty(0, self._widths[name])
