"""Each attention kernel against softmax(q k^T) v of one sequence at a time, and what transformers gets to see of it."""

import copy

import pytest
import torch
from closeness import relative_error
from tiny_encoders import esm_encoder, largest_error, make_batch, packed, tiny_esm, tiny_t5, use_kernel
from torch import nn
from transformers import EsmModel, T5Config, T5ForConditionalGeneration

from hf_ext.data import VarlenLayout
from hf_ext.models import KERNELS, PREFIX, flop_counter
from hf_ext.models.kernels import blocked_attention as blocked
from hf_ext.models.kernels.attention import padded_attention
from hf_ext.models.kernels.blocked_attention import blocked_attention
from hf_ext.reporting import flops_coefficients

pytestmark = [pytest.mark.internals, pytest.mark.usefixtures("blocked_in_float32")]

LENGTHS = (3, 7, 3, 1, 12, 0, 7)
HEADS, SIZE, SCALING = 3, 8, 0.3
CPU_KERNELS = [blocked_attention, padded_attention]


def make_inputs(lengths=LENGTHS, bias=False, round_up=False, dtype=torch.float32):
    """Layout, packed (T, heads, size) queries, keys, values with zeros in the filling, and a bias or None."""
    generator = torch.Generator().manual_seed(0)
    segments = VarlenLayout.from_mask((torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]), round_up)
    shape = (len(segments.indices), HEADS, SIZE)
    rows = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
    rows = [nn.functional.pad(x, (0, 0, 0, 0, 0, segments.num_filled)).requires_grad_() for x in rows]
    longest = segments.max_length
    scores = torch.randn(1, HEADS, longest, longest, generator=generator).to(torch.promote_types(dtype, torch.float32))
    return segments, *rows, scores.requires_grad_() if bias else None


def one_at_a_time(query, key, value, segments, scaling, dropout, bias):
    """The definition, in float64: every sequence alone."""
    query, key, value = (x.double() for x in (query, key, value))
    outputs, start = [], 0
    for length in segments.cu_seqlens.diff().tolist():
        q, k, v = (x[start : start + length].transpose(0, 1) for x in (query, key, value))
        scores = q @ k.transpose(1, 2) * scaling
        if bias is not None:
            scores = scores + bias[0, :, :length, :length].double()
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(outputs)


def whole_row(query, key, value, segments, scaling, dropout, bias):
    """A broken twin: sequences attend to each other."""
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    return ((q @ k.transpose(1, 2) * scaling).softmax(-1) @ v).transpose(0, 1)


def error_of(kernel, dtype=torch.float32, **settings):
    """Relative error of real tokens' outputs and of the gradients of queries, keys, values and bias."""
    segments, *tensors = make_inputs(dtype=dtype, **settings)
    wanted = [x for x in tensors if x is not None]
    found = []
    for compute in (kernel, one_at_a_time):
        output = compute(*tensors[:3], segments, SCALING, 0.0, tensors[3])
        assert output.shape == tensors[0].shape
        output = output[: len(segments.indices)]
        weights = torch.arange(1.0, output.numel() + 1).sin().view_as(output).to(output.dtype)
        found.append([output.detach(), *torch.autograd.grad((output * weights).sum(), wanted, allow_unused=True)])
    ours, expected = (dict(zip(("output", "query", "key", "value", "bias"), tensors)) for tensors in found)
    ours = {name: torch.zeros_like(expected[name]) if x is None else x for name, x in ours.items()}
    return relative_error(ours, expected, bound=2e-6)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_scores_that_float16_cannot_hold_are_computed(kernel):
    segments, *rows, _ = make_inputs(dtype=torch.float16)
    query, key, value = rows
    found = kernel(200 * query, 200 * key, value, segments, 4.0, 0.0, None)
    expected = one_at_a_time(200 * query, 200 * key, value, segments, 4.0, 0.0, None)
    assert (found[: len(segments.indices)] - expected).abs().max() < 2e-3


