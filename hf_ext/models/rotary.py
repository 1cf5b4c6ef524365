"""Rotary positions in a few passes over memory: halves are multiplied in place, forward and backward alike.

transformers rotates with `x * cos + cat(-x2, x1) * sin`: ten passes forward, and backward the zeros and sums of its
slices beside them. A rotation's gradient is the rotation by the opposite angle.
"""

from __future__ import annotations

from typing import Any

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """`factor` times `x` rotated, as transformers' `apply_rotary_pos_emb` does it, and its gradient.

    Args:
        x: (..., tokens, heads, head size), of any floating dtype; computed in float32 at least, and rounded once.
        cos, sin: (..., tokens, head size), of which the second half repeats the first.
        factor: on the result, such as the scale of queries.

    Returns:
        As `x`.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    cosines, sines = (part[..., None, :half].to(dtype) * factor for part in (cos, sin))
    return _Rotation.apply(x, cosines, sines)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(grad, cos, -sin), None, None  # which has a gradient itself, for penalties on gradients


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    exact = x.to(cos.dtype)
    first, second = exact.chunk(2, -1)
    result = torch.empty_like(exact)
    left, right = result.chunk(2, -1)
    torch.mul(first, cos, out=left)
    left.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right)
    right.addcmul_(first, sin)
    return result.to(x.dtype)
