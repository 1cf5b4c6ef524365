"""The launcher files: parsed by accelerate itself, each key commented and read, and one of them really launched."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

FOLDER = Path(__file__).parents[1] / "accelerate_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
ALL = pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])


def launcher_environment(path: Path) -> dict[str, str]:
    """The environment that `accelerate launch --config_file path` gives the script."""
    args = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    args, _, _ = _validate_launch_command(args)
    return prepare_simple_launcher_cmd_env(args)[1]


def test_there_are_three_launcher_files():
    assert [path.name for path in FILES] == ["1gpu_a100_bf16.yaml", "1gpu_t4_fp16.yaml", "cpu.yaml"]


@ALL
def test_accelerate_loads_the_file_and_knows_every_key(path):
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    assert config.num_processes == 1
    assert config.num_machines == 1


def test_accelerate_refuses_a_key_it_does_not_know(tmp_path):
    path = tmp_path / "typo.yaml"
    path.write_text('distributed_type: "NO"\nmixed_precison: fp16\n', encoding="ascii")
    with pytest.raises(ValueError, match="mixed_precison"):
        load_config_from_file(str(path))


def uncommented_keys(text: str) -> list[str]:
    lines = text.splitlines()
    keys = [(number, line) for number, line in enumerate(lines) if re.match(r"\w+:", line)]
    return [line for number, line in keys if number == 0 or not lines[number - 1].startswith("# ")]


@ALL
def test_every_key_has_a_comment_and_the_file_names_its_smallest_hardware(path):
    text = path.read_text(encoding="ascii")
    assert uncommented_keys(text) == []
    assert "Smallest hardware: " in text.split("\n\n")[0]
    assert len(yaml.safe_load(text)) == len(re.findall(r"^\w+:", text, flags=re.MULTILINE)) == 7


def test_the_comment_check_finds_a_bare_key():
    assert uncommented_keys("# why\nuse_cpu: true\nnum_machines: 1\n") == ["num_machines: 1"]


# What the launcher ignores or cannot use, measured on accelerate 1.15: their flags have a default that is not None, so
# `_validate_launch_command` never looks at the file's value.
IGNORED = {"enable_cpu_affinity", "same_network", "rdzv_backend", "downcast_bf16"}


@ALL
def test_the_launcher_really_reads_every_key(path):
    wanted = yaml.safe_load(path.read_text(encoding="ascii"))
    args = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    before = dict(vars(args))
    args, _, _ = _validate_launch_command(args)
    assert wanted.keys() & IGNORED == set()
    for key in wanted.keys() - {"compute_environment", "distributed_type"}:  # these two choose the launcher itself
        assert before.get(key) is None, key
        assert getattr(args, key) == wanted[key], key
    assert (args.multi_gpu, args.use_fsdp, args.use_deepspeed, args.tpu) == (False, False, False, False)


@pytest.mark.parametrize(
    ("name", "precision", "gpus", "on_cpu"),
    [("cpu", "no", "", "True"), ("1gpu_t4_fp16", "fp16", "0", "False"), ("1gpu_a100_bf16", "bf16", "0", "False")],
)
def test_the_script_gets_the_stated_precision_and_devices(name, precision, gpus, on_cpu):
    environment = launcher_environment(FOLDER / f"{name}.yaml")
    assert environment["ACCELERATE_MIXED_PRECISION"] == precision
    assert environment["CUDA_VISIBLE_DEVICES"] == gpus
    assert environment["ACCELERATE_USE_CPU"] == on_cpu


@pytest.mark.parametrize(("name", "precision"), [("cpu", "no"), ("1gpu_t4_fp16", "fp16"), ("1gpu_a100_bf16", "bf16")])
def test_trainer_takes_the_precision_from_the_launcher(monkeypatch, tmp_path, name, precision):
    from transformers import TrainingArguments

    environment = launcher_environment(FOLDER / f"{name}.yaml")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", environment["ACCELERATE_MIXED_PRECISION"])
    assert TrainingArguments(str(tmp_path), report_to="none").mixed_precision == precision


def test_accelerate_launch_with_cpu_yaml_runs_one_process_on_the_cpu_in_fp32(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import json; from accelerate import Accelerator\n"
        "a = Accelerator()\n"
        "print(json.dumps([a.num_processes, a.device.type, a.mixed_precision]))\n",
        encoding="ascii",
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "CUDA_", "OMP_"))}
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(FOLDER / "cpu.yaml"),
        str(script),
    ]
    run = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    seen = SimpleNamespace(**dict(zip(("processes", "device", "precision"), json.loads(run.stdout.splitlines()[-1]))))
    assert (seen.processes, seen.device, seen.precision) == (1, "cpu", "no")
