"""Packed encoders stay the encoders they were: calls without a packed form, names, saving, copies, undoing."""

import copy
import inspect

import pytest
import torch
from closeness import relative_error
from tiny_encoders import (
    esm_encoder,
    largest_error,
    make_batch,
    packed,
    real_outputs,
    tiny_bert,
    tiny_esm,
    tiny_esmc,
    tiny_t5,
    use_kernel,
)
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    EsmForMaskedLM,
    EsmModel,
    RoFormerConfig,
    RoFormerModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.t5.modeling_t5 import T5Stack

from hf_ext.errors import ArgumentError
from hf_ext.models.packing import find_encoders, keeps_sequences_apart, pack_encoders, unpack_encoders

pytestmark = pytest.mark.usefixtures("blocked_in_float32")

MAKE = {"esm": tiny_esm, "t5": tiny_t5, "esmc": tiny_esmc, "bert": tiny_bert}


@pytest.fixture(params=MAKE)
def make(request):
    return MAKE[request.param]


def equal_outputs(found, expected):
    """Whether two model outputs have the same fields with the same values: tensors, tuples of them, or None."""
    if found is None or expected is None:
        return found is expected
    if isinstance(found, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(found, tuple):
        return len(found) == len(expected) and all(map(equal_outputs, found, expected))
    return [*found] == [*expected] and all(equal_outputs(found[name], expected[name]) for name in found)


# --- calls without a packed form are answered by the plain forward, value for value ----------------------------------


PLAIN = {
    "hidden states": {"output_hidden_states": True},
    "some hidden states": {"output_hidden_states": [0, -1]},
    "a tuple": {"return_dict": False},
    "causal": {"is_causal": True},
}
POSITIONS = {"position_ids": torch.arange(9).expand(4, 9) * 2}


@pytest.mark.parametrize(
    ("name", "extra"),
    [("esm", POSITIONS), *((name, extra) for name in MAKE for extra in PLAIN.values())],
    ids=["esm-positions", *(f"{name}-{extra}" for name in MAKE for extra in PLAIN)],
)
def test_what_has_no_packed_form_is_answered_plainly(name, extra):
    model, stock = (esm_encoder() if name == "esm" else tiny_t5().encoder for _ in range(2))
    batch = make_batch()
    expected = use_kernel(stock)(**batch, **extra)
    assert equal_outputs(packed(model)(**batch, **extra), expected)
    assert not equal_outputs(model(**batch).last_hidden_state, expected[0])  # the comparison sees zeros at padding


def test_attentions_are_those_of_eager_attention():
    model, stock = packed(esm_encoder()), esm_encoder()
    for twin in (model, stock):
        twin.set_attn_implementation("eager")
    found, expected = (twin(**make_batch(), output_attentions=True) for twin in (model, stock))
    assert [x.shape for x in found.attentions] == [(4, 4, 9, 9)] * 2
    assert equal_outputs(found, expected)


def test_masks_with_holes_are_answered_plainly_by_t5():
    batch = make_batch()
    batch["attention_mask"][0, 3] = 0
    assert equal_outputs(packed(tiny_t5())(**batch), tiny_t5()(**batch))


# --- attention that would leak ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sdpa", "eager", "flex_attention"])
def test_attention_that_would_leak_is_an_error_with_a_way_out(make, name):
    model = packed(make())
    model.set_attn_implementation(name)
    encoder = find_encoders(model)[0]
    assert not keeps_sequences_apart(encoder)
    with pytest.raises(
        ArgumentError, match=f"{name}.*would let packed sequences attend to each other.*unpack_encoders"
    ):
        model(**make_batch())
    assert keeps_sequences_apart(find_encoders(use_kernel(model))[0])
    assert largest_error(model, make(), make_batch()) < 2e-5


# --- names, saving, copies, undoing -----------------------------------------------------------------------------------


def test_saving_and_loading_know_nothing_of_packing(make, tmp_path):
    model = packed(make())
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "hf_ext" not in text
    assert "packed" not in text
    loaded = type(model).from_pretrained(tmp_path)
    assert "forward" not in find_encoders(loaded)[0].__dict__
    assert largest_error(packed(loaded), make(), make_batch()) < 2e-5


def test_unpacking_gives_the_own_forward_back(make):
    stock, model = make(), packed(make())
    unpack_encoders(model)
    model.set_attn_implementation("sdpa")
    encoder = find_encoders(model)[0]
    assert vars(encoder).keys() == vars(find_encoders(stock)[0]).keys()
    assert equal_outputs(model(**make_batch()), stock(**make_batch()))
    unpack_encoders(model)  # nothing left to undo


def test_a_copy_computes_with_its_own_weights_and_buffers(make):
    """Copies are reference models, averaged weights, merged adapters: none may compute with the original's weights."""
    model = packed(make())
    twin = copy.deepcopy(model)
    assert find_encoders(twin)[0].forward.__self__ is find_encoders(twin)[0]
    expected = real_outputs(model, make_batch())
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    assert relative_error(real_outputs(twin, make_batch()), expected) == 0
    assert relative_error(real_outputs(model, make_batch()), expected) > 0.1
    states = twin(**make_batch())[0]
    assert (states[make_batch()["attention_mask"] == 0].std(0) < 1e-6).all()  # the copy is packed too
    unpack_encoders(twin)
    assert "forward" in find_encoders(model)[0].__dict__


def test_trainer_sees_the_arguments_that_the_encoder_had():
    for encoder, owner in ((packed(esm_encoder()), EsmModel), (packed(tiny_t5()).encoder, T5Stack)):
        names = [*inspect.signature(encoder.forward).parameters]
        assert names == [*inspect.signature(owner.forward).parameters][1:]
        assert {"input_ids", "attention_mask", "inputs_embeds"} < {*names}
    labels = inspect.signature(packed(tiny_esm()).forward).parameters
    assert {"input_ids", "attention_mask", "labels"} < labels.keys()


# --- which encoders ---------------------------------------------------------------------------------------------------


def test_encoders_inside_other_models_are_found_and_decoders_are_not():
    two = nn.ModuleList([tiny_esm(), tiny_t5()])
    assert [type(x) for x in find_encoders(two)] == [EsmModel, T5Stack]
    assert pack_encoders(two) == 2
    settings = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    whole = T5ForConditionalGeneration(T5Config(vocab_size=33, **settings))
    assert find_encoders(whole) == [whole.encoder]
    assert find_encoders(tiny_esm(EsmForMaskedLM, is_decoder=True)) == []
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    assert pack_encoders(BertModel(BertConfig(vocab_size=5, is_decoder=True, **sizes))) == 0
    assert pack_encoders(RoFormerModel(RoFormerConfig(vocab_size=5, **sizes))) == 0
