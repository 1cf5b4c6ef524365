import pytest
import torch

from hf_ext.models.pooling import merge_windows, pool

# Two rows of four tokens, two wide: special, residues, special or padding.
STATES = torch.tensor(
    [[[9.0, 9.0], [1.0, -5.0], [3.0, -1.0], [9.0, 9.0]], [[7.0, 8.0], [2.0, 4.0], [50.0, 50.0], [60.0, 60.0]]]
)
RESIDUES = torch.tensor([[False, True, True, False], [False, True, False, False]])
TOKENS = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])  # the last token of the second row is padding
MASKS = {"residue_mask": RESIDUES, "attention_mask": TOKENS}


def all_residues(num_tokens):
    return {"residue_mask": torch.ones(1, num_tokens, dtype=torch.bool)}


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("mean", [[2.0, -3.0], [2.0, 4.0]]),
        ("mean_tokens", [[5.5, 3.0], [59 / 3, 62 / 3]]),
        ("max", [[3.0, -1.0], [2.0, 4.0]]),
        ("cls", [[9.0, 9.0], [7.0, 8.0]]),
    ],
)
def test_pooled_values_are_those_worked_out_by_hand(method, values):
    torch.testing.assert_close(pool(STATES, MASKS, method), torch.tensor(values))


@pytest.mark.parametrize(("method", "ignores"), [("mean", True), ("max", True), ("cls", False), ("mean_tokens", False)])
def test_only_cls_and_mean_tokens_read_a_token_that_is_no_residue(method, ignores):
    changed = STATES.masked_fill(~RESIDUES.unsqueeze(-1), 1e4)
    assert torch.equal(pool(changed, MASKS, method), pool(STATES, MASKS, method)) is ignores


@pytest.mark.parametrize("method", ["mean", "mean_tokens", "max", "cls"])
def test_no_pooling_reads_padding(method):
    changed = STATES.masked_fill(~TOKENS.bool().unsqueeze(-1), 1e4)
    assert torch.equal(pool(changed, MASKS, method), pool(STATES, MASKS, method))


@pytest.mark.parametrize("method", ["mean", "max", "cls"])
def test_pooling_is_float32_also_for_half_precision_states_and_under_autocast(method):
    states = torch.full((1, 40, 2), 100.0) + torch.arange(40.0)[None, :, None] / 64
    mask = all_residues(40)
    expected = pool(states, mask, method)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pool(states, mask, method), expected)
        assert pool(states.bfloat16(), mask, method).dtype == torch.float32


def merged_and_whole(weights_of):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 7, 3, generator=generator)
    first, second = states[:, :4], states[:, 4:]
    windows = torch.cat([pool(part, all_residues(part.shape[1]), "mean") for part in (first, second)])
    merged = merge_windows(windows, torch.tensor([0, 0]), weights_of(torch.tensor([4, 3])), 1)
    return merged, pool(states, all_residues(7), "mean")


def test_merged_means_of_windows_equal_the_mean_over_all_their_residues():
    torch.testing.assert_close(*merged_and_whole(lambda lengths: lengths))


def test_windows_averaged_without_weights_are_told_apart():
    with pytest.raises(AssertionError):
        torch.testing.assert_close(*merged_and_whole(torch.ones_like))
