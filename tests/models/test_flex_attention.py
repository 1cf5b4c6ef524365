"""FlexAttention on packed rows: the block mask, what it computes beside other kernels, and what a CPU cannot do."""

import pytest
import torch
from tiny_encoders import esm_encoder, make_batch, packed, real_outputs, tiny_t5
from torch.nn.attention.flex_attention import create_block_mask

from hf_ext.data.varlen_layout import VarlenLayout
from hf_ext.models import attention
from hf_ext.models.attention import BLOCK, KERNELS, block_mask, padded_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

LAYOUTS = [(3, 7, 3, 1, 12, 0, 7), (130, 7, 300, 128, 0, 128), (256,), (600, 5), (BLOCK, BLOCK)]


def layout(lengths, round_up=False) -> VarlenLayout:
    return VarlenLayout.from_mask(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], round_up)


def numbers_of_sequences(segments) -> torch.Tensor:
    """Of each token, filling included."""
    lengths = segments.cu_seqlens.diff()
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


def make_bias(segments):
    """(1, 3 heads, longest, longest), another number for each distance, as T5 has it."""
    longest = segments.max_length
    distances = torch.arange(longest)[:, None] - torch.arange(longest)
    return torch.stack([(distances * (head + 1) * 0.7).sin() for head in range(3)])[None]


def make_rows(segments, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(len(segments.slots), 3, 8, generator=generator).to(dtype) for _ in range(3)]


def flex(query, key, value, segments, scaling, bias=None):
    return KERNELS["flex"](query, key, value, segments, scaling, 0.0, bias)


@pytest.mark.parametrize("round_up", [False, True])
@pytest.mark.parametrize("lengths", LAYOUTS)
def test_the_block_mask_is_the_one_that_torch_makes_of_all_pairs(lengths, round_up):
    segments = layout(lengths, round_up)
    of, total = numbers_of_sequences(segments), len(segments.slots)
    expected = create_block_mask(lambda b, h, q, k: of[q] == of[k], None, None, total, total, device="cpu")
    found = block_mask(segments)
    assert found.shape == expected.shape
    assert torch.equal(found.to_dense(), expected.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.sampled(6)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("round_up", [False, True])
@pytest.mark.parametrize("lengths", LAYOUTS)
def test_it_computes_what_attention_with_padding_around_it_does(lengths, round_up, biased):
    segments = layout(lengths, round_up)
    rows, num = make_rows(segments), len(segments.indices)
    bias = make_bias(segments) if biased else None
    found = flex(*rows, segments, 0.3, bias)[:num]
    expected = padded_attention(*rows, segments, 0.3, 0.0, bias)[:num]
    assert (found - expected).abs().max() < 2e-6
    assert (flex(*rows, segments, 0.33, bias)[:num] - expected).abs().max() > 1e-3  # would be seen
    if biased:  # and so would a bias of the other direction
        assert (flex(*rows, segments, 0.3, bias.transpose(2, 3))[:num] - expected).abs().max() > 1e-3


def test_the_comparison_sees_sequences_that_meet(monkeypatch):
    segments = layout((40, 30))
    rows = make_rows(segments)
    expected = padded_attention(*rows, segments, 0.3, 0.0, None)
    whole = layout((70,))
    monkeypatch.setattr(attention, "block_mask", lambda _: block_mask(whole))
    assert (flex(*rows, segments, 0.3) - expected).abs().max() > 0.1


def test_a_packed_encoder_gives_the_states_of_a_padded_one_and_dropout_goes_another_way():
    batch = make_batch()
    with torch.no_grad():
        expected = real_outputs(esm_encoder(), batch)["last_hidden_state"]
        found = real_outputs(packed(esm_encoder(), "flex"), batch)["last_hidden_state"]
        assert torch.allclose(found, expected, atol=2e-5)
        expected = real_outputs(tiny_t5(), batch)["last_hidden_state"]
        biased = real_outputs(packed(tiny_t5(), "flex"), batch)["last_hidden_state"]
        assert torch.allclose(biased, expected, atol=2e-5)
        assert not torch.equal(biased, real_outputs(packed(tiny_t5(), "padded"), batch)["last_hidden_state"])
    segments = layout((5, 9))
    rows = make_rows(segments)
    torch.manual_seed(0)
    dropped = KERNELS["flex"](*rows, segments, 0.3, 0.5, None)
    torch.manual_seed(0)
    assert torch.equal(dropped, padded_attention(*rows, segments, 0.3, 0.5, None))


def test_torch_has_no_backward_pass_on_a_cpu():
    """When this fails, `--attention flex` need not be refused for training on CPUs any more."""
    segments = layout((5, 9))
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex(*(x.requires_grad_() for x in make_rows(segments)), segments, 0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
def test_on_a_gpu_outputs_and_gradients_are_those_of_padded_attention(biased):
    segments = layout((130, 7, 300))
    results = []
    for kernel in ("flex", "padded"):
        inputs = [x.cuda().requires_grad_() for x in make_rows(segments, torch.bfloat16)]
        inputs += [make_bias(segments).cuda().requires_grad_()] if biased else []
        output = KERNELS[kernel](*inputs[:3], segments.to("cuda"), 0.3, 0.0, inputs[3] if biased else None)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), inputs)])
    for ours, theirs in zip(*results, strict=True):
        assert ((ours - theirs).float().norm() / theirs.float().norm()).item() < 2e-2
