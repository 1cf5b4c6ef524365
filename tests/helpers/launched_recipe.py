"""A recipe as `accelerate launch` starts it; each process also writes what it was part of.

`launched_recipe.py FOLDER RECIPE ARGUMENTS` runs the recipe with its arguments, and at the end of training writes
FOLDER/facts-RANK.json. `WORLD`, in the environment, is the number of processes that there must be: another one ends
the run before a row is read.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import distributed, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer import DEFAULT_CALLBACKS

FACTS = Path(sys.argv[1])


def describe_fsdp(plugin: Any, model: nn.Module) -> dict[str, Any]:
    """Version, what was wrapped, and over which mesh weights are really split."""
    split = [weight for weight in model.parameters() if isinstance(weight, DTensor)]
    wrapped = {
        type(module).__name__.removeprefix("FSDP") for module in model.modules() if isinstance(module, FSDPModule)
    }
    return {
        "version": plugin.fsdp_version,
        "state_dict": plugin.state_dict_type.name,
        "offload": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "reshard": plugin.reshard_after_forward,
        "wrapped": sorted(wrapped),
        "meshes": sorted({tuple(weight.device_mesh.shape) for weight in split}),
        "whole": [name for name, weight in model.named_parameters() if not isinstance(weight, DTensor)],
        "share": round(sum(w.to_local().numel() for w in split) / max(1, sum(w.numel() for w in split)), 2),
    }


def describe_zero(plugin: Any, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Stage as configured and as it runs, devices, and the share of weights that lives in this process."""
    weights = list(model.parameters())
    kept = sum(weight.ds_tensor.numel() if hasattr(weight, "ds_tensor") else weight.numel() for weight in weights)
    total = sum(getattr(weight, "ds_numel", weight.numel()) for weight in weights)
    zero = plugin.deepspeed_config["zero_optimization"]
    return {
        "stage": plugin.zero_stage,
        "optimizer": type(optimizer.optimizer).__name__,
        "offload": [zero["offload_optimizer"]["device"], zero["offload_param"]["device"]],
        "share": round(kept / total, 2),
    }


def digest(model: nn.Module) -> float:
    """One number of this process's own weights; of DDP's copies the same in every process."""
    return sum(float(weight.detach().double().abs().sum()) for weight in model.parameters())


class Facts(TrainerCallback):
    """Checks the number of processes before the first step; writes the facts when training has ended."""

    def on_init_end(self, args: TrainingArguments, state, control, **_):
        if args.distributed_state.distributed_type == DistributedType.FSDP:
            plugin = AcceleratorState().fsdp_plugin
            if isinstance(plugin.cpu_offload, CPUOffloadPolicy) and not torch.accelerator.is_available():
                plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # memory is pinned for a GPU, or not at all

    def on_train_begin(self, args: TrainingArguments, state, control, **_):
        found = distributed.get_world_size() if distributed.is_initialized() else 1
        if found != int(os.environ["WORLD"]):
            raise RuntimeError(f"{found} processes train together; {os.environ['WORLD']} were to be launched")

    def on_train_end(self, args: TrainingArguments, state, control, model=None, optimizer=None, **_):
        shared = AcceleratorState()
        facts: dict[str, Any] = {
            "kind": str(shared.distributed_type.value),
            "processes": shared.num_processes,
            "rank": [shared.process_index, shared.local_process_index],
            "machines": int(os.environ.get("GROUP_WORLD_SIZE", "1")),
            "device": shared.device.type,
            "precision": shared.mixed_precision,
            "threads": torch.get_num_threads(),
            "steps": state.global_step,
        }
        if distributed.is_initialized():
            summed = torch.tensor([1.0 + shared.process_index])
            distributed.all_reduce(summed)
            facts |= {"backend": distributed.get_backend(), "summed": summed.item()}
        if shared.distributed_type == DistributedType.FSDP:
            facts["fsdp"] = describe_fsdp(shared.fsdp_plugin, model)
        elif shared.distributed_type == DistributedType.DEEPSPEED:
            facts["zero"] = describe_zero(shared.deepspeed_plugin, model, optimizer)
        else:
            facts["digest"] = digest(model)
        (FACTS / f"facts-{shared.process_index}.json").write_text(json.dumps(facts), encoding="ascii")


if __name__ == "__main__":
    DEFAULT_CALLBACKS.append(Facts)
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as Python starts a script
    runpy.run_path(sys.argv[0], run_name="__main__")
