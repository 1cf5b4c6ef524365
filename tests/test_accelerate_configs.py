"""The launcher files: parsed by accelerate itself, each key commented and followed to the setting that it becomes."""

import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.launch import prepare_multi_gpu_env
from launcher_files import FOLDER, launcher_arguments, launcher_environment
from miniature_esm import esm_config
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import EsmForMaskedLM

FILES = sorted(FOLDER.glob("*.yaml"))
PROCESSES = {
    "1gpu_a100_bf16": 1,
    "1gpu_h100_bf16": 1,
    "1gpu_t4_fp16": 1,
    "2cpu_ddp": 2,
    "2gpu_baseline": 2,
    "2gpu_ddp": 2,
    "2gpu_fsdp2": 2,
    "2node_8gpu_fsdp2": 16,
    "4gpu_baseline": 4,
    "4gpu_ddp": 4,
    "4gpu_fsdp2": 4,
    "4gpu_fsdp2_lora": 4,
    "4gpu_fsdp2_offload": 4,
    "4gpu_zero2": 4,
    "4gpu_zero3_offload": 4,
    "8gpu_ddp": 8,
    "8gpu_fsdp2": 8,
    "8gpu_hsdp": 8,
    "cpu": 1,
}
SECTIONS = ("fsdp_config", "deepspeed_config", "parallelism_config")
ALL = pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])


def having(section):
    files = [path for path in FILES if f"\n{section}:" in path.read_text(encoding="ascii")]
    return pytest.mark.parametrize("path", files, ids=[path.stem for path in files])


def enter(monkeypatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="ascii"))


def test_there_are_nineteen_launcher_files_and_each_has_its_processes():
    assert {path.stem: load_config_from_file(str(path)).num_processes for path in FILES} == PROCESSES
    assert len(PROCESSES) == 19


@ALL
def test_accelerate_loads_the_file_and_knows_every_key(path):
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    assert config.num_machines == (2 if "2node" in path.stem else 1)


def test_accelerate_refuses_a_key_it_does_not_know(tmp_path):
    path = tmp_path / "typo.yaml"
    path.write_text('distributed_type: "NO"\nmixed_precison: fp16\n', encoding="ascii")
    with pytest.raises(ValueError, match="mixed_precison"):
        load_config_from_file(str(path))


def uncommented_keys(text: str) -> list[str]:
    lines = text.splitlines()
    keys = [(number, line) for number, line in enumerate(lines) if re.match(r"\s*\w+:", line)]
    return [line for number, line in keys if number == 0 or not lines[number - 1].lstrip().startswith("# ")]


@ALL
def test_every_key_has_a_comment_and_the_file_names_its_smallest_hardware(path):
    text = path.read_text(encoding="ascii")
    head, _, body = text.partition("\n\n")
    assert uncommented_keys(body) == []
    assert "Smallest hardware: " in head
    assert "Take it for: " in head
    assert f"--config_file accelerate_configs/{path.name}" in head
    num_keys = len(read(path)) + sum(len(read(path).get(section, {})) for section in SECTIONS)
    assert num_keys == len(re.findall(r"^\s*\w+:", body, flags=re.MULTILINE)) >= 7


def test_the_comment_check_finds_a_bare_key():
    text = "# why\nuse_cpu: true\nnum_machines: 1\n# why\nfsdp_config:\n  fsdp_version: 2\n"
    assert uncommented_keys(text) == ["num_machines: 1", "  fsdp_version: 2"]


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


def unknown_section_keys(path: Path) -> list[str]:
    """Keys of sections that are no flags of the launcher; accelerate takes them in silence."""
    before, _ = launcher_arguments(path)
    return [key for section in SECTIONS for key in read(path).get(section, {}) if not hasattr(before, key)]


@ALL
def test_every_key_of_a_section_is_a_flag_of_the_launcher(path):
    assert unknown_section_keys(path) == []


