"""The scale plan in 100 columns."""

from __future__ import annotations

from ..reporting.tables import format_table
from .page import wrap
from .scale_plan import ScalePlan, ScaleRow

HEADERS = ["GPUs", "strategy", "GiB each", "fits", "sent", "takes at least"]


def format_scale(scale: ScalePlan) -> str:
    """Table, what to take on each number of GPUs, and what the numbers rest on."""
    if not scale.rows:
        return "\n".join(["Scaling on paper:", *(f"  {line}" for line in scale.basis)])
    table = format_table([_cells(row) for row in scale.rows], HEADERS)
    lines = ["Scaling on paper, no measurement", *(f"  {line}" for line in table.splitlines())]
    lines += wrap(
        "GiB each: weights, gradients, AdamW states, activations of the longest rows. sent: GB by each GPU per "
        "optimizer step. takes at least: at the published bandwidth of the slowest link; part of it may hide behind "
        "compute."
    )
    for why in dict.fromkeys(row.why_not for row in scale.rows if row.why_not):
        what = ", ".join(f"{row.num_gpus} GPUs {row.strategy}" for row in scale.rows if row.why_not == why)
        lines += wrap(f"refused: {what}: {why}")
    for row in scale.rows:
        if row.fits and row.host_bytes:
            lines += wrap(f"{row.num_gpus} GPUs {row.strategy}: {row.host_bytes / 2**30:.0f} GiB of host memory")
    lines += [line for text in scale.basis for line in wrap(text)]
    lines.append("Take:")
    for num_gpus, taken in scale.taken.items():
        lines += wrap(f"{num_gpus}: {_advice(taken)}")
    return "\n".join(lines)


def _advice(taken: ScaleRow | None) -> str:
    if taken is None:
        return "nothing is known to fit: fewer rows per batch, --activation_checkpointing true, LoRA, or a larger card"
    return f"{taken.strategy}: accelerate launch --config_file {taken.launch}"


def _cells(row: ScaleRow) -> list[str]:
    fits = "?" if row.fits is None else "yes" if row.fits else "no"
    return [
        str(row.num_gpus),
        row.strategy,
        f"{row.device_bytes / 2**30:.2f}",
        fits,
        f"{row.sent_bytes / 1e9:.3g}" if row.sent_bytes else "-",
        f"{row.sending_s:.3g} s" if row.sending_s else "-",
    ]
