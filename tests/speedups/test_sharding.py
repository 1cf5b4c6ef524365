"""What the plan says of several processes: FSDP2 applied, FSDP 1 refused, DDP as it is but for unused weights."""

from types import SimpleNamespace

import pytest
from miniature_esm import make_wide_esm
from tiny_masked_lm import make_args

from hf_ext.hardware import describe_hardware
from hf_ext.models.lora import LoraSettings, wrap_with_lora
from hf_ext.speedups import Context, ModelFacts, Run, compile, sharding

A100 = describe_hardware("A100")


@pytest.fixture
def fsdp2(monkeypatch):
    """The launcher's environment for FSDP2; what is given goes over it."""

    def launch(**given):
        fixed = {"VERSION": "2", "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "CPU_RAM_EFFICIENT_LOADING": "false"}
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        for name, value in {**fixed, **given}.items():
            monkeypatch.setenv(f"FSDP_{name}", value)

    return launch


def decide(world_size=2, **given):
    return sharding.decide(Context(A100, make_args(**given), world_size=world_size))


def apply(decision, model=None):
    args = SimpleNamespace(deepspeed_plugin=None, block_pattern=None)
    return sharding.apply(decision, Run(args, model or make_wide_esm()))


def trains_contacts(model):
    return any(p.requires_grad for name, p in model.named_parameters() if "contact_head" in name)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ddp_find_unused_parameters": False}, "DDP with ddp_find_unused_parameters=False"),
        ({"activation_checkpointing": True}, "DDP with activation checkpointing"),
    ],
)
def test_ddp_that_fails_on_unused_weights_freezes_the_contact_head_and_says_so(given, says):
    model = make_wide_esm()
    model.requires_grad_(True)
    decision = apply(decide(**given), model)
    assert (decision.status, trains_contacts(model)) == ("applied", False)
    assert decision.reason == f"{says}; 2 weights of ESM's contact head are frozen: they never get a gradient"
    assert apply(decide(**given), model).status == "off"  # nothing is left to freeze


def test_fsdp2_is_applied_with_the_classes_of_the_model(fsdp2):
    fsdp2()
    model = make_wide_esm()
    model.requires_grad_(True)
    decision = apply(decide(), model)
    assert (decision.status, decision.settings["classes"]) == ("applied", ["EsmLayer"])
    assert decision.reason.startswith("FSDP2; layer by layer (EsmLayer); 2 weights of ESM's contact head are frozen")
    assert not trains_contacts(model)


def test_a_class_that_the_user_names_is_taken_or_refused_with_those_there_are(fsdp2):
    fsdp2(TRANSFORMER_CLS_TO_WRAP="EsmAttention")
    assert apply(decide()).settings["classes"] == ["EsmAttention"]
    fsdp2(TRANSFORMER_CLS_TO_WRAP="EsmLayer,T5Block")
    refused = apply(decide())
    assert (refused.status, "T5Block: the model has no such module" in refused.reason) == ("refused", True)


def test_fsdp_1_is_refused_with_the_way_to_fsdp2(fsdp2):
    fsdp2(VERSION="1")
    assert decide().status == "refused"
    assert "set fsdp_version: 2 (accelerate_configs/2gpu_fsdp2.yaml)" in decide().reason


def test_loading_in_one_process_is_refused_with_the_line_to_change(fsdp2):
    fsdp2(CPU_RAM_EFFICIENT_LOADING="true")
    refused = decide()
    assert (refused.status, "set fsdp_cpu_ram_efficient_loading: false" in refused.reason) == ("refused", True)


@pytest.mark.parametrize("optim", ["adafactor", "adamw_torch_8bit", "adamw_bnb_8bit", "adagrad"])
def test_an_optimizer_that_cannot_be_split_or_saved_in_pieces_is_refused_at_the_start(fsdp2, optim):
    fsdp2()
    refused = decide(optim=optim)
    assert (refused.status, f"--optim {optim} cannot step" in refused.reason) == ("refused", True)
    assert decide(optim="sgd").status == "applied"


def test_cached_encoders_that_stay_in_a_split_model_are_refused_and_those_that_leave_are_not(fsdp2, make_affinity):
    fsdp2()
    for save_full, status in ((True, "refused"), (False, "applied")):
        model, _ = make_affinity("frozen", "frozen", save_full=save_full)
        facts = ModelFacts(frozen_inputs=tuple(model.frozen_inputs), trains_encoders=False)
        args = make_args(speedups=["embedding_cache"])
        decision = apply(sharding.decide(Context(A100, args, facts, world_size=2)), model)
        assert (decision.status, "leave --save_full out" in decision.reason) == (status, save_full)
        live = apply(sharding.decide(Context(A100, make_args(), facts, world_size=2)), model)
        assert live.status == "applied"


def test_either_way_to_recompute_activations_is_taken_and_not_both(fsdp2):
    fsdp2(ACTIVATION_CHECKPOINTING="true")
    assert decide().status == "applied"
    assert decide(activation_checkpointing=True).status == "refused"
    fsdp2(ACTIVATION_CHECKPOINTING="false")
    assert decide(activation_checkpointing=True).status == "applied"


def test_recomputing_by_fsdp_is_refused_for_a_peft_model_whose_adapters_would_not_be_saved(fsdp2):
    fsdp2(ACTIVATION_CHECKPOINTING="true")
    assert apply(decide()).status == "applied"
    refused = apply(decide(), wrap_with_lora(make_wide_esm(), LoraSettings(r=2)))
    assert (refused.status, "use --activation_checkpointing true" in refused.reason) == ("refused", True)


def test_blocks_that_fsdp_recomputes_are_not_compiled(fsdp2):
    facts = ModelFacts(families=("esm",), blocks="2 EsmLayer")
    args = make_args(speedups=["compile"])
    fsdp2(ACTIVATION_CHECKPOINTING="false")
    assert compile.decide(Context(A100, args, facts, world_size=2)).status == "applied"
    fsdp2(ACTIVATION_CHECKPOINTING="true")
    decision = compile.decide(Context(A100, args, facts, world_size=2))
    assert (decision.status, "activation checkpointing" in decision.reason) == ("refused", True)
