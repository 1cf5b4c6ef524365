"""Which attention a machine gets, that it is proven before it is used, and that the old one comes back."""

import json

import pytest
import torch
from flash_attn_reference import flash  # noqa: F401  a fixture
from miniature_esm import make_wide_esm
from tiny_masked_lm import largest_weight_difference, make_args, make_rows, make_trainer
from token_rows import pad_rows
from transformers import EsmForMaskedLM

from hf_ext.errors import PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.models import find_encoders
from hf_ext.models.kernels import attention as kernels
from hf_ext.plan import make_plan
from hf_ext.trainer import FastTrainer

pytestmark = pytest.mark.internals


def implementations(model) -> list[str]:
    return [encoder.config._attn_implementation for encoder in find_encoders(model)]


def count_sdpa(model) -> int:
    with torch.profiler.profile() as profile, torch.no_grad():
        model(**pad_rows(make_rows(4)))
    return {event.key: event.count for event in profile.key_averages()}.get("aten::scaled_dot_product_attention", 0)


@pytest.mark.usefixtures("blocked_in_float32")
def test_blocked_attention_replaces_every_call_of_sdpa_and_end_brings_them_back(tmp_path):
    trainer = make_trainer(tmp_path, speedups=["attention"])
    decision = trainer.plan["attention"]
    assert decision.status == "applied"
    assert decision.evidence["kernel"] == "blocked"
    assert 0 < decision.evidence["max_difference"] < 1e-4
    assert implementations(trainer.model) == ["hf_ext_blocked"]
    assert count_sdpa(trainer.model.cpu()) == 0
    trainer.end()
    assert implementations(trainer.model) == ["sdpa"]
    assert count_sdpa(trainer.model.cpu()) == 2


def test_a_model_that_was_trained_with_it_is_saved_without_its_name(tmp_path):
    ours = make_trainer(tmp_path / "ours", speedups=["attention"])
    ours.train()
    ours.save_model(str(tmp_path / "saved"))
    assert "hf_ext" not in (tmp_path / "saved" / "config.json").read_text()
    reloaded = EsmForMaskedLM.from_pretrained(tmp_path / "saved")
    assert implementations(reloaded) == ["sdpa"]
    assert largest_weight_difference(reloaded, ours.model.cpu()) == 0


def states_and_settings(model):
    """What a model computes, and all that is written in its modules but the objects that torch keeps there."""
    with torch.no_grad():
        logits = model.eval()(**pad_rows(make_rows(4))).logits
    model.train()
    own = [(name, type(module), "forward" in vars(module)) for name, module in model.named_modules()]
    settings = {name: value for name, value in model.config.to_dict().items() if name != "use_cache"}  # Trainer's
    return logits, (own, implementations(model), settings)


def flash_plan(model, rows, args):
    """A plan made for an A100: its kernel has no CPU version, so that it cannot run here."""
    return make_plan(args, model, rows, pad_rows, describe_hardware("A100"))


def test_a_flash_kernel_that_does_not_run_here_leaves_the_model_exactly_as_it_was_and_training_goes_on(tmp_path):
    model, rows = make_wide_esm(), make_rows()
    logits, settings = states_and_settings(model)
    others = ["cpu_matmul", "tf32", "fused_gelu", "masked_lm_head", "data_loading", "compile"]
    args = make_args(tmp_path, speedups=["all"], without=others, bf16=True)
    plan = flash_plan(model, rows, args)
    assert (plan["attention"].status, plan["attention"].settings["kernel"]) == ("applied", "varlen")
    assert plan["packing"].status == "applied"
    trainer = FastTrainer(model, args, pad_rows, rows, plan=plan)
    written = {line["name"]: line for line in json.loads((tmp_path / "plan.json").read_text())["decisions"]}
    assert [written[name]["status"] for name in ("attention", "packing")] == ["skipped", "skipped"]
    assert written["attention"]["reason"].startswith(
        "varlen against the old attention: it does not run here (NotImplementedError: "
    )
    assert written["packing"]["reason"].endswith("takes no packed sequences: add attention to --speedups")
    found, after = states_and_settings(model)
    assert torch.equal(found, logits)
    assert after == settings
    trainer.train()
    assert trainer.state.global_step == 4


@pytest.fixture
def broken_blocked(monkeypatch):
    """The `blocked` kernel with an output that is off by 1e-2."""
    right = kernels.KERNELS["blocked"]
    with monkeypatch.context() as patch:
        patch.setitem(kernels.KERNELS, "blocked", lambda *args: right(*args) + 1e-2)
        yield
    kernels.register_attention()


@pytest.mark.usefixtures("broken_blocked")
def test_a_kernel_that_is_off_by_a_hundredth_is_not_used(tmp_path):
    model = make_wide_esm()
    logits, settings = states_and_settings(model)
    trainer = make_trainer(tmp_path, model, speedups=["attention"])
    decision = trainer.plan["attention"]
    assert decision.status == "skipped"
    assert decision.reason.startswith("blocked against the old attention: states differ by ")
    assert decision.evidence["max_difference"] > 1e-3
    found, after = states_and_settings(model)
    assert torch.equal(found, logits)
    assert after == settings
    with pytest.raises(PlanRefused, match=r"--attention blocked against the old.*states differ by .*--attention auto"):
        make_trainer(tmp_path, model, attention="blocked")
    assert states_and_settings(model)[1] == settings


