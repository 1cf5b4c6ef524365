"""faesm's attention in transformers' ESM models: the same numbers, the same weights, and everything around it works."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from esm_batches import BATCHES, IDS, MASKED_IDS, PADDING_MASK, largest_difference, make_esm, twins
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import (
    EsmForMaskedLM,
    EsmModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions, MaskedLMOutput
from transformers.models.esm.modeling_esm import EsmSelfAttention

from hf_ext.errors import ArgumentError, MissingDependencyError
from hf_ext.hardware import describe_hardware
from hf_ext.models.faesm_bridge import faesm_kernel, faesm_problem, import_faesm, restore_faesm, swap_faesm
from hf_ext.optional import import_problem

LABELS = torch.where(MASKED_IDS == 32, IDS, -100)
MLM_BATCH = {"input_ids": MASKED_IDS, "attention_mask": PADDING_MASK, "labels": LABELS}


def attention_modules(model):
    return [module for module in model.modules() if isinstance(module, EsmSelfAttention)]


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_logits_and_gradients_equal_transformers_sdpa_exactly(batch, train):
    stock, faesm = twins(make_esm().train(train))
    assert swap_faesm(faesm) == 1
    assert largest_difference(faesm, stock, batch) == 0.0


def test_the_comparison_sees_a_missing_rotation():
    stock, broken = twins(make_esm())
    swap_faesm(broken)
    for module in attention_modules(broken):
        module.__dict__["rotary_embeddings"] = lambda query, key: (query, key)
    assert largest_difference(broken, stock, BATCHES["padded"]) > 0.01


@pytest.mark.parametrize("name", ["padded", "caller's mask"])
def test_the_comparison_sees_an_ignored_mask(name):
    stock, broken = twins(make_esm())
    swap_faesm(broken)
    for module in attention_modules(broken):
        forward = module.forward
        module.__dict__["forward"] = lambda x, attention_mask=None, forward=forward, **kwargs: forward(x, **kwargs)
    assert largest_difference(broken, stock, BATCHES[name]) > 0.01


def test_bf16_autocast_equals_transformers_and_stays_within_3_percent_of_float32():
    stock, faesm = twins(make_esm())
    swap_faesm(faesm)
    batch = BATCHES["masked tokens"]
    with torch.no_grad():
        exact = stock(**batch).logits
        with torch.autocast("cpu", torch.bfloat16):
            rounded, stock_rounded = faesm(**batch).logits, stock(**batch).logits
    assert (rounded - stock_rounded).abs().max() == 0
    assert 0 < (rounded - exact).abs().max() / exact.abs().max() < 0.03


def test_it_is_the_library_that_computes(monkeypatch):
    calls = []
    library = import_faesm().FAEsmSelfAttention
    original = library.sdpa_forward
    monkeypatch.setattr(library, "sdpa_forward", lambda self, **inputs: calls.append(self) or original(self, **inputs))
    stock, faesm = twins(make_esm())
    swap_faesm(faesm)
    stock(**BATCHES["padded"])
    assert calls == []
    faesm(**BATCHES["padded"])
    assert calls == attention_modules(faesm)
    assert len(calls) == 2


def test_parameters_names_and_configuration_stay_the_same_objects_and_values():
    model = make_esm(hidden_dropout_prob=0.3)
    parameters, state, config = dict(model.named_parameters()), model.state_dict(), model.config.to_dict()
    swap_faesm(model)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.state_dict().keys() == state.keys()
    assert [name for name in state if "rotary" in name] == ["esm.rotary_embeddings.inv_freq"]
    assert model.config.to_dict() == config
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.3}


def test_restoring_gives_transformers_attention_back():
    stock, model = twins(make_esm())
    before = {name: vars(module).keys() for name, module in model.named_modules()}
    swap_faesm(model)
    model(**BATCHES["padded"])
    assert restore_faesm(model) == 1
    assert [type(module) for module in attention_modules(model)] == [EsmSelfAttention] * 2
    assert {name: vars(module).keys() for name, module in model.named_modules()} == before
    assert largest_difference(model, stock, BATCHES["padded"]) == 0.0
    assert restore_faesm(model) == 0


def test_swapping_twice_is_swapping_once_and_a_copy_computes_with_its_own_weights():
    stock, model = twins(make_esm())
    assert (swap_faesm(model), swap_faesm(model)) == (1, 1)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        attention_modules(model)[0].value.weight.zero_()
    assert largest_difference(twin, stock, BATCHES["padded"]) == 0.0
    assert restore_faesm(twin) == restore_faesm(model) == 1


def test_masked_lm_returns_its_own_output_with_the_loss_of_the_labels():
    stock, faesm = twins(make_esm())
    swap_faesm(faesm)
    output = faesm(**MLM_BATCH)
    assert isinstance(output, MaskedLMOutput)
    assert output.loss.item() == stock(**MLM_BATCH).loss.item() > 0


def test_a_bare_encoder_returns_the_usual_output_with_pooler_and_hidden_states():
    stock, faesm = twins(make_esm(EsmModel))
    swap_faesm(faesm)
    with torch.no_grad():
        ours, theirs = (model(**BATCHES["padded"], output_hidden_states=True) for model in (faesm, stock))
    assert isinstance(ours, BaseModelOutputWithPoolingAndCrossAttentions)
    assert torch.equal(ours.pooler_output, theirs.pooler_output)
    assert [states.shape for states in ours.hidden_states] == [(2, 6, 32)] * 3
    assert all(torch.equal(a, b) for a, b in zip(ours.hidden_states, theirs.hidden_states))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(reentrant):
    stock, faesm = twins(make_esm().train())
    swap_faesm(faesm)
    faesm.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    runs = []
    attention_modules(faesm)[0].query.register_forward_hook(lambda *_: runs.append(1))
    assert largest_difference(faesm, stock, BATCHES["masked tokens"]) == 0.0
    assert len(runs) == 2  # forward, and again in the backward pass


def test_it_works_inside_peft():
    def adapted():
        torch.manual_seed(1)
        return get_peft_model(make_esm(), LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False))

    stock, faesm = adapted(), adapted()
    assert swap_faesm(faesm) == 1
    losses = [model(**MLM_BATCH).loss for model in (stock, faesm)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    grads = [{n: p.grad for n, p in model.named_parameters() if p.requires_grad} for model in (stock, faesm)]
    assert len(grads[0]) == 8
    assert all(torch.equal(grad, grads[1][name]) and grad.abs().max() > 0 for name, grad in grads[0].items())


def test_the_esm_tower_of_an_affinity_model_gives_equal_predictions_and_gradients(make_affinity):
    (stock, collator), (faesm, _) = make_affinity("frozen", "full"), make_affinity("frozen", "full")
    stock.attach_encoders()
    faesm.attach_encoders()
    assert swap_faesm(faesm) == 1  # the antibody tower is a BERT
    batch = collator(
        [{"heavy": "EVQLVE", "light": "DIQ", "antigen": sequence, "label": 7.0} for sequence in ("MKTAYIAKQR", "MKT")]
    )
    outputs = [model(**batch) for model in (stock, faesm)]
    for output in outputs:
        output.loss.backward()
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    grads = [[p.grad for p in model.encoders["1"].parameters() if p.grad is not None] for model in (stock, faesm)]
    assert len(grads[0]) > 30
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_a_model_trained_through_faesm_is_plain_esm_on_disk_and_comes_back(tmp_path):
    model = make_esm().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swap_faesm(model)
    before = model.lm_head.dense.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        model(**MLM_BATCH).loss.backward()
        optimizer.step()
    assert not torch.equal(model.lm_head.dense.weight, before)
    model.eval().save_pretrained(tmp_path)
    plain, info = EsmForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert plain.config.architectures == ["EsmForMaskedLM"]
    logits = model(**MLM_BATCH).logits
    assert torch.equal(plain(**MLM_BATCH).logits, logits)
    assert swap_faesm(plain) == 1
    assert torch.equal(plain(**MLM_BATCH).logits, logits)


def save_as_faesm(folder, model):
    """As `FAEsmForMaskedLM.save_pretrained` under transformers 4: rotary frequencies per layer, faesm's own switch."""
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.decoder.weight"}
    inverse_frequencies = state.pop("esm.rotary_embeddings.inv_freq")
    for layer in range(2):
        name = f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"
        state[name] = inverse_frequencies.clone()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "architectures": ["FAEsmForMaskedLM"], "use_fa": True}
    (folder / "config.json").write_text(json.dumps({**config, "hidden_dropout_prob": 0.1}))


