"""Attention of unpadded sequences on a CPU: equally long ones together, in blocks whose scores stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad, scaled_dot_product_attention

from ..data.varlen_layout import VarlenLayout
from .process_settings import read_matmul_precision

# Scores of one block, in bytes. Measured on two cores with 20 heads of 16: 1 to 4 MiB are alike, 8 MiB leaves the cache
# and takes twice as long.
BLOCK_BYTES = 2 << 20
MAX_HEAD_BYTES = 3 << 20  # of one head's scores: 886 tokens in float32, 1,254 in half precision
# Weights that one layer keeps for its backward pass, the shortest sequences' first; it computes the others again. They
# are what backward would compute: 33 layers keep 2 GiB at most, where a model of as many has 10 GiB of AdamW states.
KEPT_BYTES = 64 << 20
# False where a recomputed layer keeps the output of attention: weights would fill what recomputing it frees.
_keeps_weights: ContextVar[bool] = ContextVar("keeps_weights", default=True)


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
    segments: VarlenLayout,
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


def _equally_long(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: VarlenLayout
) -> Iterator[list[torch.Tensor]]:
    """Parts of a row's queries, keys and values as (sequences, heads, tokens, head size), for each length."""
    groups = [(count, length) for _, count, length in segments.groups()]
    sizes = [*(count * length for count, length in groups), segments.num_filled]
    # Not slices: the gradient of each is a row of zeros with one part filled in, and all of them are then added up.
    for group, *parts in zip(groups, *(x.split(sizes) for x in (query, key, value))):
        yield [x.unflatten(0, group).transpose(1, 2) for x in parts]


def _in_a_row(parts: list[torch.Tensor], segments: VarlenLayout) -> torch.Tensor:
    """(T, heads, head size) of parts as `_equally_long` gives them; the filling is zero."""
    row = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
    return pad(row, (0, 0, 0, 0, 0, segments.num_filled))


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
    """Where torch's kernel is faster (one head's scores fill the cache, or products without oneDNN's), or ours is not
    exact: scores above 65,504 are no number in float16.
    """
    if query.dtype in (torch.float64, torch.float16) or _is_plain_float32(query):
        return True
    return query.shape[2] * key.shape[2] * query.element_size() > MAX_HEAD_BYTES


def _is_plain_float32(query: torch.Tensor) -> bool:
    return query.dtype == torch.float32 and read_matmul_precision().name("cpu") == "float32"


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
BLOCKED = torch.ops.hf_ext.blocked_attention  # by which dispatch modes know it


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
    scores = torch.bmm(query, key.transpose(1, 2))
    # torch's softmax in half precision takes up to twice as long as that of a float32 copy (1.8 ns a score at 50
    # tokens against 1.0, 0.6 either way at 630; one AVX512-BF16 core, torch 2.13) and computes in float32 itself.
    return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
