"""Attention over sequences of different length without padding, as backends of transformers' own registry.

Registered with `AttentionInterface` and with `AttentionMaskInterface`: without the second, transformers drops the mask
of a padded batch in silence. Each backend works on a padded batch with its mask, and on the packed row that
`models/packing.py` makes (then it is given `segments`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, sdpa_mask

from ..data.segments import Segments
from .flex_attention import flex_packed_attention

PREFIX = "hf_ext_"
# Scores of one block, in bytes. Measured on two cores with 20 heads of 16: 1 to 4 MiB are alike, 8 MiB leaves the cache
# and takes twice as long.
BLOCK_BYTES = 2 << 20
MAX_HEAD_BYTES = 3 << 20  # of one head's scores: 886 tokens in float32, 1,254 in half precision
# Weights that one layer keeps for its backward pass, the shortest sequences' first; it computes the others again. They
# are what backward would compute: 33 layers keep 2 GiB at most, where a model of as many has 10 GiB of AdamW states.
KEPT_BYTES = 64 << 20
# False where a recomputed layer keeps the output of attention: weights would fill what recomputing it frees.
_keeps_weights: ContextVar[bool] = ContextVar("keeps_weights", default=True)


def register_attention() -> None:
    """Makes the backends known to transformers under `hf_ext_<kernel>`. Doing it again changes nothing."""
    for name, kernel in KERNELS.items():
        AttentionInterface.register(PREFIX + name, _as_backend(kernel))
        AttentionMaskInterface.register(PREFIX + name, _key_mask)


@contextmanager
def keeping_no_weights() -> Iterator[None]:
    """Inside, in this thread, `attend` keeps no weights, whatever `keep` says; the numbers are the same."""
    token = _keeps_weights.set(False)
    try:
        yield
    finally:
        _keeps_weights.reset(token)


# Left to the compiler, the loop over lengths would be compiled anew for every batch.
@torch.compiler.disable
def blocked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float,
    dropout: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Attention on a CPU: equally long sequences together, in blocks whose scores stay in the cache.

    Effect: weights above `KEPT_BYTES` are computed again in the backward pass instead of kept, so memory grows with the
    length, not with its square. In bfloat16, where scores are rounded too, torch's CPU kernel took 8.0 times as long
    forward and backward at 50 tokens, 3.8 at 122, 2.1 at 267, 1.8 at 632, as long at 1,022 (one AVX-512 core, 20 heads
    of 16; `benchmarks/results/attention_kernels_cpu.json`; what keeping weights brings:
    `benchmarks/attention_backward.py`). Where torch's kernel is the faster one it is used.

    Args:
        query, key, value: (T, heads, head size).
        segments: the layout of the T tokens.
        scaling: factor on the scores.
        dropout: probability; above 0, or with a bias, the scores are kept.
        bias: (1, heads, longest, longest) added to the scores of every sequence, or None.

    Returns:
        (T, heads, head size).
    """
    outputs, room = [], KEPT_BYTES
    for q, k, v in _equally_long(query, key, value, segments):
        room -= q.shape[:3].numel() * k.shape[2] * q.element_size()
        part = None if bias is None else bias[..., : q.shape[2], : q.shape[2]]
        outputs.append(attend(q, k, v, scaling, dropout, part, room >= 0))
    return _in_a_row(outputs, segments)


@torch.compiler.disable
def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float,
    dropout: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """torch's own attention in float32, equally long sequences together; arguments as `blocked_attention`.

    For half precision on CPUs without matrix instructions for it: float32 needs no rounding between products, and its
    softmax is faster (0.5 to 1.0 of the time of `blocked`; `benchmarks/results/attention_kernels_cpu.json`). Float32
    copies of queries, keys, values and output stay for the backward pass. With dropout or a bias it is
    `blocked_attention`.
    """
    if bias is not None or dropout:
        return blocked_attention(query, key, value, segments, scaling, dropout, bias)
    outputs = []
    with torch.autocast(query.device.type, enabled=False):
        for parts in _equally_long(query, key, value, segments):
            q, k, v = (x.float() for x in parts)
            output = scaled_dot_product_attention(q, k, v, scale=scaling)
            outputs.append(output.to(query.dtype))
    return _in_a_row(outputs, segments)


