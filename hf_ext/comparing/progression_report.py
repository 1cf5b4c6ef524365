"""A progression as Markdown: a row per phase, what is claimed beside what was measured."""

from __future__ import annotations

from typing import Any

from ..reporting.tables import format_markdown_table
from ..reporting.units import MISSING, NOT_MEASURED

KINDS = {"step": "steps by the clock", "cpu": "steps by CPU time", "loop": "the whole loop"}
OTHER = {"step": "by CPU time", "cpu": "by the clock"}  # the time that the phases are not judged by


def format_progression(result: dict[str, Any]) -> str:
    """The whole report."""
    lines = [f"# {result['progression']}", "", describe_runs(result)]
    if result["source"]:
        lines.append(f"Claimed: {result['source']}")
    lines += ["", phases_table(result), "", *(f"- {line}" for line in summarize(result))]
    if result["criteria"]:
        lines += ["", "## Criteria", "", *(f"- {criterion['line']}" for criterion in result["criteria"])]
    return "\n".join(lines)


def describe_runs(result: dict[str, Any]) -> str:
    """What was run, where and how often, and what the numbers are."""
    rounds = f"{result['rounds']} interleaved rounds" if result["rounds"] > 1 else "one round"
    text = (
        f"{result['recipe']} on {result['baseline']['device']}, {rounds} in fresh processes. Medians over rounds, with "
    )
    text += (
        "95 % intervals (rounds and steps drawn again). Evaluation, saving, compilation and the first steps are in the "
    )
    text += "loop, not in the steps."
    if result["timed_by"] == "cpu":
        text += " Steps are timed by the processor, as other programs shared the machine."
    if result["rounds"] == 1:
        text += " One round only: the intervals hold variation between steps, none between runs."
    return text


def phases_table(result: dict[str, Any]) -> str:
    """One row for the baseline, one per phase, and one for all that were measured."""
    base, sides, main = result["baseline"], result["sides"], result["timed_by"]
    other = "step" if main == "cpu" else "cpu"
    unknown = [MISSING] * 4
    measured = _measured(sides["baseline"], base["batch"], base["claimed_memory"], None)
    rows = [["baseline", MISSING, MISSING, MISSING, "1.00x", "1.00x", MISSING, *measured, ""]]
    for phase in result["phases"]:
        claimed = format_claim(phase["claimed"])
        if phase["why_not"]:
            memory = f"- / {phase['claimed_memory']:g}" if phase["claimed_memory"] else MISSING
            rows.append(
                [phase["name"], claimed, *unknown[:4], MISSING, MISSING, MISSING, memory, MISSING, MISSING, _why(phase)]
            )
            continue
        judged, alone = phase["judged_by"], phase["alone"]
        rows.append(
            [
                phase["name"],
                claimed,
                _interval(phase["speedup"][judged]) + (", of the loop" if judged == "loop" else ""),
                _times(phase["speedup"][other]),
                _interval(phase["cumulative"][main]),
                _times(phase["cumulative"]["loop"]),
                _interval(alone[judged]) if alone else MISSING,
                *_measured(sides[phase["name"]], phase["batch"], phase["claimed_memory"], phase["loss"]),
                _why(phase),
            ]
        )
    rows.append(_whole_row(result))
    headers = ["phase", "claimed", "this phase", OTHER[main], "so far", "loop, so far", "alone", "step / CPU, ms"]
    headers += ["rows per step", "peak GiB / claimed GB", "loss", result["metric"], "verdict"]
    return format_markdown_table(rows, headers)


def _measured(
    side: dict[str, Any], batch: list[int] | None, claimed_gb: float | None, loss: dict[str, float] | None
) -> list[str]:
    """Step, batch, memory, loss and metric of one side."""
    times = (side["step_seconds"]["median"], side["cpu_step_seconds"])
    rows = f"{side['sequences_per_step']:g}" + (f" = {' x '.join(map(str, batch))}" if batch else "")
    final = f"{side['final_loss']['mean']:.4g}" if side["final_loss"] else NOT_MEASURED
    return [
        " / ".join(MISSING if time is None else f"{1000 * time:,.0f}" for time in times),
        rows,
        f"{side['peak_memory_gib']:.2f} / {claimed_gb:g}" if claimed_gb else f"{side['peak_memory_gib']:.2f}",
        final + (f" ({loss['final']:+.2g})" if loss else ""),
        f"{side['metric']['mean']:.4g}" if side["metric"] else NOT_MEASURED,
    ]


def _whole_row(result: dict[str, Any]) -> list[str]:
    whole, main = result["whole"], result["timed_by"]
    product = whole["product_of_singles"]
    cells = [f"**{whole['phases']} phases together**", format_claim(whole["claimed"]), MISSING, MISSING]
    cells += [_interval(whole["speedup"][main]), _times(whole["speedup"]["loop"])]
    cells += [f"product {_times(product[main])}" if product else MISSING, *[MISSING] * 5]
    return [*cells, f"{OTHER[main]} {_times(whole['speedup']['step' if main == 'cpu' else 'cpu'])}"]


def _why(phase: dict[str, Any]) -> str:
    """The verdict, and all that makes a row another one than its name says."""
    if phase["why_not"]:
        why = phase["why_not"]
        return why if why.startswith("failed") else f"not measured: {why}"
    parts = [phase["verdict"], *phase["left_out_by_plan"]]
    if not phase["same_sequences_per_step"]:
        parts.append("other rows per step than the baseline")
    return "; ".join([*parts, *([phase["note"]] if phase["note"] else [])])


def summarize(result: dict[str, Any]) -> list[str]:
    """The whole beside the products of its parts, and what may not be compared."""
    whole = result["whole"]
    lines = []
    for kind, name in KINDS.items():
        product = whole["product_of_singles"]
        text = f"In {name}, all {whole['phases']} measured phases together: {_interval(whole['speedup'][kind])}"
        text += f"; the product of each alone on the baseline: {_interval(product[kind])}" if product else ""
        lines.append(text + ".")
    if whole["product_of_claims"]:
        text = f"Claimed: {format_claim(whole['claimed'])} in all; the product of the claims is "
        text += f"{format_claim(whole['product_of_claims'])}, of those measured here "
        lines.append(f"{text}{format_claim(whole['product_of_claims_measured_here'])}.")
    other = [row["name"] for row in result["phases"] if row.get("same_sequences_per_step") is False]
    if other:
        names = ", ".join(other)
        lines.append(f"NOT at the baseline's rows per optimizer step, so that losses by step differ: {names}.")
    else:
        lines.append("All phases take the same rows per optimizer step.")
    return lines


def format_claim(claim: list[float] | tuple[float, float] | None) -> str:
    """A claimed speed-up: 1.5x, 1.5-2x, or "-"."""
    if claim is None:
        return MISSING
    low, high = (f"{end:.3g}" for end in claim)
    return f"{low}x" if low == high else f"{low}-{high}x"


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _times(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f}x"
