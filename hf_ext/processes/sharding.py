"""What FSDP2 and DeepSpeed's ZeRO were asked to split or to move, as Trainer and accelerate read it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env
from torch import Tensor
from transformers.integrations import deepspeed as integration

if TYPE_CHECKING:
    from transformers import TrainingArguments


def fsdp_version(args: TrainingArguments) -> int | None:
    """Returns 1 or 2, as Trainer finds it: in its own arguments, or where the launcher left it; None without FSDP."""
    if args.fsdp_plugin_args is not None:
        return int(args.fsdp_plugin_args["fsdp_version"])
    return int(os.environ.get("FSDP_VERSION", "1")) if parse_flag_from_env("ACCELERATE_USE_FSDP") else None


def read_fsdp2(args: TrainingArguments) -> FullyShardedDataParallelPlugin | None:
    """Reads the FSDP2 settings that accelerate will make of `args` and the environment; None without FSDP2."""
    if fsdp_version(args) != 2:
        return None
    return FullyShardedDataParallelPlugin(**(args.fsdp_plugin_args or {}))


def zero_stage(args: TrainingArguments) -> int | None:
    """Returns ZeRO's stage: from 2 on gradients are split, from 3 on weights; None without DeepSpeed."""
    return None if args.deepspeed_plugin is None else int(_read(args, "zero_optimization.stage", 0))


def splits_weights(args: TrainingArguments) -> bool:
    """Tells whether ZeRO keeps a shard of each weight per process, as it does from stage 3 on."""
    return (zero_stage(args) or 0) >= 3


def offload_device(args: TrainingArguments) -> str | None:
    """Names where ZeRO keeps the optimizer ("cpu", "nvme") if not on the device; None otherwise."""
    if args.deepspeed_plugin is None:
        return None
    device = str(_read(args, "zero_optimization.offload_optimizer.device", "none"))
    return None if device == "none" else device


def replaces_optimizer(args: TrainingArguments) -> bool:
    """Tells whether accelerate will hand DeepSpeed another optimizer than Trainer made.

    With `offload_optimizer` it makes a DeepSpeedCPUAdam of it, whatever it was, but for Adagrad and Lion
    (`accelerate.utils.deepspeed.map_pytorch_optim_to_deepspeed`), unless `zero_force_ds_cpu_optimizer` is false.
    """
    return offload_device(args) is not None and bool(_read(args, "zero_force_ds_cpu_optimizer", True))


def _read(args: Any, key: str, default: object) -> Any:
    value = args.deepspeed_plugin.hf_ds_config.get_value(key)
    return default if value is None else value


def num_elements(parameter: Tensor) -> int:
    """Counts elements of a whole weight, also where ZeRO-3 left a shard of it or nothing here."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def own_shard(parameter: Tensor) -> Tensor:
    """Returns this process's shard of a weight that ZeRO-3 splits; any other tensor as it is."""
    return getattr(parameter, "ds_tensor", parameter)


@contextmanager
def whole_weights() -> Iterator[None]:
    """Lets `from_pretrained` give every process whole weights, also where ZeRO-3 would split them as they are read.

    For what runs outside DeepSpeed's engine, such as frozen encoders. Cost: the model in each process's memory.
    """
    config = integration._hf_deepspeed_config_weak_ref
    integration._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = config
