"""Optimizer in host memory: ours for torch's optimizers, FSDP2's own where weights are sharded.

Class I. Effect: the optimizer's states, 8 bytes per trained number with AdamW, leave the card. Each step copies weights
and gradients to the host, steps there and copies the weights back: after accumulation, averaging over processes,
clipping and loss scaling, so that all of them act as before.
With `--speedups all cpu_offload`, around AdamW, Adafactor, RMSprop, Adagrad, and around Muon's hybrid (`--speedups all
muon cpu_offload`). Under DDP each process steps everything on its host: right, and as many times the memory and the
work. Checkpoints are those of the optimizer itself: a run goes on with or without the offload. With
`fsdp_offload_params: true` (accelerate_configs/fsdp2_offload.yaml), weights and gradients live there too; ZeRO
offloads by its own switch (`--offload_optimizer_device cpu`).
Hardware: a card with memory of its own. Host memory per process and trained number: 8 bytes, pinned, and the states.
Cost: three copies of 4 bytes per trained number, and the step at the CPU's pace; both are paid once per optimizer step,
so large batches and accumulation hide them.
Muon's matrix products run on the CPU, too, which takes long
(`benchmarks/results/host_optimizer_cpu.json`). Not measured on a card.
Conflicts: bitsandbytes and torchao optimizers, whose states stay with their kernels.
Evidence: pinned bytes; after training, the bytes of states that the card did not hold.
Source: `models/host_optimizer.py`; ZeRO-Offload, arXiv:2101.06840; torch, `CPUOffloadPolicy` of `fully_shard`.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import parse_flag_from_env

from ..memory.stored import gradient_bytes
from .base import Context, Decision, Kind, Run, applied, off, optimizer_name, refused

NAME = "cpu_offload"
KIND: Kind = "I"
PARTNERS = ("adamw_torch_fused", "adamw_torch", "adafactor", "rmsprop", "adagrad")
CARDS = ("cuda", "rocm")  # with memory of their own

# Those that Trainer takes from bitsandbytes. They step on CPUs too since 0.50, but no weights that FSDP2 has split: its
# kernels have no rule for DTensors.
BITSANDBYTES = frozenset(
    """
    adamw_bnb_8bit adamw_8bit lion_8bit lion_32bit paged_adamw_32bit paged_adamw_8bit paged_lion_32bit paged_lion_8bit
    ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit
    """.split()  # noqa: SIM905  readable as a paragraph
)


def decide(context: Context) -> Decision:
    """Ours on request; FSDP2's is reported where the launcher asked for it. What cannot step there is refused."""
    args = context.args
    optimizer = optimizer_name(args)
    if context.names(NAME):
        problem = _find_problem(context, optimizer)
        if problem:
            return refused(problem)
        return applied(_describe(context, optimizer), {"by": "host"})
    if _fsdp_offloads(args):
        if optimizer in BITSANDBYTES:
            reason = f"--optim {optimizer} (bitsandbytes) cannot step weights that FSDP2 has split"
            reason += ": use --optim adamw_torch_fused, or no fsdp_offload_params"
            return refused(reason)
        return applied(f"FSDP2 keeps weights, gradients and the states of {optimizer} on the host", {"by": "fsdp"})
    return off("not asked for by its name")


def _describe(context: Context, optimizer: str) -> str:
    has_muon = context.names("muon")
    stepped = "Muon and AdamW step in host memory: their" if has_muon else f"{optimizer} steps in host memory: its"
    reason = f"{stepped} states leave {context.hardware.name}"
    if has_muon:
        reason += "; Muon's matrix products are slow on a CPU"
    if context.world_size > 1:
        reason += f"; each of {context.world_size} processes keeps all states there"
    return reason


def _find_problem(context: Context, optimizer: str) -> str | None:
    args = context.args
    if optimizer == "sgd":
        return "--optim sgd keeps at most momentum, too little to move: leave cpu_offload out"
    if optimizer not in PARTNERS:
        return f"--optim {optimizer} was not tried in host memory: use --optim {' or '.join(PARTNERS)}"
    if args.deepspeed_plugin is not None:
        return "ZeRO offloads by its own switch: use accelerate launch --offload_optimizer_device cpu instead"
    if args.fsdp_plugin_args is not None or parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return "FSDP2 offloads by its own switch: use accelerate_configs/fsdp2_offload.yaml instead"
    if context.hardware.kind not in CARDS:
        return f"for cards with memory of their own; on {context.hardware.name} there is nothing to gain: leave it out"
    return None


def _fsdp_offloads(args: Any) -> bool:
    """As Trainer finds it: in its own arguments, or where accelerate's launcher left it."""
    if args.fsdp_plugin_args is not None:
        return bool(args.fsdp_plugin_args.get("cpu_offload"))
    return parse_flag_from_env("ACCELERATE_USE_FSDP") and parse_flag_from_env("FSDP_OFFLOAD_PARAMS")


def apply(decision: Decision, run: Run) -> Decision:
    """Changes nothing: the optimizer is made when training starts. Records what each process will pin."""
    if decision.settings["by"] == "fsdp" or run.model is None:
        return decision
    return decision.with_evidence(pinned_bytes=2 * gradient_bytes(run.model))