def with_gradients(kernel, change):
    """`kernel`, right going forward, with `change` made to the gradient of its queries."""

    def broken(query, *others):
        changed = query.clone()
        if changed.requires_grad:
            changed.register_hook(change)
        return kernel(changed, *others)

    return broken


@pytest.mark.usefixtures("bf16_cpu")
@pytest.mark.parametrize(
    ("change", "bf16"),
    [(lambda grad: -grad, False), (lambda grad: grad.index_fill(0, torch.tensor([3]), torch.nan), True)],
    ids=["wrong sign", "one token of nan"],
)
def test_a_kernel_that_is_right_forward_and_wrong_backward_is_not_used(tmp_path, monkeypatch, change, bf16):
    with monkeypatch.context() as patch:
        patch.setitem(kernels.KERNELS, "blocked", with_gradients(kernels.KERNELS["blocked"], change))
        trainer = make_trainer(tmp_path, speedups=["attention"], bf16=bf16)
    kernels.register_attention()
    decision = trainer.plan["attention"]
    assert decision.status == "skipped"
    assert "gradients" in decision.reason
    assert implementations(trainer.model) == ["sdpa"]


def test_faesm_trains_on_a_cpu_by_its_sdpa_kernel_to_the_weights_of_stock_training(tmp_path):
    stock = make_trainer(tmp_path / "stock")
    faesm = make_trainer(tmp_path / "faesm", attention="faesm", speedups=["fused_qkv"])
    assert faesm.plan["fused_qkv"].reason == "faesm computes them"
    decision = faesm.plan["attention"]
    assert decision.reason.startswith("faesm's SDPA kernel, as fast as sdpa: flash attention needs compute capability")
    assert (decision.evidence["kernel"], decision.evidence["max_difference"]) == ("faesm_sdpa", 0.0)
    for trainer in (stock, faesm):
        trainer.train()
    assert largest_weight_difference(faesm.model, stock.model) == 0
    faesm.end()
    assert {type(layer.attention.self).__name__ for layer in faesm.model.esm.encoder.layer} == {"EsmSelfAttention"}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_embeds_frozen_towers_on_a_cpu_packed_and_is_refused_where_they_train(tmp_path, make_affinity, demo_rows):
    model, collator = make_affinity("frozen", "frozen")
    args = make_args(tmp_path, attention="flex", speedups=["packing"])
    rows = demo_rows.map(lambda row, i: {"antigen": row["antigen"][: 40 + i % 60]}, with_indices=True)
    trainer = FastTrainer(model, args, collator, rows)
    assert [trainer.plan[name].status for name in ("attention", "packing")] == ["applied", "applied"]
    assert 0 < trainer.plan["attention"].evidence["max_difference"] < 1e-4
    trainer.end()
    with pytest.raises(PlanRefused, match=r"flex: cpu.* FlexAttention has no backward pass: use --attention auto"):
        make_trainer(tmp_path, attention="flex")


@pytest.mark.usefixtures("flash")
def test_the_package_flash_attn_is_proven_on_first_rows_before_it_is_used(tmp_path, monkeypatch):
    import flash_attn

    model, rows = make_wide_esm(), make_rows()
    args = make_args(tmp_path, attention="flash_attn", speedups=["packing"], bf16=True)
    trainer = FastTrainer(model, args, pad_rows, rows, plan=flash_plan(model, rows, args))
    assert [trainer.plan[name].status for name in ("attention", "packing")] == ["applied", "applied"]
    assert trainer.plan["attention"].evidence["noise_ratio"] < 2
    trainer.train()
    trainer.end()
    right = flash_attn.flash_attn_varlen_func
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", lambda *given: 1.1 * right(*given))
    with pytest.raises(PlanRefused, match=r"--attention fa2 against the old attention: states have .* noise"):
        FastTrainer(model, args, pad_rows, rows, plan=flash_plan(model, rows, args))
    assert implementations(model) == ["sdpa"]


@pytest.mark.usefixtures("flash")
def test_faesm_serves_the_esm_tower_and_leaves_the_other_alone(tmp_path, make_affinity, demo_rows):
    model, collator = make_affinity("frozen", "full")
    modules = [type(module) for module in model.encoders["1"].modules()]
    args = make_args(tmp_path, attention="faesm", bf16=True)
    plan = make_plan(args, model, demo_rows, collator, describe_hardware("H100"))
    assert plan["attention"].settings["kernel"] == "faesm"  # its flash kernel
    trainer = FastTrainer(model, args, collator, demo_rows, plan=plan)
    decision = trainer.plan["attention"]
    assert decision.status == "applied"
    assert decision.evidence["noise_ratio"] < 2
    assert [type(module) for module in model.encoders["1"].modules()] != modules
    trainer.end()
    assert [type(module) for module in model.encoders["1"].modules()] == modules
