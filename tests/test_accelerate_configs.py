"""The files of accelerate_configs: each line of the README's table, parsed by accelerate itself."""

import os
import re

import psutil
import pytest
import torch
import yaml
from accelerate.commands.launch import deepspeed_launcher
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from launcher_files import FOLDER, launcher_arguments, launcher_environment
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from hf_ext.optional import installed_version

TWO, FOUR = ("--num_processes", "2"), ("--num_processes", "4")
FP16 = ("--mixed_precision", "fp16")
OFFLOAD = ("--offload_optimizer_device", "cpu", "--offload_param_device", "cpu")
LAUNCHES = (
    ("1gpu_fp16",),
    ("1gpu_bf16",),
    ("ddp", *TWO),
    ("ddp", *FOUR),
    ("ddp", *TWO, *FP16),
    ("ddp", *FOUR, *FP16),
    ("fsdp2", *FOUR),
    ("fsdp2", *FOUR, "--fsdp_state_dict_type", "FULL_STATE_DICT"),
    ("fsdp2_offload", *FOUR, "--num_cpu_threads_per_process", "8"),
    ("hsdp",),
    ("2node", "--machine_rank", "R", "--main_process_ip", "HOST", "--main_process_port", "29500"),
    ("zero3", *FOUR),
    ("zero3", *FOUR, *OFFLOAD),
    ("zero3", *FOUR, "--zero_stage", "2"),
)
ON_CPUS = {("cpu",), ("cpu", "--multi_gpu", *TWO)}
WITH_DEEPSPEED = pytest.mark.skipif(not installed_version("deepspeed"), reason='pip install -e ".[deepspeed]"')


def enter(monkeypatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")):  # not those that start processes
            monkeypatch.setenv(name, value)


def filled_in(words: tuple[str, ...]) -> list[str]:
    return [{"R": "0", "HOST": "127.0.0.1"}.get(word, word) for word in words]


def read(name: str) -> dict:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="ascii"))


def test_the_table_has_these_launches_of_the_nine_files():
    table = re.findall(r"(?m)^\|[^|]*\| `(\w+)\.yaml ?([^`]*)` \|", (FOLDER / "README.md").read_text(encoding="ascii"))
    assert {(name, *flags.split()) for name, flags in table} == {*LAUNCHES} | ON_CPUS
    files = {path.stem for path in FOLDER.glob("*.yaml")}
    assert {name for name, *_ in table} == files
    assert len(files) == 9


# What the launcher of accelerate 1.15 never reads from a file: their flags have a default that is not None.
IGNORED = {"enable_cpu_affinity", "same_network", "rdzv_backend", "downcast_bf16"}
SECTIONS = ("fsdp_config", "deepspeed_config", "parallelism_config")


@pytest.mark.parametrize("words", [*LAUNCHES, *sorted(ON_CPUS)], ids=" ".join)
def test_the_launcher_reads_every_key_and_its_flags(words):
    name, *flags = filled_in(words)
    wanted = read(name)
    before, after = launcher_arguments(FOLDER / f"{name}.yaml", *flags)
    assert wanted.keys() & IGNORED == set()
    for key in wanted.keys() - {"compute_environment", "distributed_type", *SECTIONS}:  # two choose the launcher itself
        given = getattr(before, key, None)
        assert getattr(after, key) == (wanted[key] if given is None else given), key
    kind = "MULTI_GPU" if "--multi_gpu" in flags else wanted["distributed_type"]
    chosen = (kind == "MULTI_GPU", kind == "FSDP", kind == "DEEPSPEED", False)
    assert (after.multi_gpu, after.use_fsdp, after.use_deepspeed, after.tpu) == chosen
    assert after.use_parallelism_config == ("parallelism_config" in wanted)
    # Keys of sections that are no flags of the launcher accelerate takes in silence.
    assert [key for section in SECTIONS for key in wanted.get(section, {}) if not hasattr(before, key)] == []


