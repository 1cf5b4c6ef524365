"""DeepSpeed's ZeRO in the plan: what it is called, what offloading would replace, which precision is left to it."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from miniature_esm import make_wide_esm
from tiny_masked_lm import make_args
from transformers.integrations import deepspeed as integration

from hf_ext.hardware import describe_hardware
from hf_ext.processes import need_gloo
from hf_ext.speedups import Context, ModelFacts, Precision, Run, sharding
from hf_ext.zero import whole_weights

A100 = describe_hardware("A100")
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def zero_args(stage=2, offload=False, top=None, **given):
    args = make_args(**given)
    config = {"zero_optimization": {"stage": stage, **(OFFLOAD if offload else {})}, **(top or {})}
    args.deepspeed_plugin = SimpleNamespace(hf_ds_config=HfDeepSpeedConfig(config), deepspeed_config=config)
    return args


def decide(module=sharding, **given):
    return module.decide(Context(A100, zero_args(**given), ModelFacts(("esm",), num_parameters=1), world_size=2))


def test_zero_is_named_with_its_stage_and_the_adam_that_steps():
    assert (decide().status, decide().reason) == ("applied", "DeepSpeed ZeRO-2")
    offloaded = decide(stage=3, offload=True, optim="adamw_torch_fused")
    assert offloaded.reason == "DeepSpeed ZeRO-3; DeepSpeed's CPU Adam makes AdamW's steps on the cpu"


@pytest.mark.parametrize("optim", ["sgd", "adafactor", "adagrad", "adamw_torch_8bit"])
def test_an_optimizer_that_offloading_would_replace_is_refused_with_the_alternatives(optim):
    decision = decide(stage=3, offload=True, optim=optim)
    assert decision.status == "refused"
    assert f"would step DeepSpeed's CPU Adam, not --optim {optim}: use --optim adamw_torch_fused" in decision.reason
    assert "offload_optimizer_device" in decision.reason
    assert decide(stage=3, optim=optim).status == "applied"
    kept = decide(stage=3, offload=True, optim=optim, top={"zero_force_ds_cpu_optimizer": False})
    assert kept.status == "applied"


def test_a_weight_that_gets_no_gradient_is_frozen_as_decay_would_move_it():
    args, model = zero_args(), make_wide_esm()
    decision = sharding.apply(decide(), Run(args, model))
    assert "contact head are frozen" in decision.reason
    assert not any(p.requires_grad for name, p in model.named_parameters() if "contact_head" in name)


def test_precision_that_nobody_asked_for_is_left_to_deepspeed():
    assert decide(Precision, speedups=["all"]).status == "skipped"
    assert "accelerate launch --mixed_precision bf16" in decide(Precision, speedups=["all"]).reason


@pytest.mark.parametrize(
    ("environment", "needed"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true", "LOCAL_RANK": "1"}, True),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "LOCAL_RANK": "1", "ACCELERATE_USE_CPU": "true"}, False),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, False),
        ({"LOCAL_RANK": "1"}, False),
    ],
)
def test_gloo_is_named_for_deepspeed_where_there_is_no_accelerator(environment, needed, monkeypatch):
    for name in ("ACCELERATE_USE_DEEPSPEED", "LOCAL_RANK", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert need_gloo() is needed
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert need_gloo() is False


def test_encoders_are_read_whole_and_the_flag_is_put_back(monkeypatch):
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    monkeypatch.setattr(integration, "_hf_deepspeed_config_weak_ref", None)
    integration.set_hf_deepspeed_config(config)
    assert integration.is_deepspeed_zero3_enabled()
    with whole_weights():
        assert not integration.is_deepspeed_zero3_enabled()
    assert integration.is_deepspeed_zero3_enabled()
