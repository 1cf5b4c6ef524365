"""Packed = padded = one at a time, for every head and way to train, and broken twins; packed encoders stay encoders."""

import copy
import inspect

import pytest
import torch
from accelerate.utils import send_to_device
from closeness import relative_error
from inside import LayoutMaker, label_only
from miniature_esm import MASK
from peft import LoraConfig, get_peft_model
from tiny_encoders import (
    esm_encoder,
    largest_error,
    make_batch,
    one_by_one,
    packed,
    real_outputs,
    states_and_gradients,
    tiny_bert,
    tiny_esm,
    tiny_esmc,
    tiny_t5,
    use_kernel,
    without_empty_rows,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    BertConfig,
    BertModel,
    EsmcForSequenceClassification,
    EsmcModel,
    EsmForMaskedLM,
    EsmForSequenceClassification,
    EsmForTokenClassification,
    EsmModel,
    EsmTokenizer,
    RoFormerConfig,
    RoFormerModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.t5.modeling_t5 import T5Stack

from hf_ext.data import MaskedLMCollator, ResidueTokenizer, VarlenLayout, change_layout
from hf_ext.errors import ArgumentError
from hf_ext.models import find_blocks, find_encoders, pack_encoders, unpack_encoders
from hf_ext.models.kernels.packing import keeps_sequences_apart

pytestmark = [pytest.mark.internals, pytest.mark.usefixtures("blocked_in_float32")]

BOUND = 2e-5
HEADS = {
    "masked language model": lambda: tiny_esm(EsmForMaskedLM),
    "sequence classification": lambda: tiny_esm(EsmForSequenceClassification, num_labels=3),
    "token classification": lambda: tiny_esm(EsmForTokenClassification, num_labels=3),
    "encoder": esm_encoder,
    "encoder with pooler": lambda: tiny_esm(EsmModel),
    "absolute positions, layer norm first": lambda: tiny_esm(
        position_embedding_type="absolute", emb_layer_norm_before=True, token_dropout=False
    ),
    "ESM C masked language model": tiny_esmc,
    "ESM C sequence classification": lambda: tiny_esmc(EsmcForSequenceClassification, num_labels=3),
    "ESM C encoder": lambda: tiny_esmc(EsmcModel),
    "BERT masked language model": tiny_bert,
    "BERT encoder with pooler": lambda: tiny_bert(BertModel),
    "T5 encoder": tiny_t5,
    "T5 encoder, not gated": lambda: tiny_t5(feed_forward_proj="relu"),
}
# Heads that pool read the first column, which is padding in a row that is padded left.
PER_TOKEN = ["masked language model", "token classification", "encoder", "T5 encoder"]
PER_TOKEN += ["ESM C masked language model", "BERT masked language model"]


@pytest.fixture(params=HEADS)
def make(request):
    return HEADS[request.param]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kernel", "round_up"), [("blocked", False), ("blocked", True), ("padded", True)])
def test_packed_equals_padded_equals_one_at_a_time(make, kernel, round_up):
    stock, batch = make(), make_batch()
    assert (batch["input_ids"] == MASK).sum() == 4
    model = packed(make(), kernel, round_up)
    assert largest_error(model, stock, batch) < BOUND
    assert largest_error(model, stock, batch, one_by_one) < BOUND


@pytest.mark.sampled(2)
def test_whole_rows_no_mask_at_all_and_masks_with_holes(make):
    whole, holes = make_batch((7, 7)), make_batch()
    holes["attention_mask"][0] = torch.tensor([1, 1, 0, 1, 1, 1, 0, 0, 1])  # positions follow columns
    assert largest_error(packed(make(), round_up=True), make(), whole) < BOUND
    assert largest_error(packed(make()), make(), holes) < BOUND
    ids = {"input_ids": whole["input_ids"]}
    assert torch.allclose(packed(make())(**ids)[0], make()(**ids)[0], atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("kernel", ["blocked", "padded"])
def test_left_padding_and_empty_rows(name, kernel):
    for batch in (make_batch(left=True), make_batch((5, 3, 0, 3)), make_batch((0, 4))):
        assert largest_error(packed(HEADS[name](), kernel), HEADS[name](), batch, without_empty_rows) < BOUND


def leaking(module, query, key, value, attention_mask, scaling=None, dropout=0.0, position_bias=None, **kwargs):
    """Attends over the whole packed row."""
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
    return output.transpose(1, 2), None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", HEADS)
def test_the_comparison_tells_attention_over_the_whole_row_apart(name):
    AttentionInterface.register("tests_leaking", leaking)
    model = packed(HEADS[name]())
    model.set_attn_implementation("tests_leaking")
    assert largest_error(model, HEADS[name](), make_batch()) > 100 * BOUND
    assert largest_error(model, HEADS[name](), make_batch(), one_by_one) > 100 * BOUND


def test_the_comparison_tells_shared_positions_a_wrong_bias_and_token_dropout_over_the_row_apart(monkeypatch):
    batch, model = make_batch(), packed(tiny_esm())
    embeddings, segments = model.esm.embeddings, VarlenLayout.from_mask(batch["attention_mask"])
    plain = type(embeddings).forward
    embeddings.forward = lambda input_ids, **_: segments.unpack(plain(embeddings, segments.pack(input_ids)))
    assert largest_error(model, tiny_esm(), batch) > 100 * BOUND
    model = packed(tiny_t5())
    first = model.encoder.block[0].layer[0].SelfAttention
    right = first.compute_bias
    monkeypatch.setattr(first, "compute_bias", lambda q, k, device=None: right(q, k, device).roll(1, -1))
    assert largest_error(model, tiny_t5(), batch) > 100 * BOUND
    # Rotation only knows distances: positions that run on over the row would do no harm, one position for all does.
    monkeypatch.setattr(VarlenLayout, "columns", property(lambda s: torch.zeros(1, len(s.indices), dtype=torch.long)))
    for make in (tiny_esm, tiny_esmc):
        assert largest_error(packed(make()), make(), batch) > 100 * BOUND


def with_lora(model, targets):
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False, lora_dropout=0.0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("token classification", ["query", "value"]),
        ("T5 encoder", ["q", "wo"]),
        ("ESM C masked language model", ["q_proj", "up_proj"]),
    ],
)
def test_under_lora_with_activation_checkpointing(name, targets):
    stock, late = (with_lora(HEADS[name](), targets) for _ in range(2))
    early = with_lora(packed(HEADS[name]()), targets)
    packed(late.get_base_model())
    for model in (early, late):
        assert largest_error(model, stock, make_batch()) < BOUND
        assert all("lora_" in name for name in states_and_gradients(model, make_batch())[1])
        for use_reentrant in (False, True):
            model.train().get_base_model().activation_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
            assert largest_error(model, stock, make_batch()) < BOUND


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_far_from_float32_as_padded_autocast_is(dtype):
    for make in (tiny_esm, tiny_t5, tiny_esmc, tiny_bert):
        exact = real_outputs(make(), make_batch())
        with torch.autocast("cpu", dtype):
            new, old = (real_outputs(model, make_batch()) for model in (packed(make()), make()))
        assert relative_error(new, exact) < 2 * relative_error(old, exact) < 0.2


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()


