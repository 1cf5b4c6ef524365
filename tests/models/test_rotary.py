"""Rotation in place: transformers' own formula, and its gradient, in every dtype."""

import math

import pytest
import torch
from transformers.models.esm.modeling_esm import apply_rotary_pos_emb

from hf_ext.models.rotary import rotate


def angles(tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.arange(tokens)[None, :, None] * 0.3 ** torch.arange(size // 2)
    return tuple(torch.cat([part, part], -1) for part in (turns.cos(), turns.sin()))


def both_ways(x, cos, sin, factor=1.0):
    """Ours and transformers', (batch, tokens, heads, size), with the gradients of a sum of weighted values."""
    found = []
    for ours in (True, False):
        given = x.clone().requires_grad_()
        if ours:
            output = rotate(given, cos, sin, factor)
        else:
            rows = (given * factor).transpose(1, 2)
            output = apply_rotary_pos_emb(rows, rows, cos, sin)[0].to(x.dtype).transpose(1, 2)
        weights = torch.arange(output.numel()).sin().view_as(output)
        (grad,) = torch.autograd.grad((output.double() * weights).sum(), given)
        found.append((output.detach(), grad))
    return found


def test_a_quarter_turn_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4)
    turns = torch.tensor([[math.pi / 2, 0.0, math.pi / 2, 0.0]])
    # The pair (1, 3) becomes (-3, 1); the pair (2, 4) stays; twice as long.
    assert torch.allclose(
        rotate(x, turns.cos(), turns.sin(), 2.0).flatten(), torch.tensor([-6.0, 4.0, 2.0, 8.0]), atol=1e-6
    )


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)]
)
def test_values_and_gradients_are_those_of_transformers(dtype, bound):
    torch.manual_seed(0)
    x = torch.randn(3, 7, 2, 8).to(dtype)
    cos, sin = (part.to(torch.promote_types(dtype, torch.float32)) for part in angles(7, 8))
    (ours, grad), (theirs, expected) = both_ways(x, cos, sin, 0.25)
    assert (ours.dtype, grad.dtype) == (dtype, dtype)
    assert (ours - theirs).abs().max() <= bound * theirs.abs().max()
    assert (grad - expected).abs().max() <= bound * expected.abs().max()


def test_half_precision_is_rounded_once():
    torch.manual_seed(0)
    x = torch.randn(3, 7, 2, 8).bfloat16()
    cos, sin = angles(7, 8)
    exact = rotate(x.float(), cos, sin)
    assert torch.equal(rotate(x, cos, sin), exact.bfloat16())


def test_gradients_by_finite_differences():
    cos, sin = (part.double() for part in angles(3, 4))
    x = torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin, 0.5), (x,))


def test_a_penalty_on_gradients_is_that_of_transformers():
    """Where something else leads to the input too, a gradient that has none itself would be left out silently."""
    cos, sin = (part.double() for part in angles(5, 8))
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def theirs(given):
        rows = given.transpose(1, 2)
        return apply_rotary_pos_emb(rows, rows, cos, sin)[0].transpose(1, 2)

    found = []
    for rotation in (lambda given: rotate(given, cos, sin), theirs):
        given = x.clone().requires_grad_()
        (first,) = torch.autograd.grad((rotation(given) + given).pow(3).sum(), given, create_graph=True)
        found.append(torch.autograd.grad(first.pow(2).sum(), given)[0])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)  # transformers rotates in float32


def test_the_comparison_tells_the_other_direction_apart():
    torch.manual_seed(0)
    x, (cos, sin) = torch.randn(2, 5, 2, 8), angles(5, 8)
    (ours, _), _ = both_ways(x, cos, -sin)
    _, (theirs, _) = both_ways(x, cos, sin)
    assert (ours - theirs).abs().max() > 0.1
