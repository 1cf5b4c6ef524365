"""recipes/configs/pde_*.yaml with the launcher file that each names: the plan on described A100s."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from launcher_files import FOLDER, launcher_environment

from hf_ext.arguments.parser import parse_command
from hf_ext.hardware import describe_hardware
from hf_ext.pde.configuration import OperatorConfig
from hf_ext.pde.model import OperatorTransformer
from hf_ext.pde.task import TASK
from hf_ext.plan import make_plan
from hf_ext.speedups import REGISTRY

CONFIGS = FOLDER.parent / "recipes" / "configs"
COMMON = {"muon", "data_loading", "precision"}
FASTER = COMMON | {"activation_checkpointing", "compile"}
# file -> rows of a step, processes, half precision, what is applied
SETUPS = {
    "pde_4gpu_baseline": (96, 4, "fp16", {"muon", "precision"}),
    "pde_4gpu_optimized": (192, 4, "bf16", FASTER | {"sharding", "cpu_offload"}),
    "pde_conservative": (160, 4, "bf16", FASTER | {"ddp", "cpu_offload"}),
    "pde_2gpu_baseline": (120, 2, "fp16", {"muon", "precision"}),
    "pde_2gpu_optimized": (120, 2, "bf16", FASTER | {"ddp", "cpu_offload"}),
}


def launcher_of(name: str) -> str:
    """The launcher file that the head of a configuration names."""
    return re.search(r"accelerate_configs/(\w+)\.yaml", (CONFIGS / f"{name}.yaml").read_text())[1]


@pytest.fixture
def resolve(monkeypatch, tmp_path):
    """The arguments of a configuration, and its plan on as many A100s as its launcher file starts processes for."""

    def make(name: str, processes: int, *given: str):
        for variable, value in launcher_environment(FOLDER / f"{launcher_of(name)}.yaml").items():
            if variable.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")):  # not those that start processes
                monkeypatch.setenv(variable, value)
        words = ["--config", str(CONFIGS / f"{name}.yaml"), "--output_dir", str(tmp_path), *given]
        _, (model_args, args) = parse_command(TASK.all_arguments, TASK.defaults, None, words)
        with torch.device("meta"):
            model = OperatorTransformer(OperatorConfig(**model_args.shape))
        alone = make_plan(args, model, None, None, describe_hardware("a100-80gb"))
        context = replace(alone.context, world_size=processes)
        return model_args, args, {one.NAME: one.decide(context) for one in REGISTRY}

    return make


@pytest.mark.parametrize("name", SETUPS)
def test_the_plan_of_a_set_up_is_what_its_file_says(resolve, name):
    rows, processes, precision, applied = SETUPS[name]
    model_args, args, decisions = resolve(name, processes)
    assert {n: d.reason for n, d in decisions.items() if d.status == "refused"} == {}
    assert applied <= {n for n, d in decisions.items() if d.status == "applied"}
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * processes == rows
    assert model_args.hidden_size == 384
    assert (precision == "bf16") == ("bf16" in decisions["precision"].settings.values())
    assert ("FSDP2" in decisions["sharding"].reason) == (name == "pde_4gpu_optimized")


def test_there_are_five():
    assert sorted(SETUPS) == sorted(path.stem for path in CONFIGS.glob("pde_*.yaml"))
