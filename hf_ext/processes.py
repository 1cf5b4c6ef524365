"""Several processes: those that a launcher started train together, or not at all."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from accelerate.utils import DistributedType, is_deepspeed_available, parse_flag_from_env
from transformers.utils import is_torch_xla_available

from .errors import ArgumentError, PlanRefused


def count_launched() -> int:
    """Processes of this run over all machines, as the launcher's WORLD_SIZE says; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def need_cpu_backend() -> bool:
    """Whether several launched processes must be told `use_cpu` to find each other: torch sees no accelerator.

    The launcher of accelerate 1.15 keeps `use_cpu` of its YAML to itself when it starts several processes, and
    without it accelerate looks for a backend of GPUs, finds none, and each process trains alone on all rows. Not with
    DeepSpeed, which `use_cpu` would silently turn into DDP, and not where ACCELERATE_TORCH_DEVICE names the device.
    """
    is_rank = count_launched() > 1 and int(os.environ.get("LOCAL_RANK", "-1")) >= 0
    has_accelerator = torch.accelerator.is_available() or is_torch_xla_available()
    is_chosen = "ACCELERATE_TORCH_DEVICE" in os.environ or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    return is_rank and not has_accelerator and not is_chosen


def import_before_group() -> None:
    """Imports DeepSpeed, where it is installed and several processes were launched: seconds that Trainer spends later.

    DeepSpeed 0.19 keeps the process group that exists when it is imported as a default argument
    (`deepspeed/comm/torch.py`, `barrier`), and gloo's threads with it, which can abort the interpreter at its end
    (see `mixins/leaving.py`). To go when its default is None.
    """
    if count_launched() > 1 and is_deepspeed_available():
        importlib.import_module("deepspeed")


def check_together(world_size: int) -> None:
    """Refuses launched processes that do not know of each other.

    Args:
        world_size: processes that train together, as `TrainingArguments.world_size` says.

    Raises:
        ArgumentError: several were launched, and this one would train alone.
    """
    launched = count_launched()
    if launched > 1 and world_size == 1:
        raise ArgumentError(
            f"{launched} processes were launched (WORLD_SIZE={launched}), but each would train alone, on all rows, "
            "into the same folder: accelerate found no way to connect them on this machine. Give --use_cpu true to "
            "train together on the CPU, start a single process, or unset WORLD_SIZE where no launcher set it."
        )


def check_fsdp(args: Any) -> None:
    """Refuses FSDP that accelerate would silently leave out, as it does on the CPU.

    Args:
        args: `TrainingArguments`; its `distributed_state` is what accelerate made of the launch.

    Raises:
        PlanRefused: FSDP was asked for, by the launcher or in `args`, and every process would hold the whole model.
    """
    asked = parse_flag_from_env("ACCELERATE_USE_FSDP") or args.fsdp_plugin_args is not None
    kind = args.distributed_state.distributed_type
    if asked and kind in (DistributedType.NO, DistributedType.MULTI_CPU):
        instead = "DDP" if kind == DistributedType.MULTI_CPU else "a single process"
        raise PlanRefused(
            f"FSDP was asked for, but on this machine ({args.device.type}) accelerate would run {instead} and say "
            "nothing: FSDP needs one GPU per process. Take accelerate_configs/2cpu_ddp.yaml for several processes on "
            "the CPU, cpu.yaml or a 1gpu file for one."
        )
