"""Sequences to embeddings by a model's own encoders, and all that decides what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers

from ..data.collators import SequenceCollator
from ..embeddings.shortening import Shortening
from ..matmul import read_matmul_precision
from ..models.affinity import AffinityModel
from ..models.encoders import identify_encoder
from ..models.exact_encoding import Encode, exact_encoding


@dataclass(frozen=True)
class Encoding:
    """How sequences become embeddings now: handed over for one call, since a trainer may replace any of it.

    Attributes:
        model: whose encoders; `collator`: makes their inputs of text.
        device: where they compute.
        autocast: what encoders that train compute under, as they do in training.
        gathered: within it, encoders can be called by themselves (of a model that FSDP2 has split).
        has_exact_products: whether float32 products are exact whatever torch is told, as a speed-up measured.
        encode_with, key_with: take the place of `compute` and `describe`, where somebody has overridden them.
    """

    model: AffinityModel
    collator: SequenceCollator
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    gathered: Callable[[], AbstractContextManager[Any]] = nullcontext
    has_exact_products: bool = False
    encode_with: Callable[[str, Sequence[str]], torch.Tensor] | None = None
    key_with: Callable[[str], dict[str, Any]] | None = None

    def encoder(self, name: str) -> tuple[Encode, Encode | None]:
        """What encodes input `name`, and the same in float32; None where that is what the first computes in."""
        encode = partial(self.encode_with or self.compute, name)
        return encode, exact_encoding(self.model, name, encode)

    def key(self, name: str) -> dict[str, Any]:
        """Everything that decides the value of all embeddings of input `name`; of long ones `shortening` does, too."""
        return (self.key_with or self.describe)(name)

    def shortening(self, name: str) -> Shortening:
        """What happens to inputs `name` that are too long."""
        return Shortening.of(self.collator, name)

    @property
    def optional_inputs(self) -> Sequence[str]:
        """Names of inputs that rows may lack."""
        return getattr(self.collator, "optional_inputs", ())  # a collator of the user's knows of none

    @torch.no_grad()
    def compute(self, name: str, sequences: Sequence[str]) -> torch.Tensor:
        """Embeddings of input `name`, computed here and now: (n, width), float32. Parts of a pair are joined by `|`."""
        parts = list(zip(*(sequence.split("|") for sequence in sequences)))
        batch = self.collator.encode(name, *parts)
        self.model.eval()
        with nullcontext() if name in self.model.frozen_inputs else self.autocast():
            return self.model.encode(name, {key: value.to(self.device) for key, value in batch.items()})

    def describe(self, name: str) -> dict[str, Any]:
        """As `key`, of this package's own encoding."""
        tower = self.model.tower_of(name)
        encoder = self.model.config.encoder_specs[tower.encoder]
        tokenizer = self.collator.tokenizers[name]
        computes_float32 = self.model.encoder_dtype == torch.float32 and self.model.encoder_autocast is None
        return {
            "format": 3,
            "encoder": identify_encoder(encoder),
            "transformers": ".".join(transformers.__version__.split(".")[:2]),  # whose models may have been mended
            "tokenizer": tokenizer.fingerprint(),
            "pooling": tower.pooling,
            "dtype": str(self.model.encoder_dtype),
            "autocast": str(self.model.encoder_autocast),
            "products": self._float32_products() if computes_float32 else "half",
            **({"bits": bits} if (bits := self.model.config.encoder_bits) else {}),
        }

    def _float32_products(self) -> str:
        """What products of float32 are computed in."""
        if self.has_exact_products:  # kept where it measured exact; whether it pays differs from run to run
            return "float32"
        return read_matmul_precision().name(torch.device(self.device).type)
