"""The ledger's forecast of a run that the doctor looks at: its model as the plan will leave it, on its longest rows."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..memory.forecast import MemoryModel, affinity_batch, masked_lm_batch
from ..memory.report import MemoryReport, report_run
from ..memory.stored import Base
from ..models.affinity import AffinityModel
from ..models.attention import KERNELS
from ..models.configuration import input_name
from ..models.encoders import build_encoder
from ..models.lora import wrap_with_lora
from ..models.packing import pack_encoders
from ..plan import Plan
from ..speedups.attention import set_attention
from ..speedups.base import optimizer_name
from ..speedups.fused_layers import fuse_gelu, label_only
from ..speedups.lora import lora_settings
from ..speedups.precision import best_precision
from .work import Work

logger = logging.getLogger(__name__)
UNKNOWN_LENGTH = 1024  # tokens of a row where no data is at hand


def predict_memory(
    args: Any, plan: Plan, work: Work, rows: int, capacity: int | None, cached: bool
) -> MemoryReport | str:
    """The report, or why there is none: then the formula of `sizes` is what the doctor has.

    Args:
        rows: of one pass on one device, of the longest.
        capacity: bytes of the device; None where not known.
        cached: whether frozen encoders' embeddings come from the cache.

    Cost: a tenth of a second for each switch that there is.
    """
    if cached and all(encoder.training == "frozen" for encoder in work.encoders):
        return "no encoder runs while training"
    if args.world_size > 1 and (args.fsdp or args.deepspeed):
        return "weights are split over processes"
    try:
        return _report(args, plan, work, rows, capacity, cached)
    except Exception as error:  # a model of any class, on tensors without values: it may do what they cannot
        logger.debug("no ledger", exc_info=True)
        return f"the model does not compute without values ({type(error).__name__})"


def _report(args: Any, plan: Plan, work: Work, rows: int, capacity: int | None, cached: bool) -> MemoryReport:
    lengths = _lengths(work)
    length = sum(lengths.values())
    model = _model(args, plan, work, cached)
    if isinstance(model, AffinityModel):
        live = {name: tokens for name, tokens in lengths.items() if not cached or name not in model.frozen_inputs}
        embedded = {name: width for name, width in model.embedding_sizes.items() if name not in live}
        make: Callable[[int], dict[str, Any]] = partial(affinity_batch, live, embedded)
    elif work.make_batch is not None:
        make = work.make_batch
    else:
        make = partial(masked_lm_batch, length, plan.applied("masked_lm_head"))
    kernel = plan["attention"].settings.get("kernel") if plan.applied("attention") else None
    batch = plan["batch_size"].settings if plan.applied("batch_size") else {}
    given = {
        "policy": _policy(args, plan),
        "base": _base(plan),
        "optimizer": optimizer_name(args),
        "passes": batch.get("gradient_accumulation_steps", args.gradient_accumulation_steps),
    }
    has_half = best_precision(plan.hardware) != "fp32"
    memory = MemoryModel(model.train(), make, change=partial(_change, plan, kernel), has_half=has_half)
    return report_run(memory, args, plan, rows, length, capacity, **given)


def _lengths(work: Work) -> dict[str, int]:
    """Input -> tokens of its longest row; of an encoder with several, its longest rows' tokens in equal parts."""
    specs = getattr(work.model.config, "tower_specs", None)
    if specs is None:
        longest = work.encoders[0].train.longest
        return dict.fromkeys([*work.columns][:1], longest or UNKNOWN_LENGTH)
    inputs = {input_name(columns): tower.encoder for tower in specs for columns in tower.inputs}
    shared = [*inputs.values()]
    return {
        name: max(1, work.encoders[index].train.longest // shared.count(index)) or UNKNOWN_LENGTH
        for name, index in inputs.items()
    }


def _model(args: Any, plan: Plan, work: Work, cached: bool) -> Any:
    """The run's model on the meta device, with the adapters and the frozen encoders that it will have."""
    model = copy.deepcopy(work.model)
    with torch.device("meta"):
        if isinstance(model, AffinityModel):
            for index, spec in enumerate(model.config.encoder_specs):
                if str(index) not in model.encoders and not cached:
                    encoder: Any = build_encoder(spec)
                    mode = plan["encoder_precision"].settings.get("mode")
                    model.encoders[str(index)] = encoder.to(torch.bfloat16) if mode == "weights" else encoder
        elif plan.applied("lora"):
            model = wrap_with_lora(model, lora_settings(args))
    return model


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


def _base(plan: Plan) -> Base:
    if plan.applied("quantized_base"):
        return "8-bit" if plan["quantized_base"].settings["bits"] == 8 else "4-bit"
    return "half" if plan.applied("lora_base") else "as it is"


def _policy(args: Any, plan: Plan) -> Any:
    if plan.applied("activation_checkpointing"):
        return plan["activation_checkpointing"].settings["policy"]
    if not (args.activation_checkpointing or args.gradient_checkpointing):
        return "none"
    every = (args.activation_checkpointing_kwargs or {}).get("every_n_layers", 1)
    return "half" if every == 2 else "full"
