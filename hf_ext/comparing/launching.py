"""How a side is launched: an Accelerate config file, read before anything runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from ..errors import ArgumentError
from ..files import LAUNCHERS, find_shipped


class CannotLaunch(ArgumentError):
    """The file is right, and this machine has not what it needs; `problem` says what, without the file."""

    def __init__(self, message: str, problem: str) -> None:
        super().__init__(message)
        self.problem = problem


@dataclass(frozen=True)
class Launch:
    """A file for `accelerate launch`, and the processes that it starts."""

    file: str
    num_processes: int

    def command(self) -> list[str]:
        """What stands before the recipe, with this Python."""
        return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", self.file]


def read_launch(path: str, flag: str) -> Launch:
    """Reads a config file and checks that this machine can start it.

    Args:
        path: a YAML file as in accelerate_configs, or the name of one there.
        flag: the argument that named it, for messages.

    Raises:
        ArgumentError: the file is absent or no Accelerate config.
        CannotLaunch: it is for several machines, or for more GPUs than here.
    """
    path = str(find_shipped(path, LAUNCHERS))
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ArgumentError(f"--{flag} {path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise ArgumentError(
            f"--{flag} {path}: no Accelerate config (distributed_type is missing). Those are in accelerate_configs; a "
            "recipe's YAML belongs to --config, --baseline or --optimized."
        )
    if config.get("num_machines", 1) > 1:
        problem = f"for {config['num_machines']} machines; a comparison starts processes on this one only"
        raise CannotLaunch(f"--{flag} {path}: {problem}.", problem)
    num_processes = int(config.get("num_processes", 1))
    num_gpus = torch.accelerator.device_count()
    if not config.get("use_cpu", False) and num_processes > num_gpus:
        problem = f"for {num_processes} GPU(s), and this machine has {num_gpus}"
        raise CannotLaunch(
            f"--{flag} {path}: {problem}. Take a file for fewer, or accelerate_configs/cpu.yaml and 2cpu_ddp.yaml.",
            problem,
        )
    return Launch(path, num_processes)