def compile_blocks(model, backend):
    for block in find_blocks(model):
        block.compile(backend=backend)
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "kernel"), [("masked language model", "blocked"), ("T5 encoder", "padded"), ("ESM C encoder", "padded")]
)
def test_compiled_blocks(fresh_compiler, name, kernel):
    model = compile_blocks(packed(HEADS[name](), kernel, round_up=True), "aot_eager")
    assert largest_error(model, HEADS[name](), make_batch()) < BOUND
    assert fresh_compiler["unique_graphs"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["masked language model", "T5 encoder", "ESM C masked language model"])
@pytest.mark.parametrize("kernel", ["blocked", "padded"])
def test_compiled_blocks_are_not_compiled_anew_for_other_lengths_or_numbers_of_sequences(fresh_compiler, name, kernel):
    model = compile_blocks(packed(HEADS[name](), kernel, round_up=True), "aot_eager")
    graphs = []
    for lengths in ((9, 4, 6), (8, 13), (17, 3, 3, 5), (12, 11, 10, 9, 8), (20, 2), (5, 5, 5, 6, 7, 30)):
        assert largest_error(model, HEADS[name](), make_batch(lengths)) < BOUND
        graphs.append(fresh_compiler["unique_graphs"])
    assert graphs[2:] == [graphs[2]] * 4


SMALL = {"esm": tiny_esm, "t5": tiny_t5, "esmc": tiny_esmc, "bert": tiny_bert}


@pytest.fixture(params=SMALL)
def model(request):
    return packed(SMALL[request.param]())


