"""LoRA in the plan: what it wraps, what it counts, and that a model without the flag is left alone."""

import pytest
import torch
from datasets import Dataset
from miniature_esm import make_esm
from peft import PeftModel
from transformers import EsmForSequenceClassification, default_data_collator

from hf_ext.errors import PlanRefused
from hf_ext.models.lora import LoraSettings, wrap_with_lora
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

ROWS = Dataset.from_dict({"input_ids": [[0, 5, 6, 7, 8 + i, 2] for i in range(8)], "labels": [0, 1] * 4})


@pytest.fixture
def trainer_of(tmp_path):
    def make(model=None, rows=ROWS, collator=default_data_collator, **given):
        args = FastTrainingArguments(str(tmp_path), **{"use_cpu": True, "use_peft": True, "lora_r": 2, **given})
        return FastTrainer(model or make_esm(EsmForSequenceClassification), args, collator, rows)

    return make


def test_a_plain_model_is_wrapped_and_the_plan_counts_what_trains(trainer_of):
    plain = make_esm(EsmForSequenceClassification)
    trainer = trainer_of(plain)
    decision = trainer.plan["lora"]
    assert isinstance(trainer.model, PeftModel)
    assert (decision.evidence["rank"], decision.evidence["adapted_layers"]) == (2, 6)
    # r=2 on a layer of 16 x 16: 2 * (16 + 16) = 64, four of them; on 16 x 32 and 32 x 16: 2 * 48 = 96 each: 448 in all.
    # The classifier: 16 * 16 + 16 + 16 * 2 + 2 = 306. AdamW keeps 8 bytes of each.
    assert decision.evidence["adamw_bytes"] == 6032
    assert f": 754 of {sum(p.numel() for p in trainer.model.parameters()):,} parameters train" in decision.reason


def test_adapters_follow_the_seed_of_the_arguments_and_not_what_ran_before(trainer_of):
    def weights(seed, before):
        torch.manual_seed(before)
        state = trainer_of(seed=seed).model.state_dict()
        return torch.cat([value.flatten() for name, value in state.items() if "lora_A" in name])

    assert torch.equal(weights(3, before=1), weights(3, before=2))
    assert not torch.equal(weights(3, before=1), weights(4, before=1))


def test_without_the_flag_the_model_is_the_same_object_with_the_same_modules(trainer_of):
    plain = make_esm(EsmForSequenceClassification)
    names = [name for name, _ in plain.named_modules()]
    assert trainer_of(plain, use_peft=False).model is plain
    assert [name for name, _ in plain.named_modules()] == names


def test_a_model_that_brings_its_adapters_is_not_wrapped_again(trainer_of, make_affinity, demo_rows):
    own = wrap_with_lora(make_esm(EsmForSequenceClassification), LoraSettings(r=3))
    trainer = trainer_of(own)
    assert trainer.model is own
    assert trainer.plan["lora"].evidence["rank"] == 3  # the model's, not that of the arguments
    model, collator = make_affinity("frozen", "lora")
    trainer = trainer_of(model, demo_rows, collator)
    assert trainer.model is model
    assert trainer.plan["lora"].evidence["adapted_layers"] == 12
    with pytest.raises(PlanRefused, match="no tower of this model has adapters: build it with --tower_training lora"):
        trainer_of(make_affinity("full", "full")[0], demo_rows, collator)
