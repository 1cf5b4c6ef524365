"""Attention over sequences of different length without padding, as backends of transformers' own registry.

Registered with `AttentionInterface` and with `AttentionMaskInterface`: without the second, transformers drops the mask
of a padded batch in silence. Each backend works on a padded batch with its mask, and on the packed row that
`models/kernels/packing.py` makes (then it is given `segments`).

A kernel takes queries, keys and values (T, heads, head size) of a packed row of T tokens, its layout, the factor on the
scores, a dropout probability, and a bias (1, heads, longest, longest) added to the scores of every sequence, or None;
it gives (T, heads, head size).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, sdpa_mask

from ...data import VarlenLayout
from .blocked_attention import Bias, blocked_attention
from .flex_attention import attend_in_blocks

PREFIX = "hf_ext_"


def register_attention() -> None:
    """Makes the backends known to transformers under `hf_ext_<kernel>`. Doing it again changes nothing."""
    for name, kernel in KERNELS.items():
        AttentionInterface.register(PREFIX + name, _as_backend(kernel))
        AttentionMaskInterface.register(PREFIX + name, _key_mask)


def padded_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: VarlenLayout, scaling: float, dropout: float, bias: Bias
) -> Tensor:
    """Runs torch's own attention on a padded copy of queries, keys and values only.

    For GPUs without a kernel for unpadded sequences (before compute capability 8.0) and for scores with a bias. `bias`
    may be `padded_bias`, which is then not made anew.
    """
    rows, width = segments.is_token.shape
    num_slots = rows * width
    # Filling needs no attention: it shares one slot behind the others, which is then left out.
    fills = segments.rounds_up

    def spread(x: Tensor) -> Tensor:
        padded = x.new_zeros(num_slots + fills, *x.shape[1:]).index_copy(0, segments.slots, x)
        padded = padded[:num_slots] if fills else padded
        return padded.unflatten(0, (rows, width)).transpose(1, 2)

    mask = segments.is_token[:, None, None, :]
    if bias is not None:
        mask = bias.to(query.dtype) if len(bias) == rows else padded_bias(bias, segments, query.dtype)
    output = scaled_dot_product_attention(
        spread(query), spread(key), spread(value), attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    output = output.transpose(1, 2).flatten(0, 1)
    if fills:
        output = pad(output, (0, 0, 0, 0, 0, 1))
    return output.index_select(0, segments.slots)


def padded_bias(bias: Tensor, segments: VarlenLayout, dtype: torch.dtype) -> Tensor:
    """Builds a bias of scores for each of n sequences, the lowest number where a key is padding.

    Args:
        bias: (1, heads, longest, longest).
        dtype: of queries.

    Returns:
        (n, heads, longest, longest). Rows begin at multiples of 8 values, as torch's memory-efficient kernel wants
        them; it copies others (`pad_bias`, aten/native/transformers/attention.cpp).
    """
    width = bias.shape[-1]
    spare = -width % 8
    is_token = pad(segments.is_token, (0, spare))[:, None, None, :]
    padded = torch.where(is_token, pad(bias.to(dtype), (0, spare)), torch.finfo(dtype).min)
    return padded[..., :width]


def bias_for_layers(kernel: str, bias: Tensor, segments: VarlenLayout, dtype: torch.dtype) -> Tensor:
    """Returns what all layers give their `kernel`: `padded_bias`, made once, or `bias` itself."""
    if kernel in (PREFIX + "padded", PREFIX + "varlen"):
        return padded_bias(bias, segments, dtype)
    return bias


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: VarlenLayout, scaling: float, dropout: float, bias: Bias
) -> Tensor:
    """Runs torch's flash attention for unpadded sequences (compute capability 8.0 and later, bf16 or fp16).

    What it does not know (a bias, dropout, float32) goes to `padded_attention`, which gives the same result.
    """
    if bias is not None or dropout or query.dtype == torch.float32:
        return padded_attention(query, key, value, segments, scaling, dropout, bias)
    from torch.nn.attention.varlen import varlen_attn  # not in every torch that imports this module

    ends = segments.cu_seqlens
    longest = segments.max_length
    output = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scaling)
    assert isinstance(output, Tensor)  # a pair only where the scores' normaliser is asked for
    return output


def fa2_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: VarlenLayout, scaling: float, dropout: float, bias: Bias
) -> Tensor:
    """Runs the package flash-attn, by the function that transformers' `flash_attention_2` calls for packed rows.

    What it does not know (a bias, float32) goes to `padded_attention`, which gives the same result.
    """
    if bias is not None or query.dtype == torch.float32:
        return padded_attention(query, key, value, segments, scaling, dropout, bias)
    from flash_attn import flash_attn_varlen_func  # compiled for CUDA, and rarely installed

    ends = segments.cu_seqlens
    longest = segments.max_length
    return flash_attn_varlen_func(query, key, value, ends, ends, longest, longest, dropout, scaling)


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: VarlenLayout, scaling: float, dropout: float, bias: Bias
) -> Tensor:
    """Runs torch's FlexAttention, with a block mask of the row. Dropout, which it lacks, goes to `padded_attention`."""
    if dropout:
        return padded_attention(query, key, value, segments, scaling, dropout, bias)
    return attend_in_blocks(query, key, value, segments, scaling, bias)


KERNELS: dict[str, Callable[..., Tensor]] = {
    "blocked": blocked_attention,
    "padded": padded_attention,
    "varlen": varlen_attention,
    "fa2": fa2_attention,  # transformers takes each name with "flash" in it for one of its own
    "flex": flex_attention,
}


def _as_backend(kernel: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """Returns the function for transformers: (batch, heads, width, head size) in, (batch, width, heads, size) out.

    A padded batch that is more than sequences attending to themselves (causal, cross-attention, a mask per query, a
    bias whose distances count padding) is answered by transformers' SDPA.
    """

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        position_bias: Bias = None,
        segments: VarlenLayout | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        # Under autocast ESM C has float32 queries and keys beside half values; torch's own attention casts them too.
        query = query.to(value.dtype)
        key = key.to(value.dtype)
        rows = [x.transpose(1, 2) for x in (query, key, value)]
        if segments is not None:
            # Not x[0], whose gradient is a row of zeros that is filled in.
            packed = [x.squeeze(0) for x in rows]
            return kernel(*packed, segments, factor, dropout, position_bias)[None], None
        asked = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if asked is None else asked
        if is_causal or position_bias is not None or not _is_key_mask(query, key, attention_mask):
            given = {"dropout": dropout, "scaling": scaling, "position_bias": position_bias, **kwargs}
            return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
        keys = torch.ones(query.shape[0], query.shape[2], device=query.device)
        layout = VarlenLayout.from_mask(keys if attention_mask is None else attention_mask[:, 0, 0])
        if not layout.max_length:
            return torch.zeros_like(rows[0]), None
        packed = [layout.pack(x)[0] for x in rows]
        output = kernel(*packed, layout, factor, dropout, None)
        return layout.unpack(output[None]), None

    return attention


def _key_mask(*, q_length: int, mask_function: Callable[..., Any], **kwargs: Any) -> Tensor | None:
    """Builds a mask for SDPA, true where a key counts; (batch, 1, 1, keys) if every query sees the same keys."""
    same = mask_function is bidirectional_mask_function
    return sdpa_mask(q_length=1 if same else q_length, mask_function=mask_function, **kwargs)


def _is_key_mask(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Returns whether all tokens of a sequence attend to all; a mask per query, or one to add, says otherwise."""
    one_row = mask is None or (mask.dtype == torch.bool and mask.shape[1:3] == (1, 1))
    return one_row and query.shape == key.shape
