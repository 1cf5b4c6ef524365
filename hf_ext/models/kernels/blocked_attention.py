"""Attention on a CPU: equally long sequences together, in blocks whose scores stay in the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ...data import VarlenLayout
from .process_settings import read_matmul_precision

# Scores of one block, in bytes. Measured on two cores with 20 heads of 16: 1 to 4 MiB are alike, 8 MiB leaves the cache
# and takes twice as long.
BLOCK_BYTES = 2 << 20
MAX_HEAD_BYTES = 3 << 20  # of one head's scores: 886 tokens in float32, 1,254 in half precision
# Weights that one layer keeps for its backward pass, the shortest sequences' first; it computes the others again. They
# are what backward would compute: 33 layers keep 2 GiB at most, where a model of as many has 10 GiB of AdamW states.
KEPT_BYTES = 64 << 20
FAR = 2.0**100  # sums of exponentials, between one over it and it, leave room for their products in 8 bits of exponent
Bias = Tensor | None


# Left to the compiler, the loop over lengths would be compiled anew for every batch.
@torch.compiler.disable
def blocked_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: VarlenLayout, scaling: float, dropout: float, bias: Bias
) -> Tensor:
    """Computes attention on a CPU: equally long sequences together, in blocks whose scores stay in the cache.

    Effect: weights above `KEPT_BYTES` are computed again in the backward pass instead of kept, so memory grows with the
    length, not with its square. In bfloat16, where scores are rounded too, torch's CPU kernel took 8.0 times as long
    forward and backward at 50 tokens, 3.8 at 122, 2.1 at 267, 1.8 at 632, as long at 1,022 (one AVX-512 core, 20 heads
    of 16; `benchmarks/results/attention_kernels_cpu.json`; what keeping weights brings:
    `benchmarks/results/attention_backward_cpu.json`). Where torch's kernel is the faster one it is used.

    Args:
        query, key, value: (T, heads, head size).
        segments: the layout of the T tokens.
        scaling: factor on the scores.
        dropout: probability; above 0, or with a bias, the scores are kept.
        bias: (1, heads, longest, longest) added to the scores of every sequence, or None.

    Returns:
        (T, heads, head size).
    """
    groups = [(count, length) for _, count, length in segments.groups()]
    sizes = [*(count * length for count, length in groups), segments.num_filled]
    outputs = []
    room = KEPT_BYTES
    # Not slices: the gradient of each is a row of zeros with one part filled in, and all of them are then added up.
    for group, *parts in zip(groups, *(x.split(sizes) for x in (query, key, value))):
        q, k, v = [x.unflatten(0, group).transpose(1, 2) for x in parts]
        room -= q.shape[:3].numel() * k.shape[2] * q.element_size()
        part = None if bias is None else bias[..., : q.shape[2], : q.shape[2]]
        output = attend(q, k, v, scaling, dropout, part, room >= 0)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return pad(torch.cat(outputs), (0, 0, 0, 0, 0, segments.num_filled))  # the filling is zero


def attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float, bias: Bias = None, keep: bool = False
) -> Tensor:
    """Computes attention of equally long sequences on a CPU, by whichever way is the fastest there.

    Args:
        query, key, value: (sequences, heads, tokens, head size), none of them padding.
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
    flat = [x.flatten(0, 1).contiguous() for x in (query * scaling, key, value)]
    keep = keep and torch.is_grad_enabled() and any(x.requires_grad for x in flat)
    return _blocked_op(*flat, keep)[0].unflatten(0, query.shape[:2])


def _prefers_sdpa(query: Tensor, key: Tensor) -> bool:
    """Tells where torch's kernel is faster (one head's scores fill the cache, or products without oneDNN's), or ours is
    not exact: scores above 65,504 are no number in float16."""
    is_plain_float32 = query.dtype == torch.float32 and read_matmul_precision().name("cpu") == "float32"
    if query.dtype in (torch.float64, torch.float16) or is_plain_float32:
        return True
    return query.shape[2] * key.shape[2] * query.element_size() > MAX_HEAD_BYTES


