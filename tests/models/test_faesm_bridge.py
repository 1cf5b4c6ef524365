"""faesm in transformers' ESM models: its SDPA kernel as it is, its flash kernel on a reference of flash-attn."""

import copy

import pytest
import torch
from flash_attn_reference import flash  # noqa: F401  a fixture
from tiny_encoders import largest_error, make_batch, tiny_esm
from transformers.models.esm.modeling_esm import EsmSelfAttention

from hf_ext.errors import ArgumentError, MissingDependencyError
from hf_ext.models import restore_faesm, swap_faesm

HOLES = make_batch(masked=False)
HOLES["attention_mask"][0, 2] = HOLES["attention_mask"][1, 0] = 0  # inside of a protein, and its first token
BATCHES = {
    "padded": make_batch(masked=False),
    "masked tokens": make_batch(),
    "caller's mask": HOLES,
    "left padding": make_batch(left=True, masked=False),
    "caller's positions": {**make_batch(masked=False), "position_ids": 2 * torch.arange(9).expand(4, 9)},
}
BOUND = 2e-5
flashed = pytest.mark.usefixtures("flash")


def attention_modules(model):
    return [module for module in model.modules() if isinstance(module, EsmSelfAttention)]


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_the_librarys_sdpa_kernel_gives_the_very_outputs_and_gradients_of_transformers(batch):
    stock, faesm = (tiny_esm().train() for _ in range(2))
    assert swap_faesm(faesm, flash=False) == 1
    assert largest_error(faesm, stock, batch) == 0.0


def test_it_is_the_librarys_own_function_that_computes(monkeypatch):
    calls = []
    stock, faesm, broken = (tiny_esm(attn_implementation=name) for name in ("sdpa", "eager", "sdpa"))
    swap_faesm(faesm, flash=False)
    (library,) = [base for base in type(attention_modules(faesm)[0]).__mro__ if base.__module__ == "faesm.esm"]
    computed = library.sdpa_forward
    monkeypatch.setattr(library, "sdpa_forward", lambda self, **given: calls.append(self) or computed(self, **given))
    assert faesm.config._attn_implementation == "sdpa"  # whose masks it reads
    assert largest_error(faesm, stock, BATCHES["left padding"]) == 0.0
    assert calls == attention_modules(faesm)
    swap_faesm(broken, flash=False)
    for module in attention_modules(broken):
        module.__dict__["rotary_embeddings"] = lambda query, key: (query, key)
    assert largest_error(broken, stock, BATCHES["padded"]) > 0.01  # a missing rotation would be seen
    assert restore_faesm(faesm) == 1
    assert (type(attention_modules(faesm)[1]), faesm.config._attn_implementation) == (EsmSelfAttention, "eager")


@flashed
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_outputs_and_gradients_are_those_of_transformers_at_attended_tokens(batch):
    stock, faesm = (tiny_esm().train() for _ in range(2))
    assert swap_faesm(faesm) == 1
    assert largest_error(faesm, stock, batch) < BOUND


@flashed
def test_the_comparison_sees_rotation_by_rank_and_a_missing_one():
    from faesm.fa_utils import RotaryEmbedding

    stock, broken = (tiny_esm() for _ in range(2))
    swap_faesm(broken)
    for module in attention_modules(broken):
        module.__dict__["rotary_embeddings"] = RotaryEmbedding(dim=8).forward  # faesm's own
    assert largest_error(broken, stock, BATCHES["padded"]) < BOUND
    assert largest_error(broken, stock, BATCHES["caller's mask"]) > 0.01
    for module in attention_modules(broken):
        module.__dict__["rotary_embeddings"] = lambda qkv, **ends: qkv
    assert largest_error(broken, stock, BATCHES["padded"]) > 0.01


@pytest.mark.gpu
def test_the_real_flash_kernel_in_bf16_stays_within_3_percent_of_transformers_sdpa():
    pytest.importorskip(
        "flash_attn", reason='pip install -e ".[flash]", and a compiler of CUDA, or a wheel for this torch'
    )
    stock, faesm = (tiny_esm().cuda().bfloat16() for _ in range(2))
    swap_faesm(faesm)
    for batch in BATCHES.values():
        assert largest_error(faesm, stock, {name: tensor.cuda() for name, tensor in batch.items()}) < 0.03


@flashed
def test_names_weights_and_configuration_stay_and_restoring_gives_transformers_attention_back():
    stock, model = (tiny_esm(hidden_dropout_prob=0.3).eval() for _ in range(2))
    parameters, state, config = dict(model.named_parameters()), model.state_dict(), model.config.to_dict()
    before = {name: vars(module).keys() for name, module in model.named_modules()}
    assert (swap_faesm(model), swap_faesm(model)) == (1, 1)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.state_dict().keys() == state.keys()
    assert model.config.to_dict() == config
    twin = copy.deepcopy(model)
    with torch.no_grad():
        attention_modules(model)[0].value.weight.zero_()
    assert largest_error(twin, stock, BATCHES["padded"]) < BOUND  # a copy computes with its own weights
    assert restore_faesm(model) == restore_faesm(twin) == 1
    assert [type(module) for module in attention_modules(twin)] == [EsmSelfAttention] * 2
    assert {name: vars(module).keys() for name, module in twin.named_modules()} == before
    assert twin.config._attn_implementation == "sdpa"
    assert largest_error(twin, stock, BATCHES["padded"]) == 0.0
    assert restore_faesm(twin) == 0


@flashed
def test_what_faesm_would_compute_otherwise_is_refused_and_nothing_changes():
    for settings, problem in (
        ({"position_embedding_type": "absolute"}, "positions are 'absolute'; only 'rotary'"),
        ({"attention_probs_dropout_prob": 0.1}, "attention_probs_dropout_prob=0.1"),
        ({"is_decoder": True}, "it is a decoder"),
        ({"attn_implementation": "flex_attention"}, "attn_implementation='flex_attention' gives masks"),
    ):
        both = torch.nn.ModuleList([tiny_esm(), tiny_esm(**settings)])
        with pytest.raises(ArgumentError, match=problem):
            swap_faesm(both)
        assert [type(module) for module in attention_modules(both)] == [EsmSelfAttention] * 4


@flashed
def test_what_it_cannot_give_is_refused():
    with pytest.raises(ArgumentError, match="Linear holds no ESM encoder"):
        swap_faesm(torch.nn.Linear(1, 1))
    model = tiny_esm()
    swap_faesm(model)
    with pytest.raises(ArgumentError, match="proteins would attend to each other"):
        model(input_ids=BATCHES["padded"]["input_ids"][:1], cu_seq_lens_q=torch.tensor([0, 4, 9]))
    with pytest.raises(ArgumentError, match="output_attentions=True"):
        model(**BATCHES["padded"], output_attentions=True)
    with pytest.raises(ArgumentError, match="output_hidden_states"):
        model(**BATCHES["padded"], output_hidden_states=True)
    model.set_attn_implementation("sdpa")  # whose masks are others
    with pytest.raises(ArgumentError, match=r"needs masks of \(batch, tokens\)"):
        model(**BATCHES["padded"])


def test_without_flash_attn_the_flash_kernel_is_refused():
    with pytest.raises(MissingDependencyError, match=r"faesm's flash kernel.*hf_ext\[flash\]"):
        swap_faesm(tiny_esm())
