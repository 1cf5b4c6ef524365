"""The whole plan of fine-tuning on a T4 and on an A100, line by line, made on a machine that is neither."""

import pytest
from miniature_esm import make_wide_esm
from tiny_masked_lm import make_rows
from token_rows import pad_rows

from hf_ext.hardware import describe_hardware
from hf_ext.plan import make_plan
from hf_ext.training_args import FastTrainingArguments

# What a plan says of both cards.
EITHER = {
    "lora": ("off", "not asked for"),
    "quantized_base": ("off", "not asked for"),
    "lora_base": ("skipped", "no LoRA"),
    "encoder_precision": ("skipped", "no frozen encoder"),
    "packing": ("applied", "no layer of esm encoders computes on padding"),
    "embedding_cache": ("skipped", "no frozen encoder"),
    "batch_size": ("off", "not asked for"),
    "find_batch_size": ("off", "not asked for"),
    "oom_ladder": ("off", "not asked for"),
    "token_budget": ("off", "not asked for"),
    "data_loading": ("applied", "7 workers (asked for), pinned memory on"),
    "muon": ("off", "not asked for"),
    "cpu_offload": ("off", "not asked for"),
    "activation_checkpointing": ("off", "not asked for"),
    "nccl": ("off", "not asked for"),
    "sharding": ("off", "one process"),
    "ddp": ("off", "one process"),
    "fused_gelu": ("applied", "ESM's feed-forward layers"),
}
T4 = {
    **EITHER,
    "cpu_matmul": ("skipped", "T4 is not a CPU"),
    "cpu_threads": ("skipped", "T4 is not a CPU"),
    "tf32": ("skipped", "T4 has no TF32"),
    "precision": ("applied", "T4 has fp16 but no native bf16"),
    "attention": (
        "applied",
        "SDPA, with padding around attention only: flash attention needs compute capability 8.0, T4 has compute "
        "capability 7.5",
    ),
    "compile": ("applied", "block by block on T4"),
}
A100 = {
    **EITHER,
    "cpu_matmul": ("skipped", "A100-40GB is not a CPU"),
    "cpu_threads": ("skipped", "A100-40GB is not a CPU"),
    "tf32": ("applied", "A100-40GB has TF32"),
    "precision": ("applied", "A100-40GB has native bf16"),
    "attention": ("applied", "flash attention of A100-40GB"),
    "compile": ("applied", "block by block on A100-40GB"),
}
BLOCKS = {"masked lm": "2 EsmLayer", "full towers": "2 BertLayer and 2 EsmLayer"}
# And what of the two models.
MODELS = {
    "masked lm": {
        "masked_lm_head": ("applied", "computed where there is a label"),
        "length_grouping": ("skipped", "packed batches have no padding: rows stay in random order"),
    },
    "full towers": {
        "masked_lm_head": ("skipped", "the model is none of EsmForMaskedLM, EsmcForMaskedLM, BertForMaskedLM"),
        "length_grouping": ("skipped", "packed batches have no padding: rows stay in random order"),
        "packing": ("applied", "no layer of bert and esm encoders computes on padding"),
    },
}


@pytest.fixture(params=MODELS)
def plan_for(request, make_affinity, demo_rows):
    """Makes the plan of a described machine: of a masked language model, and of towers that train in full."""

    def make(hardware: str, **given):
        # The worker count is given, because it would follow the cores of the machine at hand.
        settings = {"output_dir": "o", "speedups": ["all"], "dataloader_num_workers": 7}
        args = FastTrainingArguments(**{**settings, **given})
        if request.param == "masked lm":
            return make_plan(args, make_wide_esm(), make_rows(), pad_rows, describe_hardware(hardware))
        model, collator = make_affinity("full", "full")
        rows = demo_rows.map(lambda row, i: {"antigen": row["antigen"][: 10 + i]}, with_indices=True)
        return make_plan(args, model, rows, collator, describe_hardware(hardware))

    def expected(card: dict) -> dict:
        blocks = card["compile"][0], f"{BLOCKS[request.param]}, {card['compile'][1]}"
        return {**card, **MODELS[request.param], "compile": blocks}

    make.lines, make.model = expected, request.param
    return make


def lines(plan) -> dict[str, tuple[str, str]]:
    return {decision.name: (decision.status, decision.reason) for decision in plan.decisions}


def settings(plan) -> dict:
    return {name: plan[name].settings for name in ("precision", "attention", "packing", "compile")}


def test_fine_tuning_on_a_t4_gets_fp16_and_padding_around_attention_only(plan_for):
    plan = plan_for("T4")
    assert lines(plan) == plan_for.lines(T4)
    assert settings(plan)["precision"] == {"mixed_precision": "fp16"}
    assert settings(plan)["attention"] == {"kernel": "padded", "asked": False}
    assert settings(plan)["packing"] == {"round_up": True, "named": False}
    assert settings(plan)["compile"] == {"dynamic": True}
    plan.check()


def test_fine_tuning_on_an_a100_gets_bf16_and_flash_attention(plan_for):
    plan = plan_for("A100")
    assert lines(plan) == plan_for.lines(A100)
    assert settings(plan)["precision"] == {"mixed_precision": "bf16"}
    assert settings(plan)["attention"] == {"kernel": "varlen", "asked": False}
    assert settings(plan)["packing"] == {"round_up": True, "named": False}
    assert settings(plan)["compile"] == {"dynamic": True}
    plan.check()
