"""What a phase of a progression may need, and whether this machine has it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..models.faesm_bridge import faesm_problem
from .launching import CannotLaunch, read_launch

TF32_CAPABILITY = (8, 0)


def find_problem(needs: tuple[str, ...], launch: str | None) -> str | None:
    """Why this machine cannot run a phase; None if it can.

    Raises:
        ArgumentError: the launch file is absent, or no Accelerate config.
    """
    problems = [problem for name in needs if (problem := NEEDS[name]())]
    if launch:
        try:
            read_launch(launch, "progression, launch")
        except CannotLaunch as error:
            problems.append(error.problem)
    return "; ".join(problems) or None


def _no_cuda() -> str | None:
    return None if torch.cuda.is_available() else "needs a CUDA device, and this machine has none"


def _no_ampere() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device of compute capability 8.0 or higher, and this machine has no CUDA device"
    found = torch.cuda.get_device_capability()
    if found >= TF32_CAPABILITY:
        return None
    return f"needs compute capability 8.0 or higher; {torch.cuda.get_device_name()} has {found[0]}.{found[1]}"


def _no_two_gpus() -> str | None:
    found = torch.cuda.device_count()
    return None if found >= 2 else f"needs 2 CUDA devices, and this machine has {found or 'none'}"


NEEDS: dict[str, Callable[[], str | None]] = {
    "cuda": _no_cuda,
    "ampere": _no_ampere,
    "two_gpus": _no_two_gpus,
    "faesm": faesm_problem,
}
