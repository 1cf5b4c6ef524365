"""faesm's flash attention in transformers' ESM models: their numbers and weights, on a reference of flash-attn."""

import copy
import json
import sys

import pytest
import torch
from esm_batches import BATCHES, IDS, MASKED_IDS, PADDING_MASK, largest_difference, make_esm, twins
from flash_attn_reference import flash  # noqa: F401  a fixture
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import EsmForMaskedLM, EsmModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions, MaskedLMOutput
from transformers.models.esm import modeling_esm
from transformers.models.esm.modeling_esm import EsmSelfAttention

from hf_ext.errors import ArgumentError, MissingDependencyError
from hf_ext.hardware import describe_hardware
from hf_ext.models.faesm_bridge import faesm_problem, import_faesm, restore_faesm, swap_faesm
from hf_ext.optional import import_problem

LABELS = torch.where(MASKED_IDS == 32, IDS, -100)
MLM_BATCH = {"input_ids": MASKED_IDS, "attention_mask": PADDING_MASK, "labels": LABELS}
flashed = pytest.mark.usefixtures("flash")


def attention_modules(model):
    return [module for module in model.modules() if isinstance(module, EsmSelfAttention)]


@flashed
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_outputs_and_gradients_are_those_of_transformers_at_attended_tokens(batch):
    stock, faesm = twins(make_esm().train())
    assert swap_faesm(faesm) == 1
    assert largest_difference(faesm, stock, batch) < 1e-5


@flashed
def test_the_comparison_sees_rotation_by_rank_and_a_missing_one():
    from faesm.fa_utils import RotaryEmbedding

    stock, broken = twins(make_esm())
    swap_faesm(broken)
    for module in attention_modules(broken):
        module.__dict__["rotary_embeddings"] = RotaryEmbedding(dim=8).forward  # faesm's own
    assert largest_difference(broken, stock, BATCHES["padded"]) < 1e-5
    assert largest_difference(broken, stock, BATCHES["caller's mask"]) > 0.01
    for module in attention_modules(broken):
        module.__dict__["rotary_embeddings"] = lambda qkv, **ends: qkv
    assert largest_difference(broken, stock, BATCHES["padded"]) > 0.01


@flashed
def test_it_is_the_library_that_computes_and_on_real_tokens_only(monkeypatch):
    calls, seen = [], []
    library = import_faesm().FAEsmSelfAttention
    original = library.fa_forward
    monkeypatch.setattr(library, "fa_forward", lambda self, **inputs: calls.append(self) or original(self, **inputs))
    model = make_esm(EsmModel)
    swap_faesm(model)
    model.encoder.layer[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    output = model(**BATCHES["padded"])
    assert calls == attention_modules(model)
    assert seen == [(10, 32)]  # 6 + 4 of 2 x 6 tokens
    assert isinstance(output, BaseModelOutputWithPoolingAndCrossAttentions)
    assert output.last_hidden_state.shape == (2, 6, 32)
    assert output.last_hidden_state[1, 4:].abs().max() == 0


@pytest.mark.gpu
def test_the_real_flash_kernel_in_bf16_stays_within_3_percent_of_transformers_sdpa():
    pytest.importorskip("flash_attn")
    stock, faesm = twins(make_esm().cuda().bfloat16())
    swap_faesm(faesm)
    for batch in BATCHES.values():
        assert largest_difference(faesm, stock, {name: tensor.cuda() for name, tensor in batch.items()}) < 0.03


@flashed
def test_names_weights_and_configuration_stay_and_restoring_gives_transformers_attention_back():
    stock, model = twins(make_esm(hidden_dropout_prob=0.3))
    parameters, state, config = dict(model.named_parameters()), model.state_dict(), model.config.to_dict()
    before = {name: vars(module).keys() for name, module in model.named_modules()}
    assert (swap_faesm(model), swap_faesm(model)) == (1, 1)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.state_dict().keys() == state.keys()
    assert model.config.to_dict() == config
    twin = copy.deepcopy(model)
    with torch.no_grad():
        attention_modules(model)[0].value.weight.zero_()
    assert largest_difference(twin, stock, BATCHES["padded"]) < 1e-5  # a copy computes with its own weights
    assert restore_faesm(model) == restore_faesm(twin) == 1
    assert [type(module) for module in attention_modules(twin)] == [EsmSelfAttention] * 2
    assert {name: vars(module).keys() for name, module in twin.named_modules()} == before
    assert twin.config._attn_implementation == "sdpa"
    assert largest_difference(twin, stock, BATCHES["padded"]) == 0.0
    assert restore_faesm(twin) == 0


@flashed
def test_it_works_inside_peft():
    def adapted():
        torch.manual_seed(1)
        return get_peft_model(make_esm(), LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False))

    stock, faesm = adapted(), adapted()
    assert swap_faesm(faesm) == 1
    for model in (stock, faesm):
        output = model(**MLM_BATCH)
        assert isinstance(output, MaskedLMOutput)
        output.loss.backward()
    grads = [{n: p.grad for n, p in model.named_parameters() if p.requires_grad} for model in (stock, faesm)]
    assert len(grads[0]) == 8
    assert all((grad - grads[1][name]).abs().max() < 1e-4 * grad.abs().max() for name, grad in grads[0].items())


