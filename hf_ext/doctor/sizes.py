"""Bytes: what a run holds on the device, and what it puts on disks. Upper bounds."""

from __future__ import annotations

from typing import Any

from ..checkpoints.retention import SMALL_FILES_BYTES, Sizes, needed_bytes, read_policy
from ..memory.stored import GRADIENT_BYTES, HALF_BYTES, OPTIMIZER_BYTES, WEIGHT_BYTES
from ..plan import Plan
from .estimates import Schedule
from .work import Encoder, Work

# Bytes that one layer keeps for backward per token and unit of width. The form is that of Korthikanti et al.
# (arXiv:2205.05198, section 4.1: 34 in half precision with fused attention). Hugging Face's ESM keeps 98 in float32 and
# 41 under autocast (counted with saved-tensor hooks on a CPU); CUDA's autocast also keeps norms in float32.
ACTIVATION_BYTES = {"fp32": 100.0, "half": 60.0}
SCORE_BYTES = 12.0  # per head, query and key, where attention is not fused
CHECKPOINTED_BYTES = 4.0  # per token and unit of width: the layer's input
BITS_BYTES = {8: 1.01, 4: 0.5625}  # codes and scales; of 8 bits a scale per output, of 4 one per 64 weights
EMBEDDING_BYTES = 4


def activation_bytes(encoder: Encoder, tokens: int, *, is_half: bool, checkpointed: int, fused: bool = True) -> int:
    """Upper bound of what backward needs of `tokens` tokens in one pass.

    Args:
        is_half: bf16 or fp16 autocast.
        checkpointed: where layers are computed again, how many tensors as large as its input each keeps; one layer's
            activations are kept beside them. 0: all are kept.
        fused: attention keeps no scores.
    """
    layer = tokens * encoder.width * ACTIVATION_BYTES["half" if is_half else "fp32"]
    if not fused:
        heads = int(encoder.config.get("num_attention_heads") or encoder.config["num_heads"])
        layer += tokens * heads * encoder.train.longest * SCORE_BYTES
    if checkpointed:
        return round(layer + encoder.num_layers * tokens * encoder.width * CHECKPOINTED_BYTES * checkpointed)
    return round(encoder.num_layers * layer)


def _base_bytes(plan: Plan) -> float | None:
    """Bytes of a frozen weight beside an adapter, where it is stored in less than float32."""
    if plan.applied("quantized_base"):
        return BITS_BYTES[plan["quantized_base"].settings["bits"]]
    return HALF_BYTES if plan.applied("lora_base") else None


def estimate_memory(args: Any, plan: Plan, work: Work, batch_rows: float) -> tuple[list[tuple[str, int]], int, int]:
    """Bytes while training: (what, bytes), the sum that does not depend on the batch, and the sum on the device."""
    cached = plan.applied("embedding_cache")
    present = [encoder for encoder in work.encoders if not (cached and encoder.training == "frozen")]
    is_half = plan.applied("precision")
    base_bytes = _base_bytes(plan)
    weights, copied = work.head_parameters * WEIGHT_BYTES, work.num_trainable
    for encoder in present:
        stored_half = encoder.training == "frozen" and plan["encoder_precision"].settings.get("mode") == "weights"
        weights += encoder.num_parameters * (HALF_BYTES if stored_half else WEIGHT_BYTES)
        if base_bytes is not None:
            weights -= round(encoder.num_base * (WEIGHT_BYTES - base_bytes))
        else:  # autocast keeps a rounded copy for the gradients that pass through a frozen layer to the adapters before
            copied += encoder.num_base
    trainable = work.num_trainable
    lines = [
        ("weights", weights),
        ("gradients", trainable * GRADIENT_BYTES),
        (f"optimizer ({getattr(args.optim, 'value', args.optim)}, at most)", trainable * OPTIMIZER_BYTES),
    ]
    if plan.applied("cpu_offload"):
        lines[-1] = "optimizer (in host memory)", 0
    if is_half:
        lines.append(("half-precision copies", copied * HALF_BYTES))
    static = sum(num_bytes for _, num_bytes in lines)
    per_device = batch_rows / args.world_size
    checkpointed = _tensors_kept(args)
    activations = 0
    for encoder in present:
        if encoder.training != "frozen":
            tokens = args.max_tokens_per_batch or round(per_device * encoder.train.longest)
            kept = {"is_half": is_half, "checkpointed": checkpointed, "fused": args.attention != "eager"}
            activations += activation_bytes(encoder, tokens, **kept)
    if activations:
        lines.append(("activations of the longest rows (bound)", activations))
    step = static + activations
    tables = sum(e.num_distinct * e.width * EMBEDDING_BYTES for e in work.encoders if e not in present)
    if tables:
        lines.append(("embedding tables (host memory, where the device lacks it)", tables))
    return lines, static, step


def _tensors_kept(args: Any) -> int:
    """By each layer that is computed again; 0 for policies that keep more, whose bound is that of none."""
    if args.activation_checkpointing or args.gradient_checkpointing:
        return 1
    return {"full": 1, "attention": 2}.get(args.activation_policy or "none", 0)


def checkpoint_sizes(args: Any, work: Work) -> Sizes:
    """Bytes of one checkpoint: what trains, in float32, and its optimizer state."""
    optimizer = 0 if args.save_only_model else work.num_trainable * OPTIMIZER_BYTES
    return Sizes(work.num_trainable * WEIGHT_BYTES, optimizer, SMALL_FILES_BYTES)


def exported_bytes(work: Work, save_full: bool) -> int:
    """Bytes of the model that is saved at the end."""
    frozen = sum(encoder.num_parameters - encoder.num_trainable for encoder in work.encoders) if save_full else 0
    return (work.num_trainable + frozen) * WEIGHT_BYTES + SMALL_FILES_BYTES


def output_bytes(args: Any, work: Work, schedule: Schedule | None, save_full: bool) -> int:
    """Most that the output folder holds at one moment."""
    sizes, policy, other = checkpoint_sizes(args, work), read_policy(args), exported_bytes(work, save_full)
    saves = schedule.saves if schedule else 0
    if saves == 0:
        return other
    needed = needed_bytes(sizes, policy, other)
    kept = min(policy.limit, saves) + 1 if policy.limit and policy.limit > 0 else saves
    total = max(needed if saves > 1 else 0, kept * sizes.full_bytes + other)
    return min(total, policy.budget_bytes) if policy.budget_bytes else total