@torch.library.custom_op("hf_ext::blocked_attention", mutates_args=())
def _blocked_op(query: Tensor, key: Tensor, value: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """Computes softmax(q k^T) v for (sequences * heads, tokens, head size); and the softmax, for its backward.

    One operation, so that FLOPs can be counted.
    """
    output = torch.empty_like(query)
    kept = _empty_weights(query, key, len(query) if keep else 0)
    blocks = _blocks(query, key)
    scratch = _empty_weights(query, key, len(query[blocks[0]]))
    with torch.autocast(query.device.type, enabled=False):
        for block in blocks:
            into = output[block]
            weights = scratch[: len(into)]
            inverse = _exponentials(query[block], key[block], weights, keep)
            if keep:
                torch.bmm(torch.mul(weights, inverse, out=kept[block]), value[block], out=into)
            else:  # fewer numbers to divide
                torch.bmm(weights, value[block], out=into).mul_(inverse)
    return output, kept


def _op_backward(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
    query, key, value, kept = ctx.saved_tensors
    grad = grad.contiguous()
    grad_query, grad_key, grad_value = map(torch.empty_like, (query, key, value))
    blocks = _blocks(query, key)
    size = len(query[blocks[0]])
    scratch, grads = (_empty_weights(query, key, number) for number in (0 if len(kept) else size, size))
    with torch.autocast(query.device.type, enabled=False):
        for block in blocks:
            q = query[block]
            k = key[block]
            g = grad[block]
            weights = kept[block] if len(kept) else scratch[: len(q)]
            if not len(kept):
                weights.mul_(_exponentials(q, k, weights))
            torch.bmm(weights.transpose(1, 2), g, out=grad_value[block])
            grad_weights = torch.bmm(g, value[block].transpose(1, 2), out=grads[: len(q)])
            # Its own sum over the row, of numbers rounded alike: with sum(grad * output) for it errors do not cancel.
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            torch.bmm(grad_scores, k, out=grad_query[block])
            torch.bmm(grad_scores.transpose(1, 2), q, out=grad_key[block])
    return grad_query, grad_key, grad_value, None


def _empty_weights(query: Tensor, key: Tensor, number: int) -> Tensor:
    return query.new_empty(number, query.shape[1], key.shape[1])


@_blocked_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    weights = _empty_weights(query, key, len(query) if keep else 0)
    return torch.empty_like(query), weights


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.set_materialize_grads(False)  # else `kept` has a gradient of as many zeros


_blocked_op.register_autograd(_op_backward, setup_context=_keep_for_backward)


def _blocks(query: Tensor, key: Tensor) -> list[slice]:
    bytes_of_one = query.shape[1] * key.shape[1] * query.element_size()
    size = max(1, BLOCK_BYTES // max(1, bytes_of_one))
    return [slice(start, start + size) for start in range(0, len(query), size)]


def _exponentials(query: Tensor, key: Tensor, out: Tensor, exact: bool = True) -> Tensor:
    """Writes exp(q k^T) to `out`; one over the sums of its rows, (n, tokens, 1), float32: their product is the softmax.

    Without the largest score taken away, which saves passes over them. Where scores are too large or too small for
    that, torch's softmax computes them. Sums that need not be `exact` are rounded as `out` is: in bf16 a pass less.
    """
    torch.bmm(query, key.transpose(1, 2), out=out)
    sums = out.exp_().sum(-1, keepdim=True, dtype=torch.float32 if exact else None).float()
    smallest, largest = sums.aminmax()
    if not (smallest > 1 / FAR and largest < FAR):  # nor with NaN
        out.copy_(torch.bmm(query, key.transpose(1, 2)).softmax(-1, dtype=torch.float32))
        sums.fill_(1)
    return sums.reciprocal_()


def flop_counter() -> FlopCounterMode:
    """Counts the products of matrices of all that runs inside, attention included, on any device.

    torch before 2.15 counts no attention on CPUs (`_scaled_dot_product_flash_attention_for_cpu`), nor our operation.

    As torch counts its fused kernels, a backward pass of attention has the scores that it computes again in it: 7
    products forward and backward, where model FLOPs utilisation counts 6.
    """
    aten = torch.ops.aten
    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *x, **_: sdpa_backward_flop_count(*x[:4]),
        torch.ops.hf_ext.blocked_attention: _blocked_flop,  # its backward pass is made of products that are seen
        # Not in every torch.
        getattr(torch.ops.mkldnn, "_linear_pointwise", None): lambda x, w, *rest, **_: 2 * x.numel() * w[0],
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _blocked_flop(*shapes: Any, **settings: object) -> int:
    """Counts FLOPs for query, key and value of (sequences * heads, tokens, head size)."""
    return sdpa_flop_count(*((shape[0], 1, *shape[1:]) for shape in shapes[:3]))