def test_the_section_check_finds_a_short_name_that_accelerate_drops(tmp_path):
    path = tmp_path / "short.yaml"
    text = (FOLDER / "8gpu_hsdp.yaml").read_text(encoding="ascii")
    path.write_text(text.replace("parallelism_config_dp_shard_size:", "dp_shard_size:"), encoding="ascii")
    assert unknown_section_keys(path) == ["dp_shard_size"]
    assert launcher_environment(path)["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "1"


# What each key of a section becomes in the object that accelerate builds from the launcher's environment.
FSDP_FIELDS = {
    "fsdp_version": lambda plugin: plugin.fsdp_version,
    "fsdp_reshard_after_forward": lambda plugin: plugin.reshard_after_forward,
    "fsdp_auto_wrap_policy": lambda plugin: (
        "TRANSFORMER_BASED_WRAP" if plugin.auto_wrap_policy is transformer_auto_wrap_policy else "NO_WRAP"
    ),
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


@having("fsdp_config")
def test_every_fsdp_key_arrives_in_the_plugin(path, monkeypatch):
    assert arrived(path, monkeypatch) == read(path)["fsdp_config"]


@having("deepspeed_config")
def test_every_deepspeed_key_arrives_in_the_plugin(path, monkeypatch):
    assert arrived(path, monkeypatch) == read(path)["deepspeed_config"]


@pytest.mark.parametrize(
    ("name", "key", "other"),
    [
        ("4gpu_fsdp2_offload", "fsdp_reshard_after_forward", False),
        ("4gpu_fsdp2_offload", "fsdp_auto_wrap_policy", "NO_WRAP"),
        ("4gpu_fsdp2_offload", "fsdp_state_dict_type", "FULL_STATE_DICT"),
        ("4gpu_fsdp2_offload", "fsdp_cpu_ram_efficient_loading", True),
        ("4gpu_fsdp2_offload", "fsdp_offload_params", False),
        ("4gpu_zero3_offload", "zero_stage", 2),
        ("4gpu_zero3_offload", "offload_optimizer_device", "none"),
        ("4gpu_zero3_offload", "offload_param_device", "none"),
        ("4gpu_zero3_offload", "zero3_save_16bit_model", False),
    ],
)
def test_another_value_of_a_key_arrives_too(name, key, other, monkeypatch, tmp_path):
    keys = read(FOLDER / f"{name}.yaml")
    section = "fsdp_config" if key.startswith("fsdp") else "deepspeed_config"
    assert keys[section][key] != other
    keys[section][key] = other
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump(keys), encoding="ascii")
    assert arrived(path, monkeypatch) == keys[section]


def test_without_the_version_accelerate_would_take_fsdp_1(tmp_path):
    keys = read(FOLDER / "4gpu_fsdp2.yaml")
    del keys["fsdp_config"]["fsdp_version"]
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump(keys), encoding="ascii")
    assert launcher_environment(path)["FSDP_VERSION"] == "1"


@having("fsdp_config")
def test_fsdp2_gathers_and_sums_in_bf16(path, monkeypatch):
    environment = launcher_environment(path)
    enter(monkeypatch, environment)
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16,) * 3


@having("deepspeed_config")
def test_deepspeed_takes_precision_from_the_launcher_and_leaves_the_rest_to_trainer(path, monkeypatch):
    environment = launcher_environment(path)
    enter(monkeypatch, environment)
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])
    assert plugin.deepspeed_config["bf16"] == {"enabled": True}
    from_trainer = ("gradient_accumulation_steps", "gradient_clipping", "train_micro_batch_size_per_gpu")
    assert [plugin.deepspeed_config[key] for key in from_trainer] == ["auto"] * 3


TINY_ESM = esm_config(num_hidden_layers=2)


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ((), "EsmFoldTriangularSelfAttentionBlock"),
        (("--fsdp_transformer_layer_cls_to_wrap", "EsmLayer,T5Block,BertLayer"), "T5Block"),
        (("--fsdp_transformer_layer_cls_to_wrap", "EsmLayer"), None),
    ],
)
def test_accelerate_wraps_esm_only_by_the_one_class_that_it_has(flags, missing, monkeypatch):
    model = EsmForMaskedLM(TINY_ESM)
    enter(monkeypatch, launcher_environment(FOLDER / "2gpu_fsdp2.yaml", *flags))
    plugin = FullyShardedDataParallelPlugin()
    if missing:
        with pytest.raises(ValueError, match=f"layer class {missing}"):
            fsdp2_prepare_auto_wrap_policy(plugin, model)
    else:
        policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
        assert [type(module).__name__ for module in model.modules() if policy(module)] == ["EsmLayer", "EsmLayer"]


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


def test_without_an_address_two_machines_would_look_for_a_host_called_none():
    _, args = launcher_arguments(FOLDER / "2node_8gpu_fsdp2.yaml", "--machine_rank", "1")
    prepare_multi_gpu_env(args)
    assert args.rdzv_endpoint == "None:29500"