def equal_outputs(found, expected):
    """Whether two model outputs have the same fields with the same values: tensors, tuples of them, or None."""
    if found is None or expected is None:
        return found is expected
    if isinstance(found, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(found, tuple):
        return len(found) == len(expected) and all(map(equal_outputs, found, expected))
    return [*found] == [*expected] and all(equal_outputs(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("name", ["esm", "t5"])
def test_what_has_no_packed_form_is_answered_plainly(name):
    model, stock = (esm_encoder() if name == "esm" else tiny_t5().encoder for _ in range(2))
    packed(model), use_kernel(stock)
    batch = make_batch()
    calls = [{"output_hidden_states": True}, {"output_hidden_states": [0, -1]}, {"return_dict": False}]
    calls += [{"is_causal": True}, *[{"position_ids": torch.arange(9).expand(4, 9) * 2}] * (name == "esm")]
    for extra in calls:
        expected = stock(**batch, **extra)
        assert equal_outputs(model(**batch, **extra), expected)
        assert not equal_outputs(model(**batch).last_hidden_state, expected[0])  # the comparison sees zeros at padding
    for one in (model, stock):
        one.set_attn_implementation("eager")
    found, expected = (one(**batch, output_attentions=True) for one in (model, stock))
    assert [x.shape for x in found.attentions] == [(4, 4, 9, 9)] * 2
    assert equal_outputs(found, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["sdpa", "eager", "flex_attention"])
def test_attention_that_would_leak_is_an_error_with_a_way_out(model, name):
    expected = real_outputs(model, make_batch())
    model.set_attn_implementation(name)
    assert not keeps_sequences_apart(find_encoders(model)[0])
    says = f"{name}.*would let packed sequences attend to each other.*unpack_encoders"
    with pytest.raises(ArgumentError, match=says):
        model(**make_batch())
    assert keeps_sequences_apart(find_encoders(use_kernel(model))[0])
    assert relative_error(real_outputs(model, make_batch()), expected) == 0


def test_saving_and_loading_know_nothing_of_packing(model, tmp_path):
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "hf_ext" not in text
    assert "packed" not in text
    loaded = type(model).from_pretrained(tmp_path)
    assert "forward" not in find_encoders(loaded)[0].__dict__
    assert largest_error(packed(loaded), model, make_batch()) < 2e-5


@pytest.mark.parametrize("name", SMALL)
def test_unpacking_gives_the_own_forward_back(name):
    stock, model = SMALL[name](), packed(SMALL[name]())
    unpack_encoders(model)
    model.set_attn_implementation("sdpa")
    assert vars(find_encoders(model)[0]).keys() == vars(find_encoders(stock)[0]).keys()
    assert equal_outputs(model(**make_batch()), stock(**make_batch()))
    unpack_encoders(model)  # nothing left to undo


def test_a_copy_computes_with_its_own_weights_and_buffers(model):
    """Copies are reference models, averaged weights, merged adapters: none may compute with the original's weights."""
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


PROTEINS = [{"sequence": text} for text in ("MKTAYIAKQR", "GSHMLE", "MKLVV", "ACDEFGHIKLMNPQRSTVWY")]


@pytest.fixture
def collator(demo_encoders) -> MaskedLMCollator:
    return MaskedLMCollator(ResidueTokenizer(EsmTokenizer.from_pretrained(demo_encoders[1])), mlm_probability=0.3)


class CountCopies(TorchDispatchMode):
    """Counts tensors that are carried from the host to the device; a pageable copy waits for all that was asked."""

    copies = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        devices = [x.device.type for x in args if isinstance(x, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.is_meta and "cpu" in devices:
            self.copies += 1
        return result


def make_labelled(round_up=False):
    model = packed(tiny_esm(num_hidden_layers=2), "padded", round_up).train()
    assert label_only(model) == 1
    return model


def step(model, batch):
    """One training step as Trainer makes it, after the batch was moved; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    num_items = torch.tensor(7, device=batch["input_ids"].device)
    with CountCopies() as counted:
        loss = model(**batch, num_items_in_batch=num_items).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss, counted.copies


def test_a_step_on_a_batch_with_a_layout_waits_for_nothing(collator):
    change_layout(collator, packs=True, round_up=True, locates_labels=True)
    loss, copies = step(make_labelled(round_up=True).to("meta"), send_to_device(collator(PROTEINS), "meta"))
    assert loss.is_meta
    assert copies == 0
    for part in ("packs", "locates_labels"):  # each spares a read
        change_layout(collator, packs=True, round_up=True, locates_labels=True)
        change_layout(collator, **{part: False})
        with pytest.raises(NotImplementedError):  # the first read of what stands on the meta device
            step(make_labelled(round_up=True).to("meta"), send_to_device(collator(PROTEINS), "meta"))


@pytest.mark.parametrize(("round_up", "training"), [(False, True), (True, False)])
def test_a_layout_changes_no_bit(collator, round_up, training):
    plain = collator(PROTEINS)
    change_layout(collator, packs=True, round_up=round_up, locates_labels=True)
    with_layout = collator(PROTEINS)
    assert set(with_layout) == {*plain, "layout"}
    assert (plain["input_ids"] == MASK).any()
    found = []
    for batch in (plain, with_layout):
        model = make_labelled(round_up).train(training)
        model(**batch).loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) > 30
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_layout_of_other_rows_is_not_believed(collator):
    change_layout(collator, packs=True, locates_labels=True)
    batch, cut = collator(PROTEINS), collator(PROTEINS[:2])
    model = make_labelled()
    assert torch.equal(model(**{**cut, "layout": batch["layout"]}).loss, model(**cut).loss)
    filled = LayoutMaker(packs=True, round_up=True).add_to(cut)  # the encoder packs without filling
    assert torch.equal(model(**filled).loss, model(**cut).loss)
