"""The scale plan in 100 columns."""

from __future__ import annotations

from ..reporting.tables import format_table
from .page import format_span, wrap
from .scale_plan import ScalePlan, ScaleRow

HEADERS = ["GPUs", "strategy", "GiB each", "fits", "sent", "alone", "overlapped", "run"]


def format_scale(scale: ScalePlan, dollars_per_hour: float | None) -> str:
    """Table, what to take on each number of GPUs, and what the numbers rest on."""
    if not scale.rows:
        return "\n".join(["Scaling on paper:", *(f"  {line}" for line in scale.basis)])
    priced = [*HEADERS, "dollars"] if dollars_per_hour is not None else HEADERS
    table = format_table([_cells(row)[: len(priced)] for row in scale.rows], priced)
    lines = ["Scaling on paper, no measurement", *(f"  {line}" for line in table.splitlines())]
    lines += wrap(
        "GiB each: weights, gradients, AdamW states, activations of the longest rows. sent: GB by each GPU per "
        "optimizer step. alone, overlapped: efficiency if communication waits for compute, and if it hides behind it."
    )
    for why in dict.fromkeys(row.why_not for row in scale.rows if row.why_not):
        what = ", ".join(f"{row.num_gpus} GPUs {row.strategy}" for row in scale.rows if row.why_not == why)
        lines += wrap(f"not estimated: {what}: {why}")
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
        _percent(row.without_overlap if row.num_gpus > 1 else None),
        _percent(row.with_overlap if row.num_gpus > 1 else None),
        format_span(row.seconds) if row.seconds else "-",
        f"{row.dollars[0]:.2f} to {row.dollars[1]:.2f}" if row.dollars else "-",
    ]


def _percent(span: tuple[float, float] | None) -> str:
    if span is None:
        return "-"
    return f"{100 * span[0]:.0f}-{100 * span[1]:.0f} %"
