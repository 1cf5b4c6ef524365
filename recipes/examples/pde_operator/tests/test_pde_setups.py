"""Operators on several devices: the plans of the set-ups in configs/."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import train
from launcher_files import FOLDER, launcher_environment
from pde_operator.configuration import OperatorConfig
from pde_operator.model import OperatorTransformer
from pde_operator.task import OperatorTask

from hf_ext.arguments import parse_command
from hf_ext.hardware import describe_hardware
from hf_ext.plan import make_plan
from hf_ext.speedups import REGISTRY

CONFIGS = Path(train.__file__).parent / "configs"
COMMON = {"muon", "data_loading", "precision"}
FASTER = COMMON | {"compile"}
FOUR = ("--num_processes", "4")
TWO = ("--num_processes", "2")
# file, flags of the recipe, launcher file, its flags -> rows of a step, processes, half precision, what is applied
SETUPS = {
    "four baseline": (
        "pde_baseline",
        "",
        "ddp",
        (*FOUR, "--mixed_precision", "fp16"),
        96,
        "fp16",
        {"precision", "muon"},
    ),
    "four optimized": ("pde_optimized", "", "fsdp2_offload", FOUR, 192, "bf16", FASTER | {"sharding", "cpu_offload"}),
    "four conservative": ("pde_conservative", "", "ddp", FOUR, 160, "bf16", FASTER | {"ddp", "cpu_offload"}),
    "two baseline": (
        *("pde_baseline", "--per_device_train_batch_size 10 --effective_batch_size 120"),
        *("ddp", (*TWO, "--mixed_precision", "fp16"), 120, "fp16", {"precision", "muon"}),
    ),
    "two optimized": (
        *("pde_conservative", "--per_device_train_batch_size 30 --effective_batch_size 120 --inverse_loss_every 0"),
        *("ddp", TWO, 120, "bf16", FASTER | {"ddp", "cpu_offload"}),
    ),
}


@pytest.fixture
def resolve(monkeypatch, tmp_path):
    """The arguments of a set-up, and its plan on as many A100s as its launcher starts processes for."""

    def make(name: str, given: str, launcher: str, flags: tuple[str, ...]):
        for variable, value in launcher_environment(FOLDER / f"{launcher}.yaml", *flags).items():
            if variable.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")):  # not those that start processes
                monkeypatch.setenv(variable, value)
        words = ["--config", str(CONFIGS / f"{name}.yaml"), "--output_dir", str(tmp_path), *given.split()]
        task = OperatorTask()
        _, (model_args, args) = parse_command(task.all_arguments, task.defaults, None, words)
        with torch.device("meta"):
            model = OperatorTransformer(OperatorConfig(**model_args.shape))
        alone = make_plan(args, model, None, None, describe_hardware("a100-80gb"))
        context = replace(alone.context, world_size=int(flags[1]))
        return model_args, args, {one.NAME: one.decide(context) for one in REGISTRY}

    return make


@pytest.mark.parametrize("name", SETUPS)
def test_the_plan_of_a_set_up_is_what_the_table_says(resolve, name):
    config, given, launcher, flags, rows, precision, applied = SETUPS[name]
    model_args, args, decisions = resolve(config, given, launcher, flags)
    assert {n: d.reason for n, d in decisions.items() if d.status == "refused"} == {}
    assert applied <= {n for n, d in decisions.items() if d.status == "applied"}
    passes = decisions["batch_size"].settings.get("gradient_accumulation_steps", args.gradient_accumulation_steps)
    assert args.per_device_train_batch_size * passes * int(flags[1]) == rows
    assert model_args.hidden_size == 384
    assert (precision == "bf16") == ("bf16" in decisions["precision"].settings.values())
    assert ("FSDP2" in decisions["sharding"].reason) == (config == "pde_optimized")