def test_without_a_number_of_processes_the_launcher_stops():
    for name in ("ddp", "fsdp2", "fsdp2_offload", "zero3"):
        with pytest.raises(ValueError, match="manually pass in `--num_processes`"):
            launcher_arguments(FOLDER / f"{name}.yaml")


WRAPS = {True: "TRANSFORMER_BASED_WRAP", False: "NO_WRAP"}
# What each key of a section becomes in the object that accelerate builds from the launcher's environment.
FSDP_FIELDS = {
    "fsdp_version": lambda plugin: plugin.fsdp_version,
    "fsdp_reshard_after_forward": lambda plugin: plugin.reshard_after_forward,
    "fsdp_auto_wrap_policy": lambda plugin: WRAPS[plugin.auto_wrap_policy is transformer_auto_wrap_policy],
    "fsdp_state_dict_type": lambda plugin: plugin.state_dict_type.name,
    "fsdp_cpu_ram_efficient_loading": lambda plugin: plugin.cpu_ram_efficient_loading,
    "fsdp_offload_params": lambda plugin: isinstance(plugin.cpu_offload, CPUOffloadPolicy),
}


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_offload", "hsdp", "2node"])
def test_every_key_of_fsdp_arrives_in_the_plugin_which_gathers_in_bf16(name, monkeypatch):
    environment = launcher_environment(FOLDER / f"{name}.yaml", *FOUR)
    enter(monkeypatch, environment)
    plugin = FullyShardedDataParallelPlugin()
    wanted = read(name)["fsdp_config"]
    assert {key: FSDP_FIELDS[key](plugin) for key in wanted} == wanted
    plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16,) * 3
    if name == "hsdp":
        assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
        assert ParallelismConfig()._get_mesh() == (("dp_replicate", "dp_shard"), (2, 4))


@WITH_DEEPSPEED
@pytest.mark.parametrize(
    ("flags", "stage", "device"), [((), 3, "none"), (OFFLOAD, 3, "cpu"), (("--zero_stage", "2"), 2, "none")]
)
def test_stage_and_offload_arrive_in_deepspeed(flags, stage, device, monkeypatch):
    enter(monkeypatch, launcher_environment(FOLDER / "zero3.yaml", *FOUR, *flags))
    zero = DeepSpeedPlugin().deepspeed_config["zero_optimization"]
    assert zero["stage"] == stage
    assert (zero["offload_optimizer"]["device"], zero["offload_param"]["device"]) == (device, device)
    assert zero["stage3_gather_16bit_weights_on_model_save"]


@pytest.mark.skipif(installed_version("deepspeed") is not None, reason="DeepSpeed is installed")
def test_without_deepspeed_the_launcher_itself_stops_as_the_pages_say():
    _, args = launcher_arguments(FOLDER / "zero3.yaml", *TWO)
    with pytest.raises(ImportError, match="DeepSpeed is not installed"):
        deepspeed_launcher(args)


def test_two_machines_meet_where_the_command_line_says():
    meeting = ("--machine_rank", "1", "--main_process_ip", "10.0.0.1", "--main_process_port", "29511")
    for name, flags, per_machine in (("2node", (), "8"), ("hsdp", ("--num_machines", "2"), "4")):
        _, args = launcher_arguments(FOLDER / f"{name}.yaml", *flags, *meeting)
        prepare_multi_gpu_env(args)
        found = (args.nnodes, args.nproc_per_node, args.node_rank, args.rdzv_endpoint)
        assert found == ("2", per_machine, 1, "10.0.0.1:29511")


def test_devices_and_threads_of_the_processes(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16 if logical else 8)
    for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for words, gpus, on_cpu, threads in (
        (["cpu"], "-1,-1", "True", "8"),
        (["cpu", "--multi_gpu", *TWO], "-1,-1", None, "4"),  # the launcher drops use_cpu for several processes
        (["1gpu_fp16"], "0", "False", "1"),
        (["ddp", *TWO], None, None, "1"),
    ):
        environment = launcher_environment(FOLDER / f"{words[0]}.yaml", *words[1:])
        found = [environment.get(name) for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU", "OMP_NUM_THREADS")]
        assert found == [gpus, on_cpu, threads], words
