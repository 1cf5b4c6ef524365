"""The entry of LoRA in the plan: when it applies, what it wraps, and what it measures."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from miniature_esm import make_esm
from peft import PeftModel
from transformers import EsmForSequenceClassification, default_data_collator

from hf_ext.errors import ArgumentError, PlanRefused
from hf_ext.hardware import describe_hardware
from hf_ext.models.lora import LoraSettings, wrap_with_lora
from hf_ext.plan import make_plan
from hf_ext.speedups import Context, ModelFacts, Run, lora
from hf_ext.training_args import FastTrainingArguments

PLAIN = ModelFacts(("esm",), num_parameters=100, num_trainable=100)
CPU = describe_hardware("cpu")


def make_args(**given) -> FastTrainingArguments:
    return FastTrainingArguments(output_dir="o", **{"use_cpu": True, "use_peft": True, "lora_r": 2, **given})


def decide(model=PLAIN, **given):
    return lora.decide(Context(CPU, make_args(**given), model))


# --- decisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speedups", [[], ["all"]])
def test_it_is_off_unless_named_since_it_changes_what_is_learned(speedups):
    assert decide(use_peft=False, speedups=speedups).status == "off"


def test_naming_the_speedup_alone_says_which_flag_is_meant():
    found = decide(use_peft=False, speedups=["lora"])
    assert (found.status, found.reason) == ("skipped", "give --use_peft: it changes what is learned")


@pytest.mark.parametrize("family", ["esm", "bert", "t5", "mt5"])
def test_it_applies_to_the_families_whose_linear_layers_are_known(family):
    found = decide(replace(PLAIN, families=(family,)), lora_alpha=4, use_dora=True)
    assert found.status == "applied"
    expected = {"r": 2, "alpha": 4, "dropout": 0.0, "use_rslora": False, "use_dora": True, "target_modules": None}
    assert found.settings == expected


@pytest.mark.parametrize(
    ("model", "given", "reason"),
    [
        (PLAIN, {"without": ["lora"]}, "--use_peft and --without lora contradict each other"),
        (ModelFacts(), {}, "there is no model yet to adapt: pass the model itself instead of model_init"),
        (replace(PLAIN, frozen_inputs=("a",), trains_encoders=False), {}, "every tower is frozen"),
        (replace(PLAIN, families=()), {}, "not known of a model without a configuration: give --lora_target_modules"),
    ],
)
def test_what_cannot_be_adapted_is_refused_with_the_remedy(model, given, reason):
    found = decide(model, **given)
    assert found.status == "refused"
    assert reason in found.reason


def test_of_another_family_all_layers_that_repeat_are_adapted_unless_some_are_named():
    found = decide(replace(PLAIN, families=("gpt2",)))
    assert (found.status, found.reason) == ("applied", "adapters train beside all linear layers that repeat")
    assert decide(replace(PLAIN, families=("gpt2",)), lora_target_modules=["c_attn"]).status == "applied"


def test_options_out_of_range_are_refused():
    with pytest.raises(ArgumentError, match="lora_r=0: must be at least 1"):
        decide(lora_r=0)


# --- what is done to a model -----------------------------------------------------------------------------------------


def make_rows(num_rows=8) -> Dataset:
    return Dataset.from_dict(
        {
            "input_ids": [[0, 5, 6, 7, 8 + i, 2] for i in range(num_rows)],
            "labels": [i % 2 for i in range(num_rows)],
            "name": ["a column that the model does not take"] * num_rows,
        }
    )


def applied(model, rows=None, collator=default_data_collator, **given):
    args = make_args(**given)
    plan = make_plan(args, model, rows, collator, CPU)
    run = Run(args, model, collator, rows)
    plan.apply(run)
    return run, plan["lora"]


# r=2 on a layer of 16 x 16: 2 * (16 + 16) = 64, four of them; on 16 x 32 and 32 x 16: 2 * 48 = 96 each: 448 in all.
# The classifier: 16 * 16 + 16 + 16 * 2 + 2 = 306.
TRAINABLE = 448 + 306


def test_a_plain_model_is_wrapped_and_the_plan_counts_what_trains():
    plain = make_esm(EsmForSequenceClassification)
    num_plain = sum(p.numel() for name, p in plain.named_parameters() if "contact_head" not in name)
    run, decision = applied(plain, make_rows())
    assert isinstance(run.model, PeftModel)
    assert (decision.evidence["rank"], decision.evidence["adapted_layers"]) == (2, 6)
    with_lora, full = decision.evidence["with_lora"], decision.evidence["full_fine_tuning"]
    assert (with_lora["trainable_parameters"], with_lora["adamw_bytes"]) == (754, 754 * 8) == (TRAINABLE, 6032)
    assert (full["trainable_parameters"], full["adamw_bytes"]) == (num_plain, num_plain * 8)
    assert f"754 parameters train instead of {num_plain:,}" in decision.reason


def test_adapters_follow_the_seed_of_the_arguments_and_not_what_ran_before():
    def weights(seed, before):
        torch.manual_seed(before)
        state = applied(make_esm(EsmForSequenceClassification), make_rows(), seed=seed)[0].model.state_dict()
        return torch.cat([value.flatten() for name, value in state.items() if "lora_A" in name])

    assert torch.equal(weights(3, before=1), weights(3, before=2))
    assert not torch.equal(weights(3, before=1), weights(4, before=1))


def test_without_the_flag_the_model_is_the_same_object_with_the_same_modules():
    plain = make_esm(EsmForSequenceClassification)
    names = [name for name, _ in plain.named_modules()]
    run, decision = applied(plain, make_rows(), use_peft=False)
    assert decision.status == "off"
    assert run.model is plain
    assert [name for name, _ in plain.named_modules()] == names


def test_a_model_that_brings_its_adapters_is_not_wrapped_again(make_affinity, demo_rows):
    own = wrap_with_lora(make_esm(EsmForSequenceClassification), LoraSettings(r=3))
    run, decision = applied(own, make_rows())
    assert run.model is own
    assert decision.evidence["rank"] == 3  # the model's, not that of the arguments

    model, collator = make_affinity("frozen", "lora")
    run, decision = applied(model, demo_rows, collator)
    assert run.model is model
    assert decision.evidence["adapted_layers"] == 12
    encoder = sum(
        p.numel() for n, p in model.encoders["1"].named_parameters() if "lora_" not in n and "contact" not in n
    )
    head = sum(p.numel() for p in model.head.parameters())
    assert decision.evidence["full_fine_tuning"]["trainable_parameters"] == encoder + head


def test_towers_that_train_in_full_are_refused(make_affinity, demo_rows):
    model, collator = make_affinity("full", "full")
    with pytest.raises(PlanRefused, match="no tower of this model has adapters: build it with --tower_training lora"):
        applied(model, demo_rows, collator)