def _equally_long(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments
) -> Iterator[list[torch.Tensor]]:
    """Parts of a row's queries, keys and values as (sequences, heads, tokens, head size), for each length."""
    groups = [(count, length) for _, count, length in segments.groups()]
    sizes = [*(count * length for count, length in groups), segments.num_filled]
    # Not slices: the gradient of each is a row of zeros with one part filled in, and all of them are then added up.
    for group, *parts in zip(groups, *(x.split(sizes) for x in (query, key, value))):
        yield [x.unflatten(0, group).transpose(1, 2) for x in parts]


def _in_a_row(parts: list[torch.Tensor], segments: Segments) -> torch.Tensor:
    """(T, heads, head size) of parts as `_equally_long` gives them; the filling is zero."""
    row = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
    return pad(row, (0, 0, 0, 0, 0, segments.num_filled))


def padded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float,
    dropout: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """torch's own attention on a padded copy of queries, keys and values only; arguments as `blocked_attention`.

    For GPUs without a kernel for unpadded sequences (before compute capability 8.0) and for scores with a bias.
    """
    rows, width = segments.is_token.shape
    num_slots = rows * width
    # Filling needs no attention: it shares one slot behind the others, which is then left out.
    fills = segments.rounds_up

    def spread(x: torch.Tensor) -> torch.Tensor:
        padded = x.new_zeros(num_slots + fills, *x.shape[1:]).index_copy(0, segments.slots, x)
        padded = padded[:num_slots] if fills else padded
        return padded.unflatten(0, (rows, width)).transpose(1, 2)

    mask = segments.is_token[:, None, None, :]
    if bias is not None:
        mask = torch.where(mask, bias.to(query.dtype), torch.finfo(query.dtype).min)
    output = scaled_dot_product_attention(
        spread(query), spread(key), spread(value), attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    output = output.transpose(1, 2).flatten(0, 1)
    return (pad(output, (0, 0, 0, 0, 0, 1)) if fills else output).index_select(0, segments.slots)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float,
    dropout: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """torch's flash attention for unpadded sequences (compute capability 8.0 and later, bf16 or fp16).

    Arguments as `blocked_attention`. What the kernel does not know (a bias, dropout, float32) goes to
    `padded_attention`, which gives the same result.
    """
    if bias is not None or dropout or query.dtype == torch.float32:
        return padded_attention(query, key, value, segments, scaling, dropout, bias)
    from torch.nn.attention.varlen import varlen_attn  # not in every torch that imports this module

    ends, longest = segments.cu_seqlens, segments.max_length
    output = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scaling)
    assert isinstance(output, torch.Tensor)  # a pair only where the scores' normaliser is asked for
    return output


def flex_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float,
    dropout: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """torch's FlexAttention with a block mask of the layout (`flex_attention.py`).

    Arguments as `blocked_attention`. A bias and dropout go to `padded_attention`, which gives the same result.
    """
    if bias is not None or dropout:
        return padded_attention(query, key, value, segments, scaling, dropout, bias)
    return flex_packed_attention(query, key, value, segments, scaling)


KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "blocked": blocked_attention,
    "grouped": grouped_attention,
    "padded": padded_attention,
    "varlen": varlen_attention,
    "flex": flex_kernel,
}


def _as_backend(kernel: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, None]]:
    """The function that transformers calls: (batch, heads, width, head size) in, (batch, width, heads, size) out.

    A padded batch that is more than sequences attending to themselves (causal, cross-attention, a mask per query, a
    bias whose distances count padding) is answered by transformers' SDPA.
    """

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        position_bias: torch.Tensor | None = None,
        segments: Segments | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        rows = [x.transpose(1, 2) for x in (query, key, value)]
        if segments is not None:
            # Not x[0], whose gradient is a row of zeros that is filled in.
            return kernel(*(x.squeeze(0) for x in rows), segments, factor, dropout, position_bias)[None], None
        asked = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if asked is None else asked
        if is_causal or position_bias is not None or not _is_key_mask(query, key, attention_mask):
            given = {"dropout": dropout, "scaling": scaling, "position_bias": position_bias, **kwargs}
            return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
        keys = torch.ones(query.shape[0], query.shape[2], device=query.device)
        layout = Segments.from_mask(keys if attention_mask is None else attention_mask[:, 0, 0])
        if not layout.max_length:
            return torch.zeros_like(rows[0]), None
        packed = (layout.pack(x)[0] for x in rows)
        return layout.unpack(kernel(*packed, layout, factor, dropout, None)[None]), None

    return attention