def save_as_faesm(folder, model):
    """As `FAEsmForMaskedLM.save_pretrained` under transformers 4: rotary frequencies per layer, faesm's own switch."""
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.decoder.weight"}
    inverse_frequencies = state.pop("esm.rotary_embeddings.inv_freq")
    for layer in range(2):
        name = f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"
        state[name] = inverse_frequencies.clone()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "architectures": ["FAEsmForMaskedLM"], "use_fa": True}
    (folder / "config.json").write_text(json.dumps(config))


@flashed
def test_a_folder_that_faesm_saved_loads_without_loss_and_ours_is_plain_esm(tmp_path):
    stock = make_esm()
    (tmp_path / "theirs").mkdir()
    save_as_faesm(tmp_path / "theirs", stock)
    model, info = EsmForMaskedLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not [name for name in info["missing_keys"] if "contact_head" not in name]
    swap_faesm(model.eval())
    assert largest_difference(model, stock, BATCHES["masked tokens"]) < 1e-5
    model.save_pretrained(tmp_path / "ours")
    plain, info = EsmForMaskedLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert plain.config.architectures == ["EsmForMaskedLM"]
    assert largest_difference(plain.eval(), stock, BATCHES["masked tokens"]) == 0.0


@flashed
def test_what_faesm_would_compute_otherwise_is_refused_and_nothing_changes():
    for settings, problem in (
        ({"position_embedding_type": "absolute"}, "positions are 'absolute'; only 'rotary'"),
        ({"attention_probs_dropout_prob": 0.1}, "attention_probs_dropout_prob=0.1"),
        ({"is_decoder": True}, "it is a decoder"),
        ({"attn_implementation": "flex_attention"}, "attn_implementation='flex_attention' gives masks"),
    ):
        both = torch.nn.ModuleList([make_esm(), make_esm(**settings)])
        with pytest.raises(ArgumentError, match=problem):
            swap_faesm(both)
        assert [type(module) for module in attention_modules(both)] == [EsmSelfAttention] * 4


@flashed
def test_what_it_cannot_give_is_refused():
    with pytest.raises(ArgumentError, match="Linear holds no ESM encoder"):
        swap_faesm(torch.nn.Linear(1, 1))
    model = make_esm()
    swap_faesm(model)
    with pytest.raises(ArgumentError, match="proteins would attend to each other"):
        model(input_ids=IDS[:1], cu_seq_lens_q=torch.tensor([0, 4, 6]))
    with pytest.raises(ArgumentError, match="output_attentions=True"):
        model(**BATCHES["padded"], output_attentions=True)
    with pytest.raises(ArgumentError, match="output_hidden_states"):
        model(**BATCHES["padded"], output_hidden_states=True)
    model.set_attn_implementation("sdpa")  # whose masks are others
    with pytest.raises(ArgumentError, match=r"needs masks of \(batch, tokens\)"):
        model(**BATCHES["padded"])


def test_without_a_card_or_flash_attn_the_reason_is_named():
    assert "T4 cannot run FlashAttention-2" in faesm_problem(describe_hardware("T4"))
    assert "No module named 'flash_attn'" in faesm_problem(describe_hardware("H200"))
    with pytest.raises(MissingDependencyError, match=r"faesm's flash kernel.*hf_ext\[flash\]"):
        swap_faesm(make_esm())


@flashed
def test_importing_faesm_leaves_nothing_behind_and_an_absent_one_says_how_to_get_it(monkeypatch):
    before = set(vars(modeling_esm))
    assert faesm_problem(describe_hardware("H200")) is None
    assert set(vars(modeling_esm)) == before
    monkeypatch.setitem(sys.modules, "faesm.esm", None)
    import_problem.cache_clear()
    assert "faesm.esm is needed for faesm attention" in faesm_problem(describe_hardware("H200"))
    model = make_esm()
    with pytest.raises(MissingDependencyError, match=r"faesm.esm is needed for faesm attention and is not installed"):
        swap_faesm(model)
    assert restore_faesm(model) == 0
