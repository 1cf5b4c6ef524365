"""Linear attention in chunks and by sums equals the formula written out."""

import pytest
import torch

from hf_ext.models.generation.light import CHUNK, attend, attend_causally, feature_map, summarise


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts(num_tokens):
    return [random(2, 3, num_tokens, 4, seed=seed) for seed in range(3)]


def written_out(queries, keys, values, allowed):
    """Every pair of tokens, weight by weight."""
    weights = (feature_map(queries) @ feature_map(keys).transpose(2, 3)) * allowed
    return (weights / weights.sum(-1, keepdim=True)) @ values


def test_two_tokens_by_hand():
    # phi(0) = 1, phi(1) = 2: the second query of 1 weighs keys 0 and 1 as 2 and 4, so values 10 and 40 make 30.
    queries, keys, values = (torch.tensor(x).view(1, 1, 2, 1) for x in ([0.0, 1.0], [0.0, 1.0], [10.0, 40.0]))
    seen, summary = attend_causally(queries, keys, values)
    assert seen.flatten().tolist() == [10.0, 30.0]
    assert summary.flatten().tolist() == [90.0, 3.0]  # 1 * 10 + 2 * 40, and 1 + 2
    assert attend(queries, summary).flatten().tolist() == [30.0, 30.0]


@pytest.mark.parametrize("num_tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 75])
def test_chunks_change_nothing(num_tokens):
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.float64).tril()
    seen, summary = attend_causally(*parts(num_tokens))
    assert (seen - written_out(*parts(num_tokens), causal)).abs().max() < 1e-12
    if num_tokens > 1:
        assert (
            seen - written_out(*parts(num_tokens), causal.tril(-1) + torch.eye(num_tokens).flip(0))
        ).abs().max() > 0.01
    assert (summary - summarise(*parts(num_tokens)[1:], None)).abs().max() < 1e-12


@pytest.mark.parametrize("cut", [1, 31, 32, 40, 74])
def test_a_summary_stands_for_the_tokens_before(cut):
    whole, last = attend_causally(*parts(75))
    _, before = attend_causally(*(x[:, :, :cut] for x in parts(75)))
    rest, summary = attend_causally(*(x[:, :, cut:] for x in parts(75)), before)
    assert (rest - whole[:, :, cut:]).abs().max() < 1e-12
    assert (summary - last).abs().max() < 1e-12


def test_masked_tokens_are_as_if_they_were_not_there():
    queries, keys, values = parts(9)
    mask = torch.ones(2, 9)
    mask[:, 5:] = 0
    seen = attend(queries, summarise(keys, values, mask))
    assert (seen - attend(queries, summarise(keys[:, :, :5], values[:, :, :5], None))).abs().max() < 1e-12
    assert (seen - attend(queries, summarise(keys, values, None))).abs().max() > 0.01
    assert attend(queries, summarise(keys, values, mask * 0)).eq(0).all()


def test_sums_stay_float32_under_autocast():
    short = [x.float() for x in parts(75)]
    exact, _ = attend_causally(*short)
    with torch.autocast("cpu", torch.bfloat16):
        seen, summary = attend_causally(*short)
        assert summary.dtype == summarise(*short[1:], None).dtype == torch.float32
    assert torch.equal(seen, exact)
    halves, _ = attend_causally(*(x.bfloat16() for x in short))
    assert halves.dtype == torch.bfloat16
