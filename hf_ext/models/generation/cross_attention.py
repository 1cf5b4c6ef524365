"""Attention of many rows to the antigens that they share: keys and values of each antigen once, none of its padding.

A backend of transformers' own registry, for decoders. Their attention to themselves is transformers' SDPA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..cpu_attention import KEPT_BYTES, attend
from .outputs import pick

NAME = "hf_ext_shared_antigens"


@dataclass(frozen=True)
class SharedAntigens:
    """Which of k antigens each of n rows attends to.

    Attributes:
        index: (n,), int64.
        mask: (k, tokens), true where an antigen has a token; None: everywhere.
    """

    index: torch.Tensor
    mask: torch.Tensor | None

    def key_mask(self, antigen: int) -> torch.Tensor | None:
        """(tokens,), of one antigen; None: all are tokens."""
        return None if self.mask is None or bool(self.mask[antigen].all()) else self.mask[antigen]

    def row_mask(self) -> torch.Tensor | None:
        """(n, 1, 1, tokens), as SDPA takes it; None: all are tokens."""
        return None if self.mask is None else pick(self.mask, self.index)[:, None, None]


def register_shared_attention() -> None:
    """Makes the backend known to transformers under `NAME`. Doing it again changes nothing."""
    AttentionInterface.register(NAME, shared_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def shared_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    antigens: SharedAntigens | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: of attention to shared antigens, which `antigens` says, and of any other.

    Args:
        query: (n, heads, tokens, head size).
        key, value: (k, heads, antigen tokens, head size).
        position_bias: of attention to antigens all zero, as T5 has it, and left out there.

    Returns:
        (n, tokens, heads, head size), and None.
    """
    given = {"dropout": dropout, "scaling": scaling, **kwargs}
    if antigens is None or getattr(module, "is_causal", False):
        return sdpa_attention_forward(module, query, key, value, attention_mask, position_bias=position_bias, **given)
    if query.is_cpu:
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_by_antigen(query, key, value, antigens, factor, dropout).transpose(1, 2), None
    key, value = pick(key, antigens.index), pick(value, antigens.index)
    return sdpa_attention_forward(module, query, key, value, antigens.row_mask(), **given)


# Left to the compiler, the loop over antigens would be compiled anew for every batch.
@torch.compiler.disable
def attend_by_antigen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    antigens: SharedAntigens,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """Rows of one antigen together, over its own tokens only: (n, heads, tokens, head size)."""
    order = antigens.index.argsort(stable=True)
    counts = antigens.index.bincount(minlength=len(key)).tolist()
    outputs, room = [], KEPT_BYTES
    # Not slices: the gradient of each is a row of zeros with one part filled in, and all of them are then added up.
    parts = zip(query.index_select(0, order).split(counts), key.unbind(), value.unbind())
    for i, (rows, keys, values) in enumerate(parts):
        if not len(rows):
            continue
        is_token = antigens.key_mask(i)
        if is_token is not None:
            keys, values = keys[:, is_token], values[:, is_token]
        keys, values = keys.expand(len(rows), -1, -1, -1), values.expand(len(rows), -1, -1, -1)
        room -= rows.shape[:3].numel() * keys.shape[2] * rows.element_size()
        outputs.append(attend(rows, keys, values, scaling, dropout, keep=room >= 0))
    return torch.cat(outputs).index_select(0, order.argsort())
