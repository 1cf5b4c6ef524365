"""Bytes: what a training holds on the device, by the ledger, and what it puts on disks."""

from __future__ import annotations

from functools import partial

from torch import nn

from ..checkpoints.retention import SMALL_FILES_BYTES, Sizes, bound_sizes, needed_bytes, read_policy
from ..checkpoints.weights import export_bytes
from ..memory.forecast import MemoryModel, TrainConfig
from ..memory.report import MemoryReport, report_memory
from ..models.attention import KERNELS
from ..models.packing import pack_encoders
from ..plan import Plan
from ..speedups.attention import set_attention
from ..speedups.base import optimizer_name, recomputes
from ..speedups.fused_layers import fuse_gelu, label_only
from ..speedups.precision import best_precision
from ..tasks.sketch import Stage
from .estimates import Schedule

SPLIT = "not counted: weights are split over processes"


def predict_memory(stage: Stage, plan: Plan, rows: int, capacity: int | None) -> MemoryReport | str:
    """What a step takes on one device; or why that is not known.

    Args:
        rows: of one pass, of the longest.
        capacity: bytes of the device; None where not known.

    Cost: a tenth of a second for each switch that there is.
    """
    args = stage.args
    if args.world_size > 1 and (args.fsdp or args.deepspeed):
        return SPLIT
    model, make_batch = stage.as_trained(plan)
    kernel = plan["attention"].settings.get("kernel") if plan.applied("attention") else None
    batch = plan["batch_size"].settings if plan.applied("batch_size") else {}
    config = TrainConfig(
        max(1, args.max_tokens_per_batch // stage.longest) if plan.applied("token_budget") else rows,
        # Of every n-th layer, what all of them hold is the bound.
        recomputes=recomputes(args) and (args.activation_checkpointing_kwargs or {}).get("every_n_layers", 1) == 1,
        half=plan.applied("precision"),
        has_half_base=plan.applied("lora_base"),
        optimizer=optimizer_name(args),
        is_muon=plan.applied("muon"),
        on_host=plan.applied("cpu_offload"),
        passes=batch.get("gradient_accumulation_steps", args.gradient_accumulation_steps),
    )
    memory = MemoryModel(
        model.train(),
        make_batch,
        kind="cpu" if plan.hardware.kind == "cpu" else "cuda",
        change=partial(_change, plan, kernel),
        sends_gradients=args.world_size > 1,
        has_half=best_precision(plan.hardware) != "fp32",
    )
    return report_memory(memory, config, stage.longest, capacity)


def _change(plan: Plan, kernel: str | None, model: nn.Module) -> None:
    """What the plan will do to the model, in the order of its registry."""
    if plan.applied("fused_gelu"):
        fuse_gelu(model)
    if kernel is not None:
        # Of a padded batch ours would read the mask, which holds nothing here. One that goes block by block, on CPUs,
        # holds what one holds that pads.
        is_ours = plan.applied("packing") and kernel in KERNELS
        set_attention(model, {"blocked": "padded"}.get(kernel, kernel) if is_ours else "sdpa")
    if plan.applied("packing"):
        pack_encoders(model)
    if plan.applied("masked_lm_head"):
        label_only(model)


def predict_disk(stage: Stage, plan: Plan, schedule: Schedule | None) -> tuple[Sizes, int, int]:
    """Bounds of one checkpoint, of the model that is saved at the end, and of the output folder at its fullest."""
    model, _ = stage.as_trained(plan)
    checkpoint = bound_sizes(model, stage.args, SMALL_FILES_BYTES, plan.applied("muon"))
    policy = read_policy(stage.args)
    exported = export_bytes(model) + SMALL_FILES_BYTES
    saves = schedule.saves if schedule else 0
    if saves == 0:
        return checkpoint, exported, exported
    needed = needed_bytes(checkpoint, policy, exported)
    kept = min(policy.limit, saves) + 1 if policy.limit and policy.limit > 0 else saves
    total = max(needed if saves > 1 else 0, kept * checkpoint.full_bytes + exported)
    return checkpoint, exported, min(total, policy.budget_bytes) if policy.budget_bytes else total
