"""The smallest ESM-2 that learns."""

from typing import Any

import torch
from transformers import EsmConfig, EsmForSequenceClassification

SETTINGS = {
    "vocab_size": 33,
    "pad_token_id": 1,
    "mask_token_id": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "position_embedding_type": "rotary",
    "num_labels": 2,
}


def make_esm(cls: type = EsmForSequenceClassification, **given: Any) -> Any:
    """A model of a class of transformers for ESM, with the same weights every time."""
    torch.manual_seed(0)
    return cls(EsmConfig(**{**SETTINGS, **given}))
