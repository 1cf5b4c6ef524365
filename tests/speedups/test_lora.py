"""The entry of LoRA in the plan: when it applies, what it wraps, and what it measures."""

import torch
from datasets import Dataset
from miniature_esm import make_esm
from peft import PeftModel
from transformers import EsmForSequenceClassification, default_data_collator

from hf_ext.hardware import describe_hardware
from hf_ext.models.lora import LoraSettings, wrap_with_lora
from hf_ext.plan import make_plan
from hf_ext.speedups import Run
from hf_ext.training_args import FastTrainingArguments

CPU = describe_hardware("cpu")


def make_args(**given) -> FastTrainingArguments:
    return FastTrainingArguments(output_dir="o", **{"use_cpu": True, "use_peft": True, "lora_r": 2, **given})


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
