"""The plan of several GPUs: against the run on one, by hand, and against the files that it names."""

import dataclasses
import functools
import shlex
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from doctored import change, look

from hf_ext.doctor.arguments import DoctorArguments
from hf_ext.doctor.scale_page import format_scale
from hf_ext.doctor.scale_plan import FILES, plan_scale
from hf_ext.errors import ArgumentError
from hf_ext.masked_lm.arguments import MaskedLMArguments

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def facts_of(size: str | None = "esm2_650M", device: str = "a100", **arguments):
    """Of a new ESM-2; None is the one of 15 billion parameters."""
    shape = {"num_hidden_layers": 48, "hidden_size": 5120, "num_attention_heads": 40}
    model = MaskedLMArguments(model_size=size) if size else MaskedLMArguments(**shape)
    return look(device, model=model, **{"max_steps": 1000, **arguments})


def plan(facts, *gpus: int, **arguments):
    return plan_scale(facts, DoctorArguments(gpus=list(gpus), **arguments))


def by_strategy(scale) -> dict[str, object]:
    return {row.strategy: row for row in scale.rows}


def test_one_gpu_is_the_estimate_of_the_page():
    facts = facts_of()
    (row,) = plan(facts, 1).rows
    assert row.device_bytes == facts.step_bytes
    assert (row.sent_bytes, row.sending_s) == (0, 0.0)


def test_two_gpus_send_every_gradient_over_their_link():
    facts = facts_of()
    ddp = by_strategy(plan(facts, 2))["DDP"]
    trained = facts.work.num_trainable
    assert ddp.sent_bytes == 4 * trained  # 2 x 1/2 x 4 bytes
    assert ddp.device_bytes == facts.step_bytes + 4 * trained  # DDP's buckets
    assert ddp.sending_s == pytest.approx(4 * trained / 300e9)  # NVLink 3


def test_a_step_over_machines_takes_as_long_as_their_network():
    facts = facts_of()
    inside, across = (by_strategy(plan(facts, 16, gpus_per_machine=n))["DDP"] for n in (16, 8))
    assert across.sent_bytes == inside.sent_bytes == pytest.approx(2 * 15 / 16 * 4 * facts.work.num_trainable)
    assert across.sending_s == pytest.approx(inside.sending_s * 300 / 12.5)  # 100 Gbit/s Ethernet, one per machine


def test_more_gpus_take_fewer_passes_of_an_effective_batch_until_it_does_not_divide():
    kept = facts_of(effective_batch_size=64, per_device_train_batch_size=16)
    rows = {n: by_strategy(plan(kept, n))["FSDP2"] for n in (2, 4, 8)}
    assert rows[4].sent_bytes == pytest.approx(rows[2].sent_bytes * (3 / 4) / (2 / 4) / 2)  # one pass instead of two
    assert "--effective_batch_size 64 is not a multiple of 128" in rows[8].why_not
    assert rows[4].why_not == ""


def test_rows_per_gpu_shrink_where_the_plan_of_as_many_processes_lowers_them():
    facts = facts_of(effective_batch_size=64)  # 8 rows per GPU are the default
    assert plan(facts, 16).rows[0].why_not == ""
    assert "64 is not a multiple of 3 (3 processes)" in plan(facts, 3).rows[0].why_not


def test_a_cached_run_sends_its_head_alone():
    facts = look("a100", max_steps=100)
    ddp = by_strategy(plan(facts, 2))["DDP"]
    assert ddp.sent_bytes == 4 * facts.work.head_parameters


def test_what_fits_is_taken_simplest_first_and_offload_is_last():
    small = plan(facts_of("esm2_8M"), 1, 4)
    assert [row.strategy for row in small.taken.values()] == ["one process", "DDP"]
    split = plan(facts_of("esm2_3B", per_device_train_batch_size=1, activation_checkpointing=True), 1, 2, 4)
    assert split.taken[1] is None
    assert [split.taken[n].strategy for n in (2, 4)] == ["FSDP2", "FSDP2"]
    tight = facts_of(None, per_device_train_batch_size=1, activation_checkpointing=True)
    huge = plan(tight, 4)
    assert huge.taken[4].strategy == "FSDP2 + host"
    assert huge.taken[4].host_bytes == 16 * sum(encoder.num_parameters for encoder in tight.work.encoders)
    nothing = plan(dataclasses.replace(tight, step_bytes=tight.static_bytes + 10**12), 4)
    assert nothing.taken == {4: None}
    assert "nothing is known to fit" in format_scale(nothing)


