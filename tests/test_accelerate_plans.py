"""The plan of every launcher file for GPUs, on the smallest hardware it names, made without any of it."""

import re
from dataclasses import replace

import pytest
from datasets import Dataset
from launcher_files import FOLDER, launcher_environment
from miniature_esm import make_esm

from hf_ext.hardware import describe_hardware
from hf_ext.optional import installed_version
from hf_ext.plan import Plan, make_plan
from hf_ext.speedups import REGISTRY
from hf_ext.training_args import FastTrainingArguments

OFF, DDP = "one process", "DDP: every process holds the whole model"
FSDP2, ZERO3 = "FSDP2", "DeepSpeed ZeRO-3; DeepSpeed's CPU Adam makes AdamW's steps on the cpu"
# file: (card, processes), (precision, attention, passes of 8 rows for 256 rows a step), how weights live
PLANS = {
    "1gpu_t4_fp16": (("T4", 1), ("fp16", "padded", 32), OFF),
    "1gpu_a100_bf16": (("A10", 1), ("bf16", "varlen", 32), OFF),
    "1gpu_h100_bf16": (("H100", 1), ("bf16", "varlen", 32), OFF),
    "2gpu_baseline": (("T4", 2), ("fp16", "padded", 16), DDP),
    "4gpu_baseline": (("T4", 4), ("fp16", "padded", 8), DDP),
    "2gpu_ddp": (("A10", 2), ("bf16", "varlen", 16), DDP),
    "4gpu_ddp": (("A10", 4), ("bf16", "varlen", 8), DDP),
    "8gpu_ddp": (("A10", 8), ("bf16", "varlen", 4), DDP),
    "2gpu_fsdp2": (("A100", 2), ("bf16", "varlen", 16), FSDP2),
    "4gpu_fsdp2": (("A10", 4), ("bf16", "varlen", 8), FSDP2),
    "8gpu_fsdp2": (("A10", 8), ("bf16", "varlen", 4), FSDP2),
    "4gpu_fsdp2_offload": (("A10", 4), ("bf16", "varlen", 8), FSDP2),
    "4gpu_fsdp2_lora": (("A10", 4), ("bf16", "varlen", 8), FSDP2),
    "8gpu_hsdp": (("A10", 8), ("bf16", "varlen", 4), FSDP2),
    "2node_8gpu_fsdp2": (("A100", 16), ("bf16", "varlen", 2), FSDP2),
    "4gpu_zero2": (("A100", 4), ("bf16", "varlen", 8), "DeepSpeed ZeRO-2"),
    "4gpu_zero3_offload": (("A10", 4), ("bf16", "varlen", 8), ZERO3),
}
# What all of these plans apply.
APPLIED = {
    "attention",
    "batch_size",
    "compile",
    "data_loading",
    "fused_gelu",
    "masked_lm_head",
    "packing",
    "precision",
}


def rows() -> Dataset:
    lengths = [8 + i % 40 for i in range(64)]
    return Dataset.from_dict({"input_ids": [[5] * length for length in lengths], "length": lengths})


@pytest.fixture
def plan_of(monkeypatch, tmp_path):
    """Makes the plan that the file's launch would have on a card: what the launcher says, and the processes."""
    built = make_esm(num_hidden_layers=2)  # before DeepSpeed's settings exist, which change how models are built

    def make(name: str, card: str, processes: int, **given) -> Plan:
        for variable, value in launcher_environment(FOLDER / f"{name}.yaml").items():
            if variable.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")):  # not those that start processes
                monkeypatch.setenv(variable, value)
        fixed = {"speedups": ["all"], "effective_batch_size": 256, "dataloader_num_workers": 7, "report_to": "none"}
        args = FastTrainingArguments(str(tmp_path), **{**fixed, **given})
        alone = make_plan(args, built, rows(), None, describe_hardware(card))
        context = replace(alone.context, world_size=processes)
        return replace(alone, decisions=[speedup.decide(context).of(speedup) for speedup in REGISTRY], context=context)

    return make


def test_every_file_for_gpus_has_a_plan():
    assert PLANS.keys() == {path.stem for path in FOLDER.glob("*gpu*.yaml")}
    assert len(PLANS) == 17


@pytest.mark.parametrize("name", PLANS)
def test_the_smallest_hardware_of_the_file_gets_this_plan(name, plan_of):
    if "zero" in name and not installed_version("deepspeed"):
        pytest.skip('pip install -e ".[deepspeed]"')
    (card, processes), (precision, attention, passes), sharding = PLANS[name]
    head = (FOLDER / f"{name}.yaml").read_text(encoding="ascii").partition("\n\n")[0]
    smallest = head.partition("Smallest hardware: ")[2].partition("Take it for")[0]
    assert re.search(rf"\b{card}\b", smallest)
    assert f"{describe_hardware(card).memory_gib:g} GB" in smallest
    plan = plan_of(name, card, processes)
    plan.check()
    applied = {decision.name for decision in plan.decisions if decision.status == "applied"}
    also = {
        "tf32": card != "T4",
        "sharding": sharding not in (OFF, DDP),
        "ddp": sharding == DDP,
        "cpu_offload": name == "4gpu_fsdp2_offload",
    }
    assert applied == APPLIED | {name for name, is_applied in also.items() if is_applied}
    assert plan["precision"].settings == {"mixed_precision": precision}
    assert plan["attention"].settings["kernel"] == attention
    assert plan["batch_size"].settings == {"gradient_accumulation_steps": passes}
    assert 8 * passes * processes == 256
    assert plan["sharding"].reason == sharding
