"""The launcher files: parsed by accelerate itself, each key followed to the setting that it becomes."""

import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from launcher_files import FOLDER, launcher_arguments, launcher_environment
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

FILES = sorted(FOLDER.glob("*.yaml"))
SECTIONS = ("fsdp_config", "deepspeed_config", "parallelism_config")
ALL = pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])


SPLIT = [path for path in FILES if re.search("\n(fsdp|deepspeed)_config:", path.read_text(encoding="ascii"))]


def enter(monkeypatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="ascii"))


def test_there_are_nineteen_launcher_files_and_each_starts_the_processes_of_its_name():
    assert len(FILES) == 19
    for path in FILES:
        nodes, devices = re.match(r"(?:(\d+)node_)?(?:(\d+)[gc]pu|cpu)", path.stem).groups()
        assert load_config_from_file(str(path)).num_processes == int(nodes or 1) * int(devices or 1), path


# What the launcher ignores or cannot use, measured on accelerate 1.15: their flags have a default that is not None, so
# `_validate_launch_command` never looks at the file's value.
IGNORED = {"enable_cpu_affinity", "same_network", "rdzv_backend", "downcast_bf16"}


@ALL
def test_the_launcher_really_reads_every_key(path):
    wanted = read(path)
    before, after = launcher_arguments(path)
    assert wanted.keys() & IGNORED == set()
    for key in wanted.keys() - {"compute_environment", "distributed_type", *SECTIONS}:  # two choose the launcher itself
        assert getattr(before, key, None) is None, key
        assert getattr(after, key) == wanted[key], key
    kind = wanted["distributed_type"]
    chosen = (kind == "MULTI_GPU", kind == "FSDP", kind == "DEEPSPEED", False)
    assert (after.multi_gpu, after.use_fsdp, after.use_deepspeed, after.tpu) == chosen
    assert after.use_parallelism_config == ("parallelism_config" in wanted)
    # Keys of sections that are no flags of the launcher accelerate takes in silence.
    assert [key for section in SECTIONS for key in wanted.get(section, {}) if not hasattr(before, key)] == []


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
ZERO_FIELDS = {
    "zero_stage": lambda zero: zero["stage"],
    "offload_optimizer_device": lambda zero: zero["offload_optimizer"]["device"],
    "offload_param_device": lambda zero: zero["offload_param"]["device"],
    "zero3_save_16bit_model": lambda zero: zero["stage3_gather_16bit_weights_on_model_save"],
}


def arrived(path: Path, monkeypatch) -> dict:
    """The section of `path` as accelerate's plugin has it."""
    keys = read(path)
    enter(monkeypatch, launcher_environment(path))
    if "deepspeed_config" in keys:
        zero = DeepSpeedPlugin().deepspeed_config["zero_optimization"]
        return {key: ZERO_FIELDS[key](zero) for key in keys["deepspeed_config"]}
    plugin = FullyShardedDataParallelPlugin()
    return {key: FSDP_FIELDS[key](plugin) for key in keys["fsdp_config"]}


@pytest.mark.parametrize("path", SPLIT, ids=[path.stem for path in SPLIT])
def test_every_key_of_a_section_arrives_in_the_plugin(path, monkeypatch):
    wanted = read(path)
    assert arrived(path, monkeypatch) == wanted.get("fsdp_config", wanted.get("deepspeed_config"))


def test_fsdp2_gathers_and_sums_in_bf16(monkeypatch):
    path = FOLDER / "2gpu_fsdp2.yaml"
    environment = launcher_environment(path)
    enter(monkeypatch, environment)
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16,) * 3


def test_hsdp_is_two_groups_of_four_neighbours(monkeypatch):
    enter(monkeypatch, launcher_environment(FOLDER / "8gpu_hsdp.yaml"))
    assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    config = ParallelismConfig()
    assert config._get_mesh() == (("dp_replicate", "dp_shard"), (2, 4))
    assert config.total_size == 8


MACHINES = ("--machine_rank", "1", "--main_process_ip", "10.0.0.1", "--main_process_port", "29511")


@pytest.mark.parametrize(
    ("name", "flags", "per_machine"),
    [("2node_8gpu_fsdp2", MACHINES, "8"), ("8gpu_hsdp", ("--num_machines", "2", *MACHINES), "4")],
)
def test_two_machines_meet_where_the_command_line_says(name, flags, per_machine):
    _, args = launcher_arguments(FOLDER / f"{name}.yaml", *flags)
    prepare_multi_gpu_env(args)
    found = (args.nnodes, args.nproc_per_node, args.node_rank, args.rdzv_endpoint)
    assert found == ("2", per_machine, 1, "10.0.0.1:29511")
