"""FlexAttention and the package flash-attn on packed rows: what they compute, and what they leave to others."""

import pytest
import torch
from closeness import relative_error
from flash_attn_reference import flash  # noqa: F401  a fixture
from tiny_encoders import esm_encoder, make_batch, packed, real_outputs, tiny_bert, tiny_esmc, tiny_t5

from hf_ext.data import VarlenLayout
from hf_ext.models import KERNELS

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
padded_attention = KERNELS["padded"]


def make_rows(lengths, round_up=False, dtype=torch.float32):
    """Layout, queries, keys and values of 3 heads, and a bias that is another number for each distance."""
    generator = torch.Generator().manual_seed(0)
    segments = VarlenLayout.from_mask(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], round_up)
    rows = [torch.randn(len(segments.slots), 3, 16, generator=generator).to(dtype) for _ in range(3)]
    distances = torch.arange(max(lengths))[:, None] - torch.arange(max(lengths))
    return segments, rows, torch.stack([(distances * (head + 1) * 0.7).sin() for head in range(3)])[None]


def difference(kernel, lengths, biased=False, round_up=False, scaling=0.3, turned=False) -> float:
    """To attention with padding around it, of real tokens."""
    segments, rows, bias = make_rows(lengths, round_up)
    given = bias.transpose(2, 3) if turned else bias
    found = kernel(*rows, segments, scaling, 0.0, given if biased else None)
    expected = padded_attention(*rows, segments, 0.3, 0.0, bias if biased else None)
    return (found - expected)[: len(segments.indices)].abs().max().item()


@pytest.mark.parametrize("biased", [False, True])
def test_flex_computes_what_attention_with_padding_does_with_t5s_bias_and_without(biased):
    several = (130, 7, 300, 128, 0, 128)  # blocks have 128 tokens
    for lengths, round_up in ((several, True), (several, False), ((256,), False)):
        assert difference(KERNELS["flex"], lengths, biased, round_up) < 2e-6


def test_the_comparison_sees_a_wrong_scale_a_turned_bias_and_sequences_that_meet():
    flex, whole = KERNELS["flex"], make_rows((70,))[0]
    assert difference(flex, (40, 30), scaling=0.33) > 1e-3
    assert difference(flex, (40, 30), biased=True, turned=True) > 1e-3
    assert difference(lambda q, k, v, segments, *others: flex(q, k, v, whole, *others), (40, 30)) > 0.1


def test_blocks_of_other_sequences_are_skipped_and_the_mask_is_made_once_for_all_layers(monkeypatch):
    masks = []
    name = "hf_ext.models.kernels.flex_attention.flex_attention"
    monkeypatch.setattr(name, lambda *rows, **given: masks.append(given["block_mask"]) or rows[0])
    segments, rows, _ = make_rows((256, 128))  # shortest first: one block of 128 tokens, two of 256
    for layout in (segments, segments, make_rows((256, 128))[0]):
        KERNELS["flex"](*rows, layout, 0.3, 0.0, None)
    assert masks[0].to_dense()[0, 0].tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    assert masks[0] is masks[1] is not masks[2]


@pytest.mark.parametrize("make", [esm_encoder, tiny_esmc, tiny_bert, tiny_t5])
def test_each_family_packed_under_flex_gives_the_states_of_the_padded_model(make):
    batch = make_batch()
    with torch.no_grad():
        expected, found = real_outputs(make(), batch), real_outputs(packed(make(), "flex"), batch)
        assert relative_error(found, expected) < 2e-5
        assert any(not torch.equal(found[name], expected[name]) for name in found)  # it is another kernel


def test_torch_has_no_backward_pass_on_a_cpu():
    """When this fails, `--attention flex` need not be refused for training on CPUs any more."""
    segments, rows, _ = make_rows((5, 9))
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        KERNELS["flex"](*(x.requires_grad_() for x in rows), segments, 0.3, 0.0, None)


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("round_up", [False, True])
def test_flash_attn_is_called_on_the_packed_row_and_a_bias_or_float32_goes_another_way(round_up):
    segments, rows, bias = make_rows((3, 7, 3, 1, 12, 7), round_up, torch.bfloat16)
    found, expected = (kernel(*rows, segments, 0.3, 0.0, None) for kernel in (KERNELS["fa2"], padded_attention))
    assert 0 < (found - expected)[: len(segments.indices)].norm() / expected.norm() < 1e-2
    for given, scores in ((rows, bias), ([x.float() for x in rows], None)):
        others = (segments, 0.3, 0.0, scores)
        assert torch.equal(KERNELS["fa2"](*given, *others), padded_attention(*given, *others))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flex", "flex with a bias", "fa2"])
def test_on_a_gpu_outputs_and_gradients_are_those_of_attention_with_padding(kernel):
    name, _, biased = kernel.partition(" ")
    if name == "fa2":
        pytest.importorskip("flash_attn", reason='pip install -e ".[flash]"')
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    results = []
    for each in (name, "padded"):
        segments, rows, bias = make_rows((130, 7, 300), dtype=torch.bfloat16 if has_bf16 else torch.float16)
        inputs = [x.cuda().requires_grad_() for x in (*rows, *([bias] if biased else []))]
        scores = inputs[3] if biased else None
        output = KERNELS[each](*inputs[:3], segments.to("cuda"), 0.3, 0.0, scores)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), inputs)])
    for ours, theirs in zip(*results, strict=True):
        assert ((ours - theirs).float().norm() / theirs.float().norm()).item() < 2e-2