def test_scores_whose_exponentials_are_no_numbers_are_computed():
    """Of one sequence all far below zero, of another far above, beside one like any."""
    segments, query, key, value, _ = make_inputs(lengths=(6, 6, 6))
    factors = torch.tensor([-200.0, 200.0, 1.0]).repeat_interleave(6)[:, None, None]
    with torch.no_grad():
        key.copy_(query * factors)  # a query's own score is the largest, or the smallest
    found, expected = [], []
    for compute, into in ((blocked_attention, found), (one_at_a_time, expected)):
        output = compute(query, key, value, segments, SCALING, 0.0, None)
        into += [output, *torch.autograd.grad(output.square().sum(), (query, key, value))]
    for ours, exact in zip(found, expected):
        assert (ours - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("round_up", [False, True])
def test_outputs_and_gradients_equal_one_sequence_at_a_time(kernel, bias, round_up):
    # bfloat16 has 8 significant bits: steps of 0.8 %
    for dtype, bound in ((torch.float32, 2e-6), (torch.float64, 1e-12), (torch.bfloat16, 1.5e-2)):
        assert error_of(kernel, dtype, bias=bias, round_up=round_up) < bound


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_the_comparison_tells_a_leak_a_wrong_scale_and_a_lost_bias_apart(kernel):
    assert error_of(whole_row) > 0.1
    assert error_of(lambda q, k, v, s, scaling, d, b: kernel(q, k, v, s, 1.1 * scaling, d, b)) > 1e-2
    assert error_of(lambda q, k, v, s, scaling, d, b: kernel(q, k, v, s, scaling, d, None), bias=True) > 1e-2


@pytest.mark.parametrize(
    ("bound", "size"),  # blocks of one and of 5 matrices; scores of 5 tokens kept for backward; 7 tokens fit, 12 do not
    [("BLOCK_BYTES", 100), ("BLOCK_BYTES", 500), ("KEPT_BYTES", 0), ("KEPT_BYTES", 300), ("MAX_HEAD_BYTES", 4 * 7 * 7)],
)
def test_results_depend_on_no_bound_of_memory(monkeypatch, bound, size):
    monkeypatch.setattr(blocked, bound, size)
    for lengths in (LENGTHS, (5, 5, 5, 5)):
        assert error_of(blocked_attention, lengths=lengths) < 2e-6


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("bias", [False, True])
def test_dropout_keeps_the_mean_and_adds_the_variance_of_dropped_weights(kernel, bias):
    segments, q, k, _, scores = make_inputs(lengths=(40, 40, 40), bias=bias)
    ones = torch.ones_like(q)
    q, k = q * 0, k * 0  # every weight is 1/40: with p = 0.5 a sum has variance 40 * (1/40)^2 = 1/40
    torch.manual_seed(0)
    output = kernel(q, k, ones, segments, SCALING, 0.5, None if scores is None else scores * 0)[..., 0]
    assert output.mean().item() == pytest.approx(1.0, abs=0.03)  # 360 sums: standard error 0.008
    assert output.var().item() == pytest.approx(1 / 40, rel=0.4)


@pytest.mark.parametrize("kernel", ["blocked", "padded", "varlen"])
@pytest.mark.parametrize("left", [False, True])
def test_a_padded_batch_gives_what_sdpa_gives_at_real_tokens(kernel, left):
    stock = tiny_esm()
    assert largest_error(use_kernel(tiny_esm(), kernel), stock, make_batch(left=left)) < 2e-5


def test_masks_with_holes_and_no_mask_at_all_are_read_as_sdpa_reads_them():
    batch = make_batch()
    batch["attention_mask"][0] = torch.tensor([1, 1, 0, 1, 1, 1, 0, 0, 1])
    for stock in (tiny_esm(), tiny_t5()):
        assert largest_error(use_kernel(copy.deepcopy(stock)), stock, batch) < 2e-5
        ids = batch["input_ids"]
        assert torch.allclose(use_kernel(copy.deepcopy(stock))(ids)[0], stock(ids)[0], atol=1e-5)


@pytest.mark.parametrize("make", [esm_encoder, tiny_t5])
def test_masks_per_query_and_masks_to_add_are_answered_as_by_sdpa(make):
    stock, model = make(), use_kernel(make())
    inputs = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    halves = torch.zeros(2, 1, 9, 9, dtype=torch.bool)
    halves[..., :4, :4] = halves[..., 4:, 4:] = True
    for mask in (halves, torch.where(halves, 0.0, torch.finfo(torch.float32).min)):
        expected = stock(inputs_embeds=inputs, attention_mask=mask).last_hidden_state
        assert torch.equal(model(inputs_embeds=inputs, attention_mask=mask).last_hidden_state, expected)
    assert not torch.allclose(expected, stock(inputs_embeds=inputs).last_hidden_state, atol=1e-3)


def test_decoders_and_cross_attention_are_answered_as_by_sdpa():
    settings = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    stock = T5ForConditionalGeneration(T5Config(vocab_size=33, dropout_rate=0.0, **settings)).eval()
    model = use_kernel(copy.deepcopy(stock))
    assert model.decoder.config._attn_implementation == PREFIX + "blocked"
    batch = {**make_batch(masked=False), "labels": torch.tensor([[5, 6, 7], [8, 9, 4]] * 2)}
    assert torch.allclose(model(**batch).logits, stock(**batch).logits, atol=1e-5)

    decoder = tiny_esm(EsmModel, is_decoder=True)
    twin = use_kernel(copy.deepcopy(decoder))
    for mask in (None, make_batch()["attention_mask"]):
        inputs = {"input_ids": make_batch()["input_ids"], "attention_mask": mask}
        assert torch.equal(twin(**inputs).last_hidden_state, decoder(**inputs).last_hidden_state)
    ids = make_batch((7, 7))["input_ids"]
    causal = esm_encoder()(ids, is_causal=True)[0]
    assert torch.equal(use_kernel(esm_encoder())(ids, is_causal=True)[0], causal)
    assert not torch.allclose(causal, esm_encoder()(ids)[0], atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["varlen", "padded"])
def test_on_a_gpu_outputs_and_gradients_equal_one_sequence_at_a_time(name):
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "varlen" and not has_bf16:
        pytest.skip("flash attention takes compute capability 8.0")
    segments, *rows, _ = make_inputs(lengths=(30, 64, 7), dtype=torch.bfloat16 if has_bf16 else torch.float16)
    results = []
    for kernel, device in ((KERNELS[name], "cuda"), (one_at_a_time, "cpu")):
        inputs = [x.detach().to(device).requires_grad_() for x in rows]
        output = kernel(*inputs, segments.to(device), SCALING, 0.0, None)
        results.append([output, *torch.autograd.grad(output.double().square().sum(), inputs)])
    for ours, expected in zip(*results, strict=True):
        assert ((ours.cpu().double() - expected).norm() / expected.double().norm()).item() < 2e-2


def large_esm(scale=60.0):
    """An encoder whose queries and keys are far larger than those of a trained one."""
    encoder = esm_encoder()
    with torch.no_grad():
        for layer in encoder.encoder.layer:
            for part in (layer.attention.self.query, layer.attention.self.key):
                part.weight.mul_(scale / part.weight.std())
    return encoder


@pytest.mark.parametrize("kernel", ["padded", "sdpa", "eager"])
def test_an_encoder_under_autocast_to_float16_stays_finite_but_with_eager_attention(kernel):
    encoder, batch = large_esm(), make_batch()
    if kernel == "padded":
        packed(encoder, kernel)
    else:
        encoder.set_attn_implementation(kernel)
    with torch.autocast("cpu", torch.float16):
        states = encoder(**batch).last_hidden_state[batch["attention_mask"].bool()]
    states.float().square().sum().backward()
    gradients = [p.grad for p in encoder.parameters() if p.grad is not None]
    finite = all(x.isfinite().all() for x in (states, *gradients))
    assert finite is (kernel != "eager")  # which stores them


def test_a_bias_with_the_lowest_number_where_padding_is_stays_finite():
    encoder, batch = packed(tiny_t5(), "padded"), make_batch()
    with torch.no_grad():  # scores that are already as low as float16 goes
        encoder.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.sub_(60_000)
    with torch.autocast("cpu", torch.float16):
        states = encoder(**batch).last_hidden_state
    assert states.isfinite().all()


@pytest.mark.parametrize("kernel", ["sdpa", "blocked"])
def test_an_encoder_counts_what_its_configuration_says(kernel):
    """Of two sequences of 12 tokens: 6 per weight, and 12 per pair and width, or 14 where scores are computed again."""
    length, rows = 12, 2
    encoder, batch = esm_encoder(attn_implementation="sdpa"), make_batch((length, length))
    if kernel != "sdpa":
        packed(encoder, kernel)
    with flop_counter() as counted:
        encoder(**batch).last_hidden_state.sum().backward()
    per_token, per_pair = flops_coefficients(encoder)
    again = 1 if kernel == "blocked" else 14 / 12
    expected = rows * length * (per_token + again * per_pair * length)
    unused = sum(2 * p.numel() * 3 * rows * length for p in encoder.contact_head.parameters() if p.dim() == 2)
    assert counted.get_total_flops() == pytest.approx(expected - unused, rel=0.02)