def test_a_folder_that_faesm_saved_loads_without_loss(tmp_path):
    stock = make_esm()
    save_as_faesm(tmp_path, stock)
    model, info = EsmForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not [name for name in info["missing_keys"] if "contact_head" not in name]
    swap_faesm(model.eval())
    assert model.config.hidden_dropout_prob == 0.1
    assert largest_difference(model, stock, BATCHES["masked tokens"]) == 0.0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"position_embedding_type": "absolute"}, "positions are 'absolute'; only 'rotary'"),
        ({"attention_probs_dropout_prob": 0.1}, "attention_probs_dropout_prob=0.1"),
        ({"is_decoder": True}, "it is a decoder"),
        ({"attn_implementation": "flex_attention"}, "attn_implementation='flex_attention' gives masks"),
    ],
)
def test_what_faesm_would_compute_otherwise_is_refused_and_nothing_changes(settings, problem):
    both = torch.nn.ModuleList([make_esm(), make_esm(**settings)])
    with pytest.raises(ArgumentError, match=problem):
        swap_faesm(both)
    assert [type(module) for module in attention_modules(both)] == [EsmSelfAttention] * 4


def test_a_model_without_an_esm_encoder_and_an_unknown_kernel_are_refused():
    with pytest.raises(ArgumentError, match="Linear holds no ESM encoder"):
        swap_faesm(torch.nn.Linear(1, 1))
    with pytest.raises(ArgumentError, match="kernel='triton': allowed are flash, sdpa"):
        swap_faesm(make_esm(), kernel="triton")


