"""Models with random weights of the shapes that are measured, and rows of random residues for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from common import make_esm2
from datasets import Dataset
from transformers import EsmcConfig, EsmcForMaskedLM

from hf_ext.data.masking import MaskedLMCollator
from hf_ext.data.proteins import STANDARD
from hf_ext.data.tokenization import ResidueTokenizer
from hf_ext.masked_lm.arguments import MaskedLMArguments
from hf_ext.masked_lm.steps import build_tokenizer, freeze_contact_head
from hf_ext.models.lora import LoraSettings, wrap_with_lora

MAX_RESIDUES = 1022  # of ESM-2's 1,024 tokens


ESMC = {"300M": (960, 30, 15, 2560), "tiny": (32, 2, 2, 64)}  # width, layers, heads, inner width of the gated layer


@dataclass(frozen=True)
class Shape:
    """An encoder with a masked-LM head; `family` is "esm" or "esmc"."""

    name: str
    family: str
    size: str

    def build(self, device: torch.device, ways: str = "full") -> Any:
        """A model on the device; `ways`: full (all weights train), lora, or frozen (none do)."""
        torch.manual_seed(0)
        with torch.device(device):
            model: Any = self._make()
        freeze_contact_head(model)
        if ways == "lora":
            model = wrap_with_lora(model, LoraSettings(r=8))
        elif ways == "frozen":
            model.requires_grad_(False)
        return model

    def _make(self) -> Any:
        if self.family == "esm":
            return make_esm2(self.size, token_dropout=True, layer_norm_eps=1e-5, max_position_embeddings=1026)
        width, layers, heads, inner = ESMC[self.size]
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": inner}
        split = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": width // heads}
        return EsmcForMaskedLM(EsmcConfig(**sizes, **split))


# Toys keep the form alone.
SHAPES = {
    "full": (Shape("ESM-2 650M", "esm", "650M"), Shape("ESMC-300M", "esmc", "300M")),
    "toy": (Shape("ESM-2 toy", "esm", "tiny"), Shape("ESMC toy", "esmc", "tiny")),
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
