"""NCCL's environment: the few variables of `--nccl_preset`, set before processes meet and checked against the machine.

Class I. Effect: processes that talk by the wrong way fail with a message instead of being slow (InfiniBand), use more
sockets (100 Gbit/s Ethernet), and the plan says which variables were set, why, and what stands against them.
Hardware: several processes on CUDA devices; elsewhere it is not used. Nothing is set without `--nccl_preset`.
Cost: none; two helper settings of `sockets` take CPU time. Not measured here.
Source: `hf_ext/nccl.py`, with NVIDIA's guide. Variables are set by the launcher's shell (`python -m hf_ext.nccl`) or by
`FastTrainingArguments`; both only where the user set nothing.
"""

from __future__ import annotations

from ..nccl import Topology, find_conflicts, known_variables, missing_variables, preset_variables, read_topology
from .base import Context, Decision, Kind, Run, off

NAME = "nccl"
KIND: Kind = "I"


def decide(context: Context) -> Decision:
    """Applies with `--nccl_preset` where NCCL connects processes; refused where the machine lacks what it is for."""
    preset = context.args.nccl_preset
    if preset is None:
        if NAME in (context.args.speedups or []):
            return Decision(NAME, KIND, "skipped", "give --nccl_preset: which variables help depends on the machine")
        return off(NAME, KIND)
    if NAME in (context.args.without or []):
        reason = f"--nccl_preset {preset} and --without nccl contradict each other: keep one"
        return Decision(NAME, KIND, "refused", reason)
    if context.hardware.kind != "cuda" or context.world_size == 1:
        who = "one process" if context.world_size == 1 else f"processes on {context.hardware.name} talk by other means"
        return Decision(NAME, KIND, "skipped", f"not used: {who}")
    if context.args.ddp_backend not in (None, "nccl"):
        return Decision(NAME, KIND, "skipped", f"not used: --ddp_backend {context.args.ddp_backend} was asked for")
    is_described = not context.hardware.device_name
    topology = None if is_described else read_topology()
    problem = None if is_described else _find_late(preset)
    if problem is None and topology is not None:
        problem = _find_lack(preset, topology)
    if problem:
        return Decision(NAME, KIND, "refused", problem)
    variables = preset_variables(preset)
    conflicts = [] if is_described else find_conflicts(preset)
    seen = "no topology read" if topology is None else str(topology)
    reason = "; ".join([f"{preset}: {', '.join(v.name for v in variables)}", seen, *conflicts])
    evidence = {"reasons": {v.name: f"{v.reason} ({v.source})" for v in variables}}
    return Decision(NAME, KIND, "applied", reason, {v.name: v.value for v in variables}, evidence)


def _find_late(preset: str) -> str | None:
    missing = missing_variables(preset)
    if not missing:
        return None
    return (
        f"the processes were connected before {', '.join(missing)} could be set: make FastTrainingArguments first, or "
        f'run eval "$(python -m hf_ext.nccl {preset})" before accelerate launch'
    )


def _find_lack(preset: str, topology: Topology) -> str | None:
    if preset == "nvlink" and topology.links and not topology.num_nvlinks:
        return f"no NVLink here ({topology}): use --nccl_preset pcie"
    if preset == "infiniband" and not topology.rdma_devices:
        return f"no active InfiniBand or RoCE port here ({topology}): use --nccl_preset sockets"
    return None


def apply(decision: Decision, run: Run) -> Decision:
    """Changes nothing: the variables were set before the processes met. Records those that are in force."""
    return decision.with_evidence(in_force=known_variables())
