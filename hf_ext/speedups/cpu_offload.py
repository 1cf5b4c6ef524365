"""Optimizer in host memory: torchao's on one CUDA card, FSDP2's own on several.

Class I. Effect: AdamW's two states, 8 bytes per trained parameter, leave the card; each step copies every gradient to
the host and every weight back. With `--optim_ext cpu_offload`, torchao's `CPUOffloadOptimizer` on a single card; with
`fsdp_offload_params: true` (accelerate_configs/4gpu_fsdp2_offload.yaml), weights and gradients live there too. ZeRO
offloads by its own switch (4gpu_zero3_offload.yaml).
Hardware: CUDA; pinned host memory of 12 bytes per trained parameter for torchao's, 16 for FSDP2's over all processes.
Cost: PCIe and the CPU set the pace of each step; large batches hide it. Not measured: no GPU was there.
Limits of torchao's, which copies a gradient as soon as backward has made it: clipping, loss scaling and a step left
out come too late, so they are refused, and so are several processes, whose gradients are not averaged by then. Device
gradients are kept (`offload_gradients=False`), which accumulation, the gradient norm and `--nan_policy stop` need.
Source: torchao 0.18, `torchao/optim/cpu_offload.py`; torch, `CPUOffloadPolicy` of `fully_shard`.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from torch.optim import AdamW

from ..optional import require
from . import precision
from .base import Context, Decision, Kind, Run, off

NAME = "cpu_offload"
KIND: Kind = "I"
PARTNERS = ("adamw_torch_fused", "adamw_torch")
TAKEN_OVER = ("params", "lr", "betas", "eps", "weight_decay")  # of AdamW's groups

# Those that Trainer takes from bitsandbytes, whose kernels step tensors on the GPU.
ON_DEVICE_ONLY = frozenset(
    """
    adamw_bnb_8bit adamw_8bit lion_8bit lion_32bit paged_adamw_32bit paged_adamw_8bit paged_lion_32bit paged_lion_8bit
    ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit
    """.split()  # noqa: SIM905  readable as a paragraph
)


def decide(context: Context) -> Decision:
    """torchao's on request; FSDP2's is reported where the launcher asked for it. What cannot step there is refused."""
    args = context.args
    optimizer = str(getattr(args.optim, "value", args.optim))
    if args.optim_ext == NAME:
        problem = _find_problem(context, optimizer)
        if problem:
            return Decision(NAME, KIND, "refused", problem)
        reason = f"torchao steps AdamW on the host for {context.hardware.name}"
        return Decision(NAME, KIND, "applied", reason, {"by": "torchao"})
    if _fsdp_offloads(args):
        if optimizer in ON_DEVICE_ONLY:
            reason = f"--optim {optimizer} (bitsandbytes) steps on GPUs only, and FSDP2 keeps weights on the host"
            reason += ": use --optim adamw_torch_fused, or no fsdp_offload_params"
            return Decision(NAME, KIND, "refused", reason)
        reason = f"FSDP2 keeps weights, gradients and the states of {optimizer} on the host"
        return Decision(NAME, KIND, "applied", reason, {"by": "fsdp"})
    if NAME in (args.speedups or []):
        reason = "give --optim_ext cpu_offload, or a launch file with fsdp_offload_params"
        return Decision(NAME, KIND, "skipped", reason)
    return off(NAME, KIND)


def _find_problem(context: Context, optimizer: str) -> str | None:
    args = context.args
    if NAME in (args.without or []):
        return "--optim_ext cpu_offload and --without cpu_offload contradict each other: keep one"
    if optimizer not in PARTNERS:
        return f"only AdamW is moved (--optim {' or '.join(PARTNERS)}), and --optim {optimizer} was asked for"
    if args.deepspeed_plugin is not None:
        return "ZeRO offloads by its own switch: use accelerate_configs/4gpu_zero3_offload.yaml without --optim_ext"
    if args.fsdp_plugin_args is not None or parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return "FSDP2 offloads by its own switch: use accelerate_configs/4gpu_fsdp2_offload.yaml instead"
    if context.hardware.kind != "cuda":
        return f"for one CUDA card; on {context.hardware.name} there is nothing to gain: leave it out"
    if context.world_size > 1 or args.n_gpu > 1:
        return (
            "for one card: with several, gradients would be taken before they are averaged: "
            "use accelerate_configs/4gpu_fsdp2_offload.yaml"
        )
    return _find_late(context)


def _find_late(context: Context) -> str | None:
    """What would act on gradients that the host has copied already, without effect and without an error."""
    args = context.args
    if precision.decide(context).settings.get("mixed_precision") == "fp16":
        return (
            "gradients reach the host before fp16's loss scale is taken off: use bf16, or float32 (--without precision)"
        )
    if args.max_grad_norm and args.max_grad_norm > 0:
        return f"gradients reach the host before they are clipped: add --max_grad_norm 0 (now {args.max_grad_norm:g})"
    if args.nan_policy == "skip":
        return "a step left out would be taken on the host all the same: use --nan_policy stop"
    return None


def _fsdp_offloads(args: Any) -> bool:
    """As Trainer finds it: in its own arguments, or where accelerate's launcher left it."""
    if args.fsdp_plugin_args is not None:
        return bool(args.fsdp_plugin_args.get("cpu_offload"))
    return parse_flag_from_env("ACCELERATE_USE_FSDP") and parse_flag_from_env("FSDP_OFFLOAD_PARAMS")


def apply(decision: Decision, run: Run) -> Decision:
    """Changes nothing: the optimizer is made when training starts. Records what leaves the card, or says who moves it.

    Raises:
        MissingDependencyError: torchao is asked for, and not installed or not usable here.
    """
    if decision.settings["by"] == "fsdp":
        return decision
    require("torchao.optim", "torchao", "--optim_ext cpu_offload")
    trained = sum(p.numel() * p.element_size() for p in run.model.parameters() if p.requires_grad)
    return decision.with_evidence(device_bytes_saved=2 * trained, host_bytes=4 * trained)


def offload_adamw(optimizer: AdamW) -> Any:
    """torchao's optimizer in place of one that has not stepped: same groups, same settings, fused AdamW on the host.

    Args:
        optimizer: on a CUDA device; its groups may differ in every setting.

    Returns:
        `CPUOffloadOptimizer`, with a group for each parameter; those below 4096 numbers stay on the card.
    """
    torchao = require("torchao.optim", "torchao", "--optim_ext cpu_offload")
    groups = [{name: group[name] for name in TAKEN_OVER} for group in optimizer.param_groups]
    offloaded = torchao.CPUOffloadOptimizer(groups, AdamW, offload_gradients=False, fused=True)
    if offloaded.d_opt is not None:
        # torchao 0.18 goes on scheduling the groups that loading a state dict, as Accelerate does, has replaced.
        offloaded.d_opt.register_load_state_dict_post_hook(
            lambda on_card: setattr(offloaded, "d_param_groups", on_card.param_groups)
        )
    return offloaded


@torch.no_grad()
def refresh_host_weights(optimizer: Any) -> None:
    """Copies the card's weights to the host again: steps start from the host's, and weights may have been loaded."""
    for on_device, on_host in optimizer.param_d2h_map.items():
        on_host.copy_(on_device)
