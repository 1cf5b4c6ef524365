"""Models with random weights of the shapes that are measured, and rows of random residues for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import EsmcConfig, EsmcForMaskedLM, EsmConfig, EsmForMaskedLM

from hf_ext.data.masking import MaskedLMCollator
from hf_ext.data.proteins import STANDARD
from hf_ext.data.tokenization import ResidueTokenizer
from hf_ext.masked_lm.arguments import MaskedLMArguments
from hf_ext.masked_lm.building import build_tokenizer, freeze_contact_head
from hf_ext.models.lora import LoraSettings, wrap_with_lora

MAX_RESIDUES = 1022  # of ESM-2's 1,024 tokens


@dataclass(frozen=True)
class Shape:
    """Of an encoder with a masked-LM head.

    Attributes:
        family: "esm" or "esmc".
        inner: width of the feed-forward layer.
    """

    name: str
    family: str
    width: int
    layers: int
    heads: int
    inner: int

    def build(self, device: torch.device, ways: str = "full", seed: int = 0) -> Any:
        """A model on the device; `ways`: full (all weights train), lora, or frozen (none do)."""
        torch.manual_seed(seed)
        with torch.device(device):
            model: Any = self._make()
        freeze_contact_head(model)
        if ways == "lora":
            model = wrap_with_lora(model, LoraSettings(r=8))
        elif ways == "frozen":
            model.requires_grad_(False)
        return model

    def _make(self) -> Any:
        sizes = {"hidden_size": self.width, "num_hidden_layers": self.layers, "num_attention_heads": self.heads}
        if self.family == "esmc":
            heads = {"num_key_value_heads": self.heads, "head_dim": self.width // self.heads}
            return EsmcForMaskedLM(EsmcConfig(**sizes, **heads, intermediate_size=self.inner))
        tokens = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"}
        fixed = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "token_dropout": True}
        fixed |= {"emb_layer_norm_before": False, "layer_norm_eps": 1e-5, "max_position_embeddings": 1026}
        return EsmForMaskedLM(EsmConfig(**tokens, **fixed, **sizes, intermediate_size=self.inner))


# ESM C's gated feed-forward layer is 8/3 of the width, rounded up to 256. Toys keep the form alone.
SHAPES = {
    "full": (Shape("ESM-2 650M", "esm", 1280, 33, 20, 5120), Shape("ESMC-300M", "esmc", 960, 30, 15, 2560)),
    "toy": (Shape("ESM-2 toy", "esm", 32, 2, 2, 64), Shape("ESMC toy", "esmc", 32, 2, 2, 64)),
}


def draw_lengths(number: int, is_toy: bool, seed: int = 0) -> list[int]:
    """Residues of each row: log-normal about 270 between 30 and 1,022, as proteins' are; toys 6 to 24."""
    generator = torch.Generator().manual_seed(seed)
    if is_toy:
        return torch.randint(6, 25, (number,), generator=generator).tolist()
    drawn = (torch.randn(number, generator=generator) * 0.7 + 5.6).exp()
    return drawn.round().clamp(30, MAX_RESIDUES).int().tolist()


def make_rows(number: int, is_toy: bool, seed: int = 0) -> Dataset:
    """So many chains of random residues, in the column `sequence`."""
    generator = torch.Generator().manual_seed(seed)
    letters = list(STANDARD)
    rows = []
    for length in draw_lengths(number, is_toy, seed):
        drawn = torch.randint(0, len(letters), (length,), generator=generator).tolist()
        rows.append("".join(letters[index] for index in drawn))
    return Dataset.from_dict({"sequence": rows})


def make_tokenizer() -> ResidueTokenizer:
    """ESM-2's; the ids are also those of ESM C."""
    return ResidueTokenizer(build_tokenizer(MaskedLMArguments()), 1, MAX_RESIDUES + 2)


def make_collator(seed: int = 0) -> MaskedLMCollator:
    """15 % of the residues masked, the same ones on every side."""
    return MaskedLMCollator(make_tokenizer(), ["sequence"], 0.15, seed, MAX_RESIDUES, None)