def _key_mask(*, q_length: int, mask_function: Callable[..., Any], **kwargs: Any) -> torch.Tensor | None:
    """transformers' mask for SDPA, true where a key counts; (batch, 1, 1, keys) if every query sees the same keys."""
    same = mask_function is bidirectional_mask_function
    return sdpa_mask(q_length=1 if same else q_length, mask_function=mask_function, **kwargs)


def _is_key_mask(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether all of a sequence's tokens attend to all of them; a mask per query, or one to add, is something else."""
    one_row = mask is None or (mask.dtype == torch.bool and mask.shape[1:3] == (1, 1))
    return one_row and query.shape == key.shape


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    dropout: float,
    bias: torch.Tensor | None = None,
    keep: bool = False,
) -> torch.Tensor:
    """Attention of equally long sequences on a CPU, by whichever way is the fastest there.

    Args:
        query: (sequences, heads, tokens, head size).
        key, value: (sequences, heads, keys, head size), none of them padding.
        scaling, dropout: as of `blocked_attention`.
        bias: added to the scores, of a shape that broadcasts to theirs; or None.
        keep: the softmax, for the backward pass, in place of computing it again.
    """
    if bias is not None or dropout:
        scores = query @ key.transpose(2, 3) * scaling
        weights = torch.softmax(scores if bias is None else scores + bias, -1).to(value.dtype)
        return drop(weights, dropout) @ value
    if _prefers_sdpa(query, key):
        return scaled_dot_product_attention(query, key, value, scale=scaling)
    flat = (x.flatten(0, 1).contiguous() for x in (query * scaling, key, value))
    kernel = _BlockedAttention.apply if keep and _keeps_weights.get() else _blocked_op
    return kernel(*flat).unflatten(0, query.shape[:2])


def _prefers_sdpa(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Where torch's kernel is faster: one head's scores fill the cache, or float32 without oneDNN's products."""
    if query.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return True
    return query.shape[2] * key.shape[2] * query.element_size() > MAX_HEAD_BYTES


class _BlockedAttention(torch.autograd.Function):
    """softmax(q k^T) v for (sequences * heads, tokens, head size), which keeps the softmax for the backward pass."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output, kept = _blocked_forward(query, key, value, any(ctx.needs_input_grad))
        ctx.save_for_backward(query, key, value, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, *kept = ctx.saved_tensors
        return _blocked_backward(grad, query, key, value, kept)


@torch.library.custom_op("hf_ext::blocked_attention", mutates_args=())
def _blocked_op(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """As `_BlockedAttention`, keeping no softmax; one operation, whose output checkpointing can keep."""
    return _blocked_forward(query, key, value, False)[0]


def _op_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    query, key, value = ctx.saved_tensors
    return _blocked_backward(grad, query, key, value, [])


_blocked_op.register_fake(lambda query, key, value: torch.empty_like(query))
_blocked_op.register_autograd(_op_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def _blocked_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output, and the softmax of each block if it is to be kept."""
    output, kept = torch.empty_like(query), []
    with torch.autocast(query.device.type, enabled=False):
        for block in _blocks(query, key):
            weights = _weights(query[block], key[block])
            torch.bmm(weights, value[block], out=output[block])
            kept += [weights] if keep else []
    return output, kept


def _blocked_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad = grad.contiguous()
    grad_query, grad_key, grad_value = map(torch.empty_like, (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        for i, block in enumerate(_blocks(query, key)):
            weights = kept[i] if kept else _weights(query[block], key[block])
            torch.bmm(weights.transpose(1, 2), grad[block], out=grad_value[block])
            grad_weights = torch.bmm(grad[block], value[block].transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            torch.bmm(grad_scores, key[block], out=grad_query[block])
            torch.bmm(grad_scores.transpose(1, 2), query[block], out=grad_key[block])
    return grad_query, grad_key, grad_value


def _blocks(query: torch.Tensor, key: torch.Tensor) -> list[slice]:
    bytes_of_one = query.shape[1] * key.shape[1] * query.element_size()
    size = max(1, BLOCK_BYTES // max(1, bytes_of_one))
    return [slice(start, start + size) for start in range(0, len(query), size)]


def _weights(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.bmm(query, key.transpose(1, 2)), -1)