def test_attention_weights_packed_batches_and_a_later_change_of_masks_are_refused():
    model = make_esm()
    swap_faesm(model)
    with pytest.raises(ArgumentError, match="proteins would attend to each other"):
        model(input_ids=IDS[:1], cu_seq_lens_q=torch.tensor([0, 4, 6]))
    with pytest.raises(ArgumentError, match="output_attentions=True"):
        model(**BATCHES["padded"], output_attentions=True)
    model.config._attn_implementation = "flash_attention_2"  # whose masks are (batch, tokens)
    with pytest.raises(ArgumentError, match=r"call model.set_attn_implementation\('sdpa'\) first"):
        model(**BATCHES["padded"])


def test_without_flash_attn_the_sdpa_kernel_is_chosen_and_the_reason_named():
    assert faesm_kernel(describe_hardware("T4"))[0] == "sdpa"
    assert "T4 cannot run FlashAttention-2" in faesm_kernel(describe_hardware("T4"))[1]
    assert "cpu cannot run" in faesm_kernel(describe_hardware("cpu"))[1]
    kernel, reason = faesm_kernel(describe_hardware("H200"))
    assert kernel == "sdpa"
    assert "No module named 'flash_attn'" in reason
    with pytest.raises(MissingDependencyError, match=r"faesm's flash kernel.*hf_ext\[flash\]"):
        swap_faesm(make_esm(), kernel="flash")


def test_an_absent_faesm_is_an_import_error_that_says_how_to_get_it(fresh_faesm, monkeypatch):
    monkeypatch.setitem(sys.modules, "faesm.esm", None)
    model = make_esm()
    assert faesm_problem() == "is not installed"
    with pytest.raises(MissingDependencyError, match=r"faesm.esm is needed for faesm attention and is not installed"):
        swap_faesm(model)
    assert restore_faesm(model) == 0


@pytest.mark.nightly
def test_importing_the_bridge_changes_nothing_and_importing_faesm_leaves_nothing_behind():
    code = """
import sys, torch
import hf_ext.models.faesm_bridge as bridge
from transformers.models.esm import modeling_esm
before = set(vars(modeling_esm))
print("faesm" in sys.modules, torch.cuda.is_initialized())
assert bridge.faesm_problem() is None
faesm = bridge.import_faesm()
print(faesm.__name__, set(vars(modeling_esm)) == before, "flash_attn" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout == "False False\nfaesm.esm True False\n", run.stderr


@pytest.fixture
def fresh_faesm():
    """Lets a test import faesm anew, and gives the others the module back that they know."""

    def take_out():
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "faesm"}

    before = take_out()
    import_problem.cache_clear()
    yield
    take_out()
    sys.modules.update(before)
    import_problem.cache_clear()


@pytest.fixture
def flash(fresh_faesm, monkeypatch):
    """faesm's flash code on a plain-torch reference of flash-attn."""
    import flash_attn_reference

    flash_attn_reference.install(monkeypatch)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_the_flash_path_gives_transformers_outputs_and_gradients_at_attended_tokens(flash, batch):
    stock, faesm = twins(make_esm().train())
    swap_faesm(faesm, kernel="flash")
    assert largest_difference(faesm, stock, batch) < 1e-5


