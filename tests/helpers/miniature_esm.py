"""ESM-2 in miniature: where every test's ESM comes from, whatever its size.

Three sizes, each a dictionary over the one before: `TINY`, the smallest that learns; `NARROW`, for runs that are made
by the hundred; `WIDE`, for comparing what attention computes. A test that needs another size says only what differs.
"""

from typing import Any

import torch
from transformers import EsmConfig, EsmForMaskedLM, EsmForSequenceClassification

PAD, MASK = 1, 32
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TINY = {
    "vocab_size": 33,
    "pad_token_id": PAD,
    "mask_token_id": MASK,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "position_embedding_type": "rotary",
}
# Dropout of states, so that random states matter; of attention none, so that kernels may take its place.
NARROW = {"vocab_size": 24, "mask_token_id": 23, "hidden_size": 8, "intermediate_size": 8, "num_labels": 1}
NARROW |= {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}
WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, **NO_DROPOUT}


def esm_config(**settings: Any) -> EsmConfig:
    """One layer, 16 wide, 33 tokens, rotary positions, transformers' own dropout; `settings` go over that."""
    return EsmConfig(**TINY | settings)


def make_esm(cls: type = EsmForMaskedLM, seed: int = 0, **settings: Any) -> Any:
    """A model of one of transformers' classes for ESM on `esm_config`, with the same weights every time."""
    torch.manual_seed(seed)
    return cls(esm_config(**settings))


def make_narrow_esm(cls: type = EsmForSequenceClassification, seed: int = 0, **settings: Any) -> Any:
    """One layer, 8 wide, 24 tokens, one output; dropout, so that random states matter."""
    return make_esm(cls, seed, **NARROW | settings)


def make_wide_esm(cls: type = EsmForMaskedLM, seed: int = 0, **settings: Any) -> Any:
    """2 layers, 32 wide, 4 heads, random weights large enough for attention to matter, no dropout."""
    attentive = {"max_position_embeddings": 64, "token_dropout": True, "initializer_range": 0.2}
    return make_esm(cls, seed, **WIDE | attentive | settings)
