"""A pretrained ESM-2 or ESM C as the antigen's encoder: frozen, with adapters, or trained in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ...data import ResidueTokenizer
from ...errors import ArgumentError
from ..configuration import EncoderSpec
from ..encoders import build_encoder, identify_encoder, load_encoder, set_trainable
from .configuration import GeneratorConfig
from .parts import EncoderStates

ALLOWED = ("esm", "esmc")


class PretrainedEncoder(nn.Module):
    """An ESM whose states of all tokens, special ones too, a decoder attends to.

    With adapters or trained in full it is an ordinary module, saved whole. Frozen it is referenced, not owned: it has
    no entry in the state dict and no gradients, is loaded from its id when it is first needed, and stays in evaluation
    mode, in float32. Where its states are given (`encoder_outputs`), it is never loaded.

    Attributes:
        spec: which encoder, and how it trains.
    """

    main_input_name = "input_ids"  # transformers asks

    def __init__(self, config: GeneratorConfig):
        super().__init__()
        self.spec = EncoderSpec(**(config.antigen_encoder or {}))
        if self.family not in ALLOWED:
            raise ArgumentError(
                f"Antigen encoder {self.spec.name_or_path!r} is of type {self.family!r}; allowed are "
                f"{' and '.join(ALLOWED)}, such as facebook/esm2_t12_35M_UR50D."
            )
        is_owned = config.save_full or self.spec.training != "frozen"
        self.model = build_encoder(self.spec) if is_owned else None
        self._referenced: list[Any] = []  # a list, so that torch does not count it among the model's modules

    @property
    def family(self) -> str:
        """Its model type in transformers."""
        return str(self.spec.config["model_type"])

    @property
    def width(self) -> int:
        """Of the states."""
        return int(self.spec.config["hidden_size"])

    def load_pretrained(self) -> None:
        """Takes the weights that the encoder was published with, where it is owned. Cost: one load."""
        if self.model is not None:
            self.model = load_encoder(self.spec)

    def attach(self, device: torch.device) -> Any:
        """Puts the encoder on `device`, loaded if it is referenced and was not yet; returns it."""
        if self.model is not None:
            return self.model
        if not self._referenced:
            self._referenced = [load_encoder(self.spec, torch.float32).eval()]
        return self._referenced[0].to(device)

    def release(self) -> None:
        """Lets a referenced encoder go, once its states are cached; it comes back when it is needed."""
        self._referenced = []

    def train(self, mode: bool = True) -> PretrainedEncoder:
        """Sets the mode as torch does, but keeps what is frozen in evaluation mode: dropout would add noise."""
        return super().train(mode and self.spec.training != "frozen")

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, layout: Any = None) -> EncoderStates:
        """Encodes k antigens: (k, tokens, width). Frozen, it ignores autocast, so that live and cached ones agree."""
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        if layout is not None:
            given["layout"] = layout
        encoder = self.attach(input_ids.device)
        if self.spec.training != "frozen":
            return EncoderStates(last_hidden_state=encoder(**given).last_hidden_state)
        with torch.no_grad(), torch.autocast(input_ids.device.type, enabled=False):
            return EncoderStates(last_hidden_state=encoder(**given).last_hidden_state)

    def set_trainable(self) -> None:
        """Lets those weights train that `spec.training` says; transformers lets all of them after loading."""
        if self.model is not None:
            set_trainable(self.model, self.spec.training)


def state_encoder(
    encoder: PretrainedEncoder, tokenizer: ResidueTokenizer, device: torch.device | str = "cpu"
) -> Callable[[Sequence[str]], list[Tensor]]:
    """Returns what makes the states that `fill_store` stores, in float32, on `device`.

    It maps n antigens to n tensors, (tokens, width), special tokens included, on the CPU.
    """

    def encode(sequences: Sequence[str]) -> list[Tensor]:
        batch = tokenizer(sequences)
        mask = batch["attention_mask"]
        states: Any = encoder(batch["input_ids"].to(device), mask.to(device)).last_hidden_state
        return [row[:length] for row, length in zip(states.cpu(), mask.sum(1).tolist())]

    return encode


def state_key(encoder: PretrainedEncoder, tokenizer: ResidueTokenizer) -> dict[str, Any]:
    """Returns everything that decides the states of all antigens, for an `EmbeddingStore`."""
    return {
        "format": 1,
        "encoder": identify_encoder(encoder.spec),
        "transformers": ".".join(transformers.__version__.split(".")[:2]),  # whose models may have been fixed
        "tokenizer": tokenizer.fingerprint(),
        "dtype": "torch.float32",
        "states": "of every token",
    }