def test_the_comparison_sees_rotation_by_rank_where_the_mask_has_holes(flash):
    from faesm.fa_utils import RotaryEmbedding

    stock, broken = twins(make_esm())
    swap_faesm(broken, kernel="flash")
    for module in attention_modules(broken):
        module.__dict__["rotary_embeddings"] = RotaryEmbedding(dim=8).forward  # faesm's own
    assert largest_difference(broken, stock, BATCHES["padded"]) < 1e-5
    assert largest_difference(broken, stock, BATCHES["caller's mask"]) > 0.01


def test_the_flash_path_computes_real_tokens_only_and_leaves_zeros_at_padding(flash):
    model = make_esm(EsmModel)
    swap_faesm(model, kernel="flash")
    seen = []
    model.encoder.layer[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    states = model(**BATCHES["padded"]).last_hidden_state
    assert seen == [(10, 32)]  # 6 + 4 of 2 x 6 tokens
    assert states.shape == (2, 6, 32)
    assert states[1, 4:].abs().max() == 0


def test_the_flash_path_under_bf16_autocast_stays_within_3_percent_of_float32(flash):
    stock, faesm = twins(make_esm())
    swap_faesm(faesm, kernel="flash")
    with torch.no_grad():
        exact = stock(**BATCHES["padded"]).logits[PADDING_MASK.bool()]
        with torch.autocast("cpu", torch.bfloat16):
            rounded = faesm(**BATCHES["padded"]).logits[PADDING_MASK.bool()]
    assert 0 < (rounded - exact).abs().max() / exact.abs().max() < 0.03


@pytest.mark.gpu
def test_the_real_flash_kernel_in_bf16_stays_within_3_percent_of_transformers_sdpa():
    pytest.importorskip("flash_attn")
    stock, faesm = twins(make_esm().cuda().bfloat16())
    swap_faesm(faesm, kernel="flash")
    for batch in BATCHES.values():
        assert largest_difference(faesm, stock, {name: tensor.cuda() for name, tensor in batch.items()}) < 0.03


def test_the_flash_path_keeps_state_config_and_checkpointing_and_is_undone(flash):
    stock, model = twins(make_esm().train())
    assert faesm_kernel(describe_hardware("H200")) == ("flash", "flash-attn on H200")
    assert faesm_kernel(describe_hardware("T4"))[0] == "sdpa"
    swap_faesm(model, kernel="flash")
    assert model.state_dict().keys() == stock.state_dict().keys()
    assert model.config.to_dict() == stock.config.to_dict()
    for reentrant in (False, True):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
        assert largest_difference(model, stock, BATCHES["padded"]) < 1e-5
    assert restore_faesm(model) == 1
    assert model.config._attn_implementation == "sdpa"
    assert type(model.esm.encoder) is type(stock.esm.encoder)
    assert largest_difference(model, stock, BATCHES["padded"]) == 0.0


def test_the_flash_path_refuses_what_it_cannot_do(flash):
    model = make_esm()
    swap_faesm(model, kernel="flash")
    with pytest.raises(ArgumentError, match=r"output_hidden_states.*kernel='sdpa'"):
        model(**BATCHES["padded"], output_hidden_states=True)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ArgumentError, match=r"needs masks of \(batch, tokens\)"):
        model(**BATCHES["padded"])


def test_a_flash_attn_that_does_not_work_here_is_left_aside(flash, monkeypatch):
    def no_device(device=None):
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.cuda, "get_device_capability", no_device)
    assert faesm_kernel(describe_hardware("H200"))[0] == "sdpa"
    stock, faesm = twins(make_esm())
    assert swap_faesm(faesm) == 1
    assert "flash_attn" in sys.modules
    assert largest_difference(faesm, stock, BATCHES["padded"]) == 0.0
