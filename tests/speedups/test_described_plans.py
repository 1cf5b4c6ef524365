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
    "sharding": ("off", "one process"),
    "ddp": ("off", "one process"),
    "fused_gelu": ("applied", "ESM's feed-forward layers"),
    "masked_lm_head": ("applied", "computed where there is a label"),
    "length_grouping": ("skipped", "packed batches have no padding: rows stay in random order"),
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
    "compile": ("applied", "2 EsmLayer, block by block on T4"),
}
A100 = {
    **EITHER,
    "cpu_matmul": ("skipped", "A100-40GB is not a CPU"),
    "cpu_threads": ("skipped", "A100-40GB is not a CPU"),
    "tf32": ("applied", "A100-40GB has TF32"),
    "precision": ("applied", "A100-40GB has native bf16"),
    "attention": ("applied", "flash attention of A100-40GB"),
    "compile": ("applied", "2 EsmLayer, block by block on A100-40GB"),
}


def plan_for(hardware: str):
    # The worker count is given, because it would follow the cores of the machine at hand.
    args = FastTrainingArguments(output_dir="o", speedups=["all"], dataloader_num_workers=7)
    return make_plan(args, make_wide_esm(), make_rows(), pad_rows, describe_hardware(hardware))


@pytest.mark.parametrize(
    ("card", "expected", "precision", "kernel"), [("T4", T4, "fp16", "padded"), ("A100", A100, "bf16", "varlen")]
)
def test_the_plan_of_fine_tuning_line_by_line(card, expected, precision, kernel):
    plan = plan_for(card)
    assert {decision.name: (decision.status, decision.reason) for decision in plan.decisions} == expected
    assert plan["precision"].settings == {"mixed_precision": precision}
    assert plan["attention"].settings == {"kernel": kernel, "asked": False}
    assert plan["packing"].settings == {"round_up": True, "named": False}
    plan.check()
