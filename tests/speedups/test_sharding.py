"""What the plan says of several processes: FSDP2 and ZeRO applied, FSDP 1 refused, DDP as it is."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from miniature_esm import make_wide_esm
from tiny_masked_lm import make_args
from transformers.integrations import deepspeed as integration

from hf_ext.hardware import describe_hardware
from hf_ext.models.lora import LoraSettings, wrap_with_lora
from hf_ext.processes import need_gloo, whole_weights
from hf_ext.speedups import REGISTRY, Context, ModelFacts, Run, sharding

ESM = ModelFacts(("esm",), blocks="2 EsmLayer", num_parameters=100, num_trainable=100, num_block_matrices=6)
RECOMPUTES = {"ACTIVATION_CHECKPOINTING": "true"}
OFFLOADS = {"OFFLOAD_PARAMS": "true"}
MUON, HOST = {"optim_ext": "muon"}, {"optim_ext": "cpu_offload"}


@pytest.fixture
def fsdp2(monkeypatch):
    """The launcher's environment for FSDP2; what is given goes over it."""

    def launch(**given):
        fixed = {"VERSION": "2", "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "CPU_RAM_EFFICIENT_LOADING": "false"}
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        for name, value in {**fixed, **given}.items():
            monkeypatch.setenv(f"FSDP_{name}", value)

    return launch


def decide(name="sharding", args=None, world_size=2, **given):
    args = args or make_args(**{"optim": "adamw_torch_fused", **given})
    context = Context(describe_hardware("A100"), args, ESM, world_size=world_size)
    return next(one for one in REGISTRY if name == one.NAME).decide(context)


def zero_args(stage=2, offload=False, **given):
    args = make_args(**{"optim": "adamw_torch_fused", **given})
    optimizer = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    config = {"zero_optimization": {"stage": stage, **optimizer}}
    args.deepspeed_plugin = SimpleNamespace(
        hf_ds_config=HfDeepSpeedConfig(config), deepspeed_config=config, zero_stage=stage
    )
    return args


def apply(decision, model=None):
    args = SimpleNamespace(deepspeed_plugin=None, block_pattern=None)
    return sharding.apply(decision, Run(args, model or make_wide_esm()))


def trainable_esm():
    model = make_wide_esm()
    model.requires_grad_(True)
    return model


def trains_contacts(model):
    return any(p.requires_grad for name, p in model.named_parameters() if "contact_head" in name)


@pytest.mark.parametrize(
    ("name", "launched", "given", "status", "words"),
    [
        ("sharding", {}, {}, "applied", "FSDP2"),
        ("sharding", {"VERSION": "1"}, {}, "refused", "set fsdp_version: 2 (accelerate_configs/fsdp2.yaml)"),
        ("sharding", {"CPU_RAM_EFFICIENT_LOADING": "true"}, {}, "refused", "set fsdp_cpu_ram_efficient_loading: false"),
        ("sharding", {}, {"optim": "adafactor"}, "refused", "--optim adafactor cannot step"),
        ("sharding", {}, {"optim": "sgd", "activation_checkpointing": True}, "applied", ""),
        ("sharding", RECOMPUTES, {}, "applied", ""),
        ("sharding", RECOMPUTES, {"activation_checkpointing": True}, "refused", ""),
        ("activation_checkpointing", RECOMPUTES, {"activation_policy": "full"}, "refused", "leave one of them out"),
        ("compile", RECOMPUTES, {"speedups": ["compile"]}, "refused", "activation checkpointing"),
        ("compile", {}, {"speedups": ["compile"]}, "applied", ""),
        ("muon", {"VERSION": "1"}, MUON, "refused", ""),
        ("muon", {}, MUON, "applied", ""),
        ("quantized_base", {}, {"use_peft": True, "load_in_8bit": True}, "refused", "split frozen weights over"),
        ("cpu_offload", {}, HOST, "refused", "fsdp2_offload.yaml"),
        ("cpu_offload", {}, {}, "off", ""),
        (
            "cpu_offload",
            OFFLOADS,
            {},
            "applied",
            "FSDP2 keeps weights, gradients and the states of adamw",
        ),
        ("cpu_offload", OFFLOADS, {"optim": "lion_8bit"}, "refused", "use --optim adamw_torch_fused"),
    ],
)
def test_under_fsdp2(fsdp2, name, launched, given, status, words):
    fsdp2(**launched)
    decision = decide(name, **given)
    assert (decision.status, words in decision.reason) == (status, True), decision.reason


OFFLOADED = {"stage": 3, "offload": True}


@pytest.mark.parametrize(
    ("name", "given", "status", "words"),
    [
        ("sharding", {}, "applied", "DeepSpeed ZeRO-2"),
        ("sharding", OFFLOADED, "applied", "DeepSpeed ZeRO-3; DeepSpeed's CPU Adam makes AdamW's steps on the cpu"),
        ("sharding", {**OFFLOADED, "optim": "sgd"}, "refused", "not --optim sgd: use --optim adamw_torch_fused"),
        ("sharding", {"stage": 3, "optim": "sgd"}, "applied", ""),
        ("precision", {"speedups": ["all"]}, "skipped", "accelerate launch --mixed_precision bf16"),
        ("muon", MUON, "refused", "ZeRO hands the optimizer flat slices"),
        ("cpu_offload", {"stage": 3, **HOST}, "refused", "--offload_optimizer_device cpu"),
        ("quantized_base", {"use_peft": True, "load_in_8bit": True}, "refused", "FSDP and ZeRO split"),
    ],
)
def test_under_zero(name, given, status, words):
    decision = decide(name, zero_args(**given))
    assert (decision.status, words in decision.reason) == (status, True), decision.reason


# --- carried out -----------------------------------------------------------------------------------------------------


def test_ddp_that_fails_on_unused_weights_freezes_the_contact_head_and_says_so():
    for given in ({"ddp_find_unused_parameters": False}, {"activation_checkpointing": True}):
        model = trainable_esm()
        decision = apply(decide(**given), model)
        assert (decision.status, trains_contacts(model)) == ("applied", False)
        assert "2 weights of ESM's contact head are frozen: they never get a gradient" in decision.reason
        assert apply(decide(**given), model).status == "off"  # nothing is left to freeze


def test_under_zero_it_is_frozen_too_as_decay_would_move_it():
    args, model = zero_args(), trainable_esm()
    assert "contact head are frozen" in sharding.apply(decide(args=args), Run(args, model)).reason
    assert not trains_contacts(model)


def test_fsdp2_wraps_the_classes_of_the_model_or_those_that_the_user_names(fsdp2):
    fsdp2()
    model = trainable_esm()
    decision = apply(decide(), model)
    assert decision.reason.startswith("FSDP2; layer by layer (EsmLayer); 2 weights of ESM's contact head are frozen")
    assert not trains_contacts(model)
    fsdp2(TRANSFORMER_CLS_TO_WRAP="EsmAttention")
    assert apply(decide()).settings["classes"] == ["EsmAttention"]
    fsdp2(TRANSFORMER_CLS_TO_WRAP="EsmLayer,T5Block")
    refused = apply(decide())
    assert (refused.status, "T5Block: the model has no such module" in refused.reason) == ("refused", True)


def test_cached_encoders_that_stay_in_a_split_model_are_refused_and_those_that_leave_are_not(fsdp2, make_affinity):
    fsdp2()
    for save_full, status in ((True, "refused"), (False, "applied")):
        model, _ = make_affinity("frozen", "frozen", save_full=save_full)
        facts = ModelFacts(frozen_inputs=tuple(model.frozen_inputs), trains_encoders=False)
        args = make_args(speedups=["embedding_cache"])
        decision = apply(sharding.decide(Context(describe_hardware("A100"), args, facts, world_size=2)), model)
        assert (decision.status, "leave --save_full out" in decision.reason) == (status, save_full)


def test_recomputing_by_fsdp_is_refused_for_a_peft_model_whose_adapters_would_not_be_saved(fsdp2):
    fsdp2(**RECOMPUTES)
    refused = apply(decide(), wrap_with_lora(make_wide_esm(), LoraSettings(r=2)))
    assert (refused.status, "use --activation_checkpointing true" in refused.reason) == ("refused", True)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_gloo_is_named_for_deepspeed_where_there_is_no_accelerator(on_cpu, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: not on_cpu)
    assert need_gloo() is on_cpu


def test_encoders_are_read_whole_and_the_flag_is_put_back(monkeypatch):
    monkeypatch.setattr(integration, "_hf_deepspeed_config_weak_ref", None)
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    integration.set_hf_deepspeed_config(config)
    with whole_weights():
        assert not integration.is_deepspeed_zero3_enabled()
    assert integration.is_deepspeed_zero3_enabled()
