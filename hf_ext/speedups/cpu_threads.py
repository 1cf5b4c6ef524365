"""One thread for each core that this process may use, where nobody said how many.

Class N: sums over several threads may differ in their last bits. Effect: products of matrices run on several cores.
`accelerate launch` gives a process one thread where no configuration names a CPU (`accelerate/commands/launch.py`,
1.15), and torch by itself one per core of the machine, whatever a container's quota is.
Hardware: CPUs with two cores or more, a run of one process. OMP_NUM_THREADS or MKL_NUM_THREADS that you set are met,
but for OMP_NUM_THREADS=1 under `accelerate launch`, which may be its own word: set one to less on a machine whose cores
others use, where several threads may be slower than one.
`--without cpu_threads` keeps what the process has.
"""

from __future__ import annotations

import os

import torch

from ..models.process_settings import Held
from .base import Context, Decision, Kind, Run, applied, off, skipped

NAME = "cpu_threads"
KIND: Kind = "N"
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_HELD = Held(torch.get_num_threads, torch.set_num_threads)


def decide(context: Context) -> Decision:
    """On where one process has several cores, and the user has not said how many threads."""
    if not context.wants(NAME, KIND):
        return off()
    if context.hardware.kind != "cpu":
        return skipped(f"{context.hardware.name} is not a CPU")
    if context.world_size > 1:
        return skipped(f"{context.world_size} processes share the cores: the launcher says how many each has")
    if context.cpu_cores < 2:
        return skipped("one core")
    if name := chosen_by_user():
        return skipped(f"{name}={os.environ[name]} is set")
    return applied(f"one for each of {context.cpu_cores} cores", {"threads": context.cpu_cores})


def chosen_by_user() -> str | None:
    """The variable by which the user chose a number of threads; None where there is none, or accelerate's 1."""
    by_launcher = "ACCELERATE_MIXED_PRECISION" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    names = ("MKL_NUM_THREADS",) if by_launcher else VARIABLES
    return next((name for name in names if os.environ.get(name)), None)


def apply(decision: Decision, run: Run) -> Decision:
    """Sets the number until the run is over."""
    run.hold(_HELD, decision.settings["threads"])
    return decision
