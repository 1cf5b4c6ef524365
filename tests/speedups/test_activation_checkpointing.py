"""Policies in a run: what the plan says, the weights of a run without, less kept, compiled blocks, resuming."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compiled_runs import compiled_trainer
from compiled_runs import evidence as graphs_of
from datasets import Dataset
from miniature_esm import make_esm, make_wide_esm
from tiny_affinity import ROWS
from tiny_affinity import make_model as make_affinity_model
from tiny_masked_lm import largest_weight_difference, make_args, make_rows, make_trainer
from token_rows import pad_rows
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from hf_ext.affinity.building import build_collator
from hf_ext.arguments.presets import PRESETS, preset_values
from hf_ext.data.arguments import DataArguments
from hf_ext.errors import ArgumentError, PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.models.activation_checkpointing import POLICIES, recomputed_layers
from hf_ext.plan import make_plan
from hf_ext.speedups import Context, ModelFacts, activation_checkpointing, ddp, sharding
from hf_ext.speedups.activation_checkpointing import choose_policy
from hf_ext.trainer import FastTrainer

PACKED = {"speedups": ["attention", "packing"]}
FROZEN = ModelFacts(("esm",), ("heavy",), trains_encoders=False)


@pytest.fixture
def compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def small_esm():
    return make_wide_esm(hidden_dropout_prob=0.1)


def evidence(trainer) -> dict:
    written = json.loads((Path(trainer.args.output_dir) / "plan.json").read_text())["decisions"]
    return next(decision["evidence"] for decision in written if decision["name"] == "activation_checkpointing")


# --- decisions -------------------------------------------------------------------------------------------------------


def decide(model=None, hardware="A100", world_size=1, **given):
    args = make_args(**given)
    facts = model or ModelFacts(("esm",), blocks="2 EsmLayer")
    return activation_checkpointing.decide(Context(describe_hardware(hardware), args, facts, world_size=world_size))


def test_off_unless_a_policy_is_named():
    assert decide().status == "off"
    assert decide(speedups=["all"]).status == "off"  # it costs time
    assert decide(activation_policy="none").status == "off"
    assert decide(activation_policy="full", without=["activation_checkpointing"]).status == "off"
    assert decide(activation_checkpointing=True).status == "off"  # Trainer's own, as it is


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "none"])
def test_a_named_policy_is_applied_on_every_machine(policy):
    for hardware in ("cpu", "T4", "A100"):
        decision = decide(hardware=hardware, activation_policy=policy)
        assert (decision.status, decision.reason, decision.settings) == ("applied", policy, {"policy": policy})


def test_a_policy_and_trainers_own_switch_contradict_each_other():
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        decision = decide(activation_policy="attention", **{name: True})
        assert (decision.status, "give one of them" in decision.reason) == ("refused", True)


def test_a_presets_policy_gives_way_to_trainers_own_switch():
    args = make_args(preset="low_memory", activation_checkpointing=True)
    assert args.activation_policy == "attention"
    decision = activation_checkpointing.decide(Context(describe_hardware("cpu"), args, ModelFacts(("esm",))))
    assert decision.status == "off"
    assert decision.reason.startswith("--activation_checkpointing true is Trainer's own")


def test_low_memory_keeps_attention_and_nothing_else():
    assert preset_values("low_memory")["activation_policy"] == "attention"
    assert [name for name, values in PRESETS.items() if "activation_policy" in values] == ["low_memory"]
    assert not any("activation_checkpointing" in values for values in PRESETS.values())


def test_nothing_to_compute_again_is_skipped_and_compiled_models_are_refused():
    frozen = decide(FROZEN, activation_policy="full", speedups=["embedding_cache"])
    assert (frozen.status, frozen.reason) == ("skipped", "no encoder trains: there is nothing to compute again")
    assert decide(activation_policy="full", torch_compile=True).status == "applied"
    decision = decide(activation_policy="attention", torch_compile=True)
    assert (decision.status, "use half or full, or --speedups compile" in decision.reason) == ("refused", True)


def test_fsdps_own_recomputing_is_not_doubled(monkeypatch):
    plugin = SimpleNamespace(activation_checkpointing=True)
    monkeypatch.setattr(activation_checkpointing, "read_fsdp2", lambda args: plugin)
    decision = decide(activation_policy="attention", world_size=2)
    assert (decision.status, "leave one of them out" in decision.reason) == ("refused", True)


def test_under_ddp_a_policy_counts_as_recomputing():
    args = make_args(activation_policy="attention", speedups=["ddp"])
    context = Context(describe_hardware("A100"), args, ModelFacts(classes=("EsmForMaskedLM",)), world_size=2)
    assert sharding.decide(context).reason == "DDP with activation checkpointing"
    assert "counts on every weight anyway" in ddp.decide(context).reason


@pytest.mark.parametrize("given", [{"activation_policy": "auto"}, {"activation_budget_gb": 1.0}])
def test_auto_and_a_budget_go_together(given):
    with pytest.raises(ArgumentError, match="auto needs a budget, and a budget needs auto"):
        make_args(**given)


def test_auto_takes_what_computes_least_again_of_what_fits():
    predicted = {"none": 100, "pointwise": 60, "half": 70, "attention": 30, "full": 25}
    chosen = {budget: choose_policy(predicted, budget) for budget in (100, 75, 59, 29, 24)}
    assert chosen == {100: "none", 75: "pointwise", 59: "attention", 29: "full", 24: None}
    del predicted["pointwise"]  # blocks are compiled
    assert choose_policy(predicted, 75) == "half"


def test_auto_does_not_take_pointwise_where_blocks_are_compiled():
    given = {"activation_policy": "auto", "activation_budget_gb": 1.0}
    assert decide(**given).settings == {"policy": "auto", "left_out": []}
    assert decide(**given, speedups=["all"]).settings == {"policy": "auto", "left_out": ["pointwise"]}


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("bf16_cpu")
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "none"])
def test_a_run_ends_in_the_weights_of_one_without(tmp_path, policy):
    half = {**PACKED, "bf16": True}
    settings = {"padded": {}, "packed": PACKED, "blocked": half}
    for name, given in settings.items():
        given = {**given, "attention": name} if given is half else given
        stock = make_trainer(tmp_path / name / "stock", small_esm(), **given)
        stock.train()  # at once: making a trainer sets the seed that its dropout is drawn with
        trainer = make_trainer(tmp_path / name / policy, small_esm(), activation_policy=policy, **given)
        assert len(recomputed_layers(trainer.model)) == (1 if policy == "half" else 2)
        trainer.train()
        assert largest_weight_difference(stock.model, trainer.model) == 0
        found = evidence(trainer)
        assert found["layers"] == (1 if policy == "half" else 2)
        assert 0 < found["layer_mb"] < found["layer_mb_without"]
        # `blocked`, in half precision, then computes its softmax again too.
        assert (found["recomputed_flops"] > 0) is (policy != "pointwise" or name == "blocked")
        trainer.end()
        assert recomputed_layers(trainer.model) == []


def test_another_dropout_would_be_seen(tmp_path):
    stock = make_trainer(tmp_path / "stock", small_esm())
    stock.train()
    broken = make_trainer(tmp_path / "broken", small_esm(), activation_checkpointing=True)
    broken.args.activation_checkpointing_kwargs = {"use_reentrant": False, "preserve_rng_state": False}
    broken.train()
    assert largest_weight_difference(stock.model, broken.model) > 1e-5


def test_measuring_leaves_no_gradient_and_draws_no_number(tmp_path):
    state = torch.get_rng_state()
    model = small_esm().eval()
    after = torch.get_rng_state()
    make_trainer(tmp_path, model, activation_policy="attention", seed=3)
    with_policy = torch.get_rng_state()
    make_trainer(tmp_path / "b", model, seed=3)
    assert torch.equal(with_policy, torch.get_rng_state())
    assert not torch.equal(state, after)
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(module.training for module in model.modules())


def test_off_means_untouched(tmp_path):
    trainer = make_trainer(tmp_path, **PACKED)
    assert recomputed_layers(trainer.model) == []
    assert trainer.plan["activation_checkpointing"].reason == "not asked for"
    stock = make_trainer(tmp_path / "stock", activation_checkpointing=True)
    assert recomputed_layers(stock.model) == []  # until training begins, as in Trainer
    stock.train()
    assert len(recomputed_layers(stock.model)) == 2


def test_a_bert_is_measured_on_its_own_rows_and_what_does_not_train_is_left_alone(tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    bert = BertForMaskedLM(BertConfig(vocab_size=33, pad_token_id=1, **shape))
    trainer = make_trainer(tmp_path / "bert", bert, activation_policy="attention")
    found = evidence(trainer)
    assert found["layers"] == 2
    assert found["tokens"] == sum(sorted(make_rows()["length"])[-4:])
    assert 0 < found["layer_mb"] < found["layer_mb_without"]
    auto = make_trainer(tmp_path / "auto", bert, activation_policy="auto", activation_budget_gb=1.0)
    assert auto.plan["activation_checkpointing"].reason.startswith("none, with")
    still = make_trainer(tmp_path / "still", make_esm().requires_grad_(False), activation_policy="full")
    assert still.plan["activation_checkpointing"].status == "skipped"


def test_auto_is_refused_where_no_row_tells_what_a_layer_keeps(tmp_path):
    args = make_args(tmp_path, activation_policy="auto", activation_budget_gb=1.0)
    with pytest.raises(PlanRefused, match="auto could measure 0 of 2 layers, for want of rows"):
        FastTrainer(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=9)), args)


def test_auto_goes_by_what_one_layer_keeps_of_the_largest_batch(tmp_path):
    def chosen(budget_gb, **given):
        folder = tmp_path / f"{budget_gb}{given}"
        given |= {"activation_policy": "auto", "activation_budget_gb": budget_gb}
        trainer = make_trainer(folder, make_wide_esm(num_hidden_layers=6), **given)
        decision = trainer.plan["activation_checkpointing"]
        return decision, decision.settings.get("policy")

    whole, _ = chosen(1.0)
    assert (whole.status, whole.reason[:10]) == ("off", "none, with")
    measured = evidence(make_trainer(tmp_path / "full", activation_policy="full"))
    assert measured["tokens"] == sum(sorted(make_rows()["length"])[-4:])  # the longest rows
    none = 6 * measured["layer_mb_without"] / 1e3
    assert chosen(0.98 * none)[1] == "pointwise"
    assert chosen(0.4 * none)[1] == "attention"
    assert chosen(0.98 * none, per_device_train_batch_size=2)[0].status == "off"  # half as much
    with pytest.raises(PlanRefused, match=r"encoder layers keep \S+ GB even with full.*per_device_train_batch_size"):
        chosen(1e-7)


def test_auto_counts_what_an_encoder_reads_of_every_input(demo_encoders, tmp_path):
    def kept(num_towers):
        model = make_affinity_model([demo_encoders[1]] * num_towers, "full")
        collator = build_collator(model, DataArguments())
        given = {"activation_policy": "auto", "activation_budget_gb": 1.0, "per_device_train_batch_size": 8}
        trainer = FastTrainer(model, make_args(tmp_path / str(num_towers), **given), collator, Dataset.from_list(ROWS))
        tokens = sum(
            int(mask.sum())
            for mask in (collator.encode_rows(name, ROWS)["attention_mask"] for name in model.embedding_sizes)
        )
        return float(re.search(r"none, with (\S+) GB", trainer.plan["activation_checkpointing"].reason)[1]) / tokens

    assert kept(1) == pytest.approx(kept(2), rel=0.01)  # per token: the second input's are counted too


# --- together with compiled blocks -----------------------------------------------------------------------------------


POLICY, TRAINERS = {"activation_policy": "attention"}, {"activation_checkpointing": True}
PADDED = {**PACKED, "attention": "padded"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (PACKED, POLICY),
        *(pytest.param(*both, marks=pytest.mark.nightly) for both in [({}, POLICY), (PADDED, POLICY)]),
        *(pytest.param(given, TRAINERS, marks=pytest.mark.nightly) for given in ({}, PACKED, PADDED)),
    ],
)
def test_compiled_and_recomputed_is_the_run_without_either(tmp_path, compiler, given, asked):
    blocks = {**given, "speedups": [*given.get("speedups", []), "compile"]}
    stock = make_trainer(tmp_path / "stock", **given)
    trainer = compiled_trainer(tmp_path / "run", "aot_eager", given=blocks, **asked)
    assert trainer.plan.applied("compile")
    assert graphs_of(trainer)["graphs"] >= 3
    first = trainer.model.esm.encoder.layer[0]
    assert first._compiled_call_impl is None  # the checkpoint stands around what is compiled
    assert first.attention._compiled_call_impl is not None
    for each in (stock, trainer):
        each.train()
    assert largest_weight_difference(stock.model, trainer.model) < 1e-6
    assert graphs_of(trainer)["recompilations"] == 0
    trainer.end()
    assert first.attention._compiled_call_impl is None


@pytest.mark.nightly
def test_under_half_every_second_block_is_compiled_whole(tmp_path, compiler):
    stock = make_trainer(tmp_path / "stock")
    given = {"given": {"speedups": ["compile"]}, "activation_policy": "half"}
    trainer = compiled_trainer(tmp_path / "run", "eager", **given)
    layers = trainer.model.esm.encoder.layer
    assert [layer._compiled_call_impl is None for layer in layers] == [True, False]
    for each in (stock, trainer):
        each.train()
    assert largest_weight_difference(stock.model, trainer.model) < 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["half", "attention", "full"])
@pytest.mark.parametrize("kernel", ["blocked", "padded"])
def test_inductor_compiles_what_is_recomputed(tmp_path, compiler, policy, kernel):
    given = {**PACKED, "attention": kernel}
    stock = make_trainer(tmp_path / "stock", **given)
    blocks = {**given, "speedups": [*PACKED["speedups"], "compile"]}
    trainer = compiled_trainer(tmp_path / "run", "inductor", given=blocks, activation_policy=policy)
    assert trainer.plan.applied("compile")
    for each in (stock, trainer):
        each.train()
    assert largest_weight_difference(stock.model, trainer.model) < 1e-5


# --- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("before", "after"), [("attention", "attention"), ("full", "pointwise"), (None, "half")])
def test_a_run_goes_on_exactly_and_with_another_policy_too(tmp_path, before, after):
    given = {"optim": "adamw_torch", "learning_rate": 1e-2, **PACKED}
    policies = [{"activation_policy": policy} if policy else {} for policy in (before, after)]
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(tmp_path / "whole", small_esm(), **saving, **given, **policies[0])
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", small_esm(), **given, **policies[1])
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert whole.state.global_step == resumed.state.global_step == 4
    assert largest_weight_difference(whole.model, resumed.model) == 0


def test_a_plan_is_made_without_a_model():
    plan = make_plan(make_args(activation_policy="attention"), None, make_rows(), pad_rows)
    assert plan.applied("activation_checkpointing")
