"""What becomes of the optimizer that Trainer makes: Muon's matrices, the encoders' own rate, steps on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper, DummyOptim
from torch import nn
from torch.optim import AdamW, Optimizer
from transformers import TrainingArguments

from ..errors import ArgumentError
from ..models import (
    AffinityModel,
    AntibodyGenerator,
    MuonAdamW,
    block_matrices,
    find_host_optimizer,
    move_to_host,
    unwrap_peft,
)
from ..optional import require
from ..plan import Plan
from ..processes import offload_device, replaces_optimizer
from ..speedups import BITSANDBYTES, optimizer_name
from ..training_args import FastTrainingArguments


def finish_optimizer(
    optimizer: Optimizer, is_new: bool, args: FastTrainingArguments, model: nn.Module, plan: Plan
) -> Optimizer:
    """Returns the optimizer that plan and arguments stand for.

    The order matters: Muon takes whole groups apart by algorithm and copies a group's rate; encoders move to groups of
    their own among what that left, so that their matrices have their rate, too; what steps on the host is the whole of
    it. Checkpoints hold the groups in this order.

    Args:
        optimizer: as Trainer made it, or as it was: of the caller, of a run before, in Accelerate's wrapper.
        is_new: whether Trainer made it just now; one that is not keeps its groups.

    Raises:
        ArgumentError: the plan or the rate needs Trainer's AdamW, and the caller brought an optimizer; the caller's
            cannot step on the host; the model does not tell its encoder from its head, or has no encoder that trains.
    """
    offload = plan["cpu_offload"]
    if plan.applied("muon"):
        optimizer = _with_muon(optimizer, is_new, model)
    if is_new and args.encoder_learning_rate is not None:
        split_groups(optimizer, {id(p) for p in encoder_parameters(model)}, args.encoder_learning_rate)
    if offload.status == "applied" and offload.settings["by"] == "host":
        optimizer = move_to_host(optimizer)
    return optimizer


def require_optimizer(args: TrainingArguments) -> None:
    """Raises MissingDependencyError where `--optim` is one of bitsandbytes' and that does not work here."""
    name = optimizer_name(args)
    if name in BITSANDBYTES:
        require("bitsandbytes", "quantization", f"--optim {name}")


def _with_muon(optimizer: Optimizer, is_new: bool, model: nn.Module) -> Optimizer:
    """Moves matrices to Muon; AdamW keeps its groups and settings for the rest."""
    if not is_new and isinstance(_unwrap(optimizer), MuonAdamW):
        return optimizer
    if not is_new or not isinstance(optimizer, AdamW):
        raise ArgumentError(
            f"--speedups muon: the trainer was given an optimizer ({type(optimizer).__name__}). Leave one of "
            "them out; hf_ext.models.optimizers.MuonAdamW can be built and passed without the flag."
        )
    return MuonAdamW(optimizer, block_matrices(model))


def _unwrap(optimizer: Optimizer) -> Optimizer:
    """Returns what steps in the end: not Accelerate's wrapper, nor what has it step on the host."""
    on_host = find_host_optimizer(optimizer)
    return on_host.wrapped if on_host else getattr(optimizer, "optimizer", optimizer)


def encoder_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Lists parameters of the pretrained part: encoders of an `AffinityModel` or a generator, or under a task head."""
    inner = unwrap_peft(model)
    encoder: nn.Module
    if isinstance(inner, AffinityModel):
        encoder = inner.encoders
    elif isinstance(inner, AntibodyGenerator):
        encoder = inner.encoder if inner.config.architecture == "esm" else inner
    else:
        encoder = getattr(inner, "base_model", inner)
    training = [p for p in encoder.parameters() if p.requires_grad]
    if encoder is inner or not training:
        raise ArgumentError(
            f"--encoder_learning_rate: {type(inner).__name__} has no encoder that trains beside a head. Leave it out, "
            "or let encoders train (--use_peft, --tower_training full)."
        )
    return training


def split_groups(optimizer: Optimizer, chosen: set[int], rate: float) -> None:
    """Moves the parameters whose `id` is in `chosen` to groups with learning rate `rate`; state must be empty.

    Every group keeps its other settings.
    """
    for group in list(optimizer.param_groups):
        moved = [p for p in group["params"] if id(p) in chosen]
        group["params"] = [p for p in group["params"] if id(p) not in chosen]
        if moved:
            optimizer.add_param_group({**group, "params": moved, "lr": rate})
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]


def check_given(args: TrainingArguments, optimizers: Iterable[Any]) -> None:
    """Raises ArgumentError for an optimizer or schedule that is no name, under DeepSpeed."""
    if args.deepspeed_plugin is not None and any(given is not None for given in optimizers):
        raise ArgumentError(
            "Under DeepSpeed, Trainer drops the optimizers it is given and makes its own: pass "
            "optimizer_cls_and_kwargs, or name it with --optim."
        )


def check_optimizer(args: TrainingArguments, optimizer: Optimizer) -> None:
    """Raises ArgumentError for one that accelerate would silently replace: see `speedups/sharding.py`."""
    is_prepared = isinstance(optimizer, DeepSpeedOptimizerWrapper | DummyOptim)  # DeepSpeed made it, or will
    if replaces_optimizer(args) and type(optimizer) is not AdamW and not is_prepared:
        raise ArgumentError(
            f"ZeRO with its optimizer on the {offload_device(args)} would step DeepSpeed's CPU Adam, not the "
            f"{type(optimizer).__name__} of this trainer: give AdamW (--optim adamw_torch_fused), leave "
            "offload_optimizer_device out, or set zero_force_ds_cpu_optimizer: false in a DeepSpeed JSON."
        )
