"""Processes that a launcher started: they train together, or not at all. How they agree is in `team`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType, is_deepspeed_available, parse_flag_from_env
from transformers.utils import is_torch_xla_available

from ..errors import ArgumentError, PlanRefused

if TYPE_CHECKING:
    from transformers import TrainingArguments

UNSPLIT_FAMILIES = ("esm", "esmc", "t5", "bert", "roformer", "modernbert")


def count_launched() -> int:
    """Processes of this run over all machines, as the launcher's WORLD_SIZE says; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def need_cpu_backend() -> bool:
    """Tells whether several launched processes must be told `use_cpu` to find each other: torch sees no accelerator.

    The launcher of accelerate 1.15 keeps `use_cpu` of its YAML to itself when it starts several processes, and
    without it accelerate looks for a backend of GPUs, finds none, and each process trains alone on all rows. Not with
    DeepSpeed, which `use_cpu` would silently turn into DDP, and not where ACCELERATE_TORCH_DEVICE names the device.
    """
    is_rank = count_launched() > 1 and int(os.environ.get("LOCAL_RANK", "-1")) >= 0
    is_chosen = "ACCELERATE_TORCH_DEVICE" in os.environ or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    return is_rank and not _has_accelerator() and not is_chosen


def need_gloo() -> bool:
    """Tells whether DeepSpeed was launched where torch sees no accelerator, and must be told how processes connect.

    DeepSpeed has an accelerator "cpu", but accelerate 1.15 finds no backend there unless it is named, and each process
    would train alone.
    """
    is_rank = int(os.environ.get("LOCAL_RANK", "-1")) >= 0
    is_launched = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED") and not parse_flag_from_env("ACCELERATE_USE_CPU")
    return is_rank and is_launched and not _has_accelerator()


def _has_accelerator() -> bool:
    return bool(torch.accelerator.is_available() or is_torch_xla_available())


def import_deepspeed() -> None:
    """Imports DeepSpeed, where it is installed and several processes were launched, without the group it would keep.

    Accelerate imports it later. DeepSpeed 0.19 keeps the process group that exists by then as a default argument
    (`deepspeed/comm/torch.py`, `barrier`), and gloo's threads with it, which can abort the interpreter at its end
    (see `hf_ext/processes/team.py`). None means the same group there. To go when DeepSpeed's own default is None.
    """
    if count_launched() > 1 and is_deepspeed_available():
        backend = importlib.import_module("deepspeed.comm.torch").TorchBackend
        for method in (backend.barrier, backend.monitored_barrier):
            method.__defaults__ = tuple(
                None if isinstance(value, torch.distributed.ProcessGroup) else value for value in method.__defaults__
            )


def refuse_several(command: str) -> None:
    """Refuses to do in several launched processes what one does alone.

    Args:
        command: of `hf-ext`.

    Raises:
        ArgumentError: several processes were launched.
    """
    launched = count_launched()
    if launched > 1:
        raise ArgumentError(
            f"{launched} processes were launched (WORLD_SIZE={launched}), but {command} is the work of one: each would "
            f"do all of it and write the same files. Start it as hf-ext {command}."
        )


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


def check_fsdp(args: TrainingArguments) -> None:
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
            "nothing: FSDP needs one GPU per process. Take accelerate_configs/cpu.yaml, with "
            "--multi_gpu --num_processes 2 for several processes on the CPU, or a 1gpu file."
        )


def check_parallelism(args: TrainingArguments, families: Sequence[str]) -> None:
    """Refuses ways to split a model that encoders of proteins cannot be split by; FSDP2 and HSDP are let through.

    Splitting layers (tensor parallel) needs a plan that `transformers` 5 has for few encoders, and none of them was
    tried; splitting sequences needs causal attention (context parallel, `Trainer._prepare_context_parallel_inputs`) or
    DeepSpeed's attention, which these models' padding and relative positions do not have (sequence parallel).

    Args:
        args: `TrainingArguments`; the launcher's PARALLELISM_CONFIG_* are read as accelerate reads them.
        families: model types of the encoders; others than those above are not checked.

    Raises:
        PlanRefused: with the sizes that were asked for, and what to take instead.
    """
    asked = parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG")
    config = args.parallelism_config or (ParallelismConfig() if asked else None)
    if config is not None and config.non_data_parallel_size > 1 and set(families) & set(UNSPLIT_FAMILIES):
        raise PlanRefused(
            f"Tensor, context and sequence parallel (tp_size={config.tp_size}, cp_size={config.cp_size}, "
            f"sp_size={config.sp_size}) cannot split {', '.join(families)}: no tensor plan was tried, and attention "
            "goes in both directions, over padding. Split weights: FSDP2 (fsdp2.yaml), HSDP (hsdp.yaml) or "
            "ZeRO (zero3.yaml). Long sequences: --max_tokens_per_batch, --activation_checkpointing true."
        )