@pytest.mark.nightly
def test_on_a_slow_network_ddp_stays_because_fsdp2_sends_no_less():
    # Per pass FSDP2 gathers weights of 2 bytes twice and sums gradients of 4; DDP sums those in two phases: 8 and 8.
    for network in ("infiniband-hdr", "ethernet-10g"):
        rows = plan(facts_of("esm2_650M"), 16, network=network)
        assert rows.taken[16].strategy == "DDP"
        ddp, fsdp2 = (by_strategy(rows)[name].sent_bytes for name in ("DDP", "FSDP2"))
        assert fsdp2 >= ddp
    alone = plan(facts_of("esm2_3B", per_device_train_batch_size=1, activation_checkpointing=True), 16)
    assert alone.taken[16].launch == "accelerate_configs/2node_8gpu_fsdp2.yaml"


def test_the_files_are_what_they_are_taken_for():
    kinds = {"NO": "one process", "MULTI_GPU": "DDP", "FSDP": "FSDP2"}
    for file in FILES:
        keys = yaml.safe_load((ROOT / "accelerate_configs" / f"{file.name}.yaml").read_text())
        zero, fsdp = keys.get("deepspeed_config", {}), keys.get("fsdp_config", {})
        assert kinds.get(keys["distributed_type"], f"ZeRO-{zero.get('zero_stage')}") == file.strategy
        assert (keys["num_processes"], keys["num_machines"]) == (file.num_processes, file.num_machines)
        assert keys["mixed_precision"] == file.precision
        assert bool(fsdp.get("fsdp_offload_params") or zero.get("offload_param_device")) == file.offload
    assert len({file.name for file in FILES}) == len(FILES) == 15


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", ["t4", "a100", "h100"])
def test_accelerate_understands_every_command(device):
    rows = plan(facts_of(None, device), 1, 2, 3, 4, 8, 16, gpus_per_machine=4).rows
    for row in rows:
        args = launch_command_parser().parse_args(["--config_file", *shlex.split(row.launch), "script.py"])
        assert (ROOT / args.config_file).is_file()
        file = next(file for file in FILES if file.name == Path(args.config_file).stem)
        assert (args.num_processes or file.num_processes) == row.num_gpus
        assert (args.num_machines or file.num_machines) == -(-row.num_gpus // 4)


def test_cards_without_bf16_take_the_fp16_files_and_no_splitting():
    scale = plan(facts_of("esm2_8M", "t4"), 1, 2, 8)
    assert {row.strategy for row in scale.rows} == {"one process", "DDP"}
    assert [row.launch for row in scale.rows] == [
        "accelerate_configs/1gpu_t4_fp16.yaml",
        "accelerate_configs/2gpu_baseline.yaml",
        "accelerate_configs/4gpu_baseline.yaml --num_processes 8",
    ]
    assert any("T4 has no bf16" in line for line in scale.basis)


def test_without_a_gpu_or_its_memory_it_says_so():
    assert plan(look("cpu"), 2).basis == ["none: cpu is no GPU that it knows: add --device a100"]
    assert plan(change(facts_of(), work=None), 2).basis == ["none: no model was read"]
    unknown = plan(facts_of("esm2_8M", "sm86"), 2)
    assert unknown.rows[0].fits is None
    assert unknown.taken == {2: None}
    refused = plan(facts_of("esm2_8M", effective_batch_size=64), 3)
    assert "refused: 3 GPUs DDP" in format_scale(refused)


def test_the_page_fits_a_terminal():
    page = format_scale(plan(facts_of("esm2_3B"), 1, 2, 4, 8, 16))
    assert max(map(len, page.splitlines())) <= 100
    assert "how long a step takes on several GPUs is not estimated" in page


@pytest.mark.parametrize("arguments", [{"gpus": []}, {"gpus": [0, 2]}, {"gpus_per_machine": 0}])
def test_numbers_of_gpus_below_one_are_refused(arguments):
    with pytest.raises(ArgumentError, match="1"):
        DoctorArguments(**arguments)
