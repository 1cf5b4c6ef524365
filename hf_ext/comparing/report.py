"""A comparison as Markdown: a table of the sides or of phases, and a sentence for each baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..files import Facts, Json
from ..text import MISSING, NOT_MEASURED, format_markdown_table, rounded, seconds, share

MILESTONES = (1, 10, 25, 50)  # epochs after which a progression says hours
POOR_SCALING = 0.7  # of n times as fast on n times the processes


def format_comparison(result: Facts) -> str:
    """Formats the whole report; sections that have nothing to say are left out."""
    lines = [f"# {result['optimized']} against {', '.join(result['against'])}", ""]
    lines += [
        f"{result['recipe']} on {result['device']}, {result['rounds']} interleaved rounds in fresh processes. Values "
        "are medians over rounds (smallest to largest), ratios and differences means over rounds with 95 % intervals. "
        "Evaluation, saving, compilation and warm-up are in no rate."
    ]
    lines += ["One round only: nothing is known of how rounds vary."] if result["rounds"] == 1 else []
    lines += ["", _sides_table(result), "", *(_summarize_phases(result) if "phases" in result else ())]
    lines += [_pair_text(result, name, pair) for name, pair in result["against"].items()]
    if result["criteria"]:
        lines += ["", "## Criteria", "", *(f"- {criterion['line']}" for criterion in result["criteria"])]
    if result["ablation"]:
        lines += ["", "## Each speed-up, left out", "", *map(_ablation_text, result["ablation"])]
    return "\n".join(lines)


def _sides_table(result: Facts) -> str:
    """Formats a row for each side, and for each phase of a progression that was left out."""
    rows = {name: _side_cells(result, name, side) for name, side in result["sides"].items()}
    for phase in result.get("phases", ()):
        side = result["sides"].get(phase["name"], {})
        cells = rows.setdefault(phase["name"], {"side": phase["name"]})
        cells |= {"this phase": _interval_text(side.get("factor")), "so far": _interval_text(side.get("so_far"))}
        cells["claimed"] = "-".join(f"{one:g}" for one in phase["claimed"])
        cells["note"] = "; ".join(filter(None, [phase["note"], *side.get("newly_skipped", ())]))
    headers = [*rows[result["optimized"]]]
    return format_markdown_table([[cells.get(name, MISSING) for name in headers] for cells in rows.values()], headers)


def _side_cells(result: Facts, name: str, side: Facts) -> Json:
    named = "real residues" if result["unit"] == "residues" else result["unit"]
    epoch_s = side["epoch_seconds"]
    cells = {
        "side": f"{name}, {side['num_processes']} processes" if side["num_processes"] > 1 else name,
        f"{named} / s": _range_text(side["rate"], rounded),
        "peak GiB": f"{side['peak_memory_gib']:.3f}",
        "waiting for data": share(side["data_wait_share"]),
        "before step 1": seconds(side["one_off_seconds"]),
        "an epoch": MISSING if epoch_s is None else seconds(epoch_s),
        "whole run": seconds(side["wall_seconds"]),
        "sequences / step": f"{side['sequences_per_step']:g}",
        "final loss": _range_text(side["final_loss"]),
        result["metric"]: _range_text(side["metric"]),
    }
    if (price := result.get("dollars_per_hour")) is not None:
        cells["$ an epoch"] = MISSING if epoch_s is None else f"{epoch_s / 3600 * price:,.2f}"
        cells["$ a run"] = f"{side['wall_seconds'] / 3600 * price:,.2f}"
    return cells


def _summarize_phases(result: Facts) -> list[str]:
    """Returns the product of all phases beside that of the claims, and hours after some epochs."""
    ((base, pair),) = result["against"].items()
    ran = [phase["claimed"] for phase in result["phases"] if phase["claimed"] and phase["name"] in result["sides"]]
    sides = [result["sides"][name] for name in (base, result["optimized"])]
    rows = []
    for epochs in MILESTONES:
        before, after = (
            (side["one_off_seconds"] + epochs * (side["epoch_seconds"] or math.nan)) / 3600 for side in sides
        )
        rows.append([epochs, f"{before:.3g}", f"{after:.3g}", f"{before - after:.3g}"])
    claimed = f"{math.prod(one[0] for one in ran):.3g}x to {math.prod(one[-1] for one in ran):.3g}x"
    return [
        f"All that ran: {_interval_text(pair['ratio'])}, the product of each over the one before. What is claimed of "
        f"these, multiplied: {claimed if ran else MISSING}.",
        "\nHours with what comes before the first step, without evaluation and saving:\n",
        format_markdown_table(rows, ["epochs", "base, hours", "all phases, hours", "hours saved"]) + "\n",
    ]


def _pair_text(result: Facts, name: str, pair: Facts) -> str:
    text = f"- **{result['optimized']} / {name}: {_interval_text(pair['ratio'])}** in {result['unit']} per "
    text += f"second. Final training loss: {_interval_text(pair['loss'], '{:+.4g}')}. "
    text += f"{result['metric']}: by {_interval_text(pair['metric_drop'], '{:+.4g}')} worse (below 0: better). "
    text += _scaling_text(result, name, pair)
    if pair["same_sequences_per_step"]:
        return text + "Sequences per optimizer step are the same."
    counts = [result["sides"][side]["sequences_per_step"] for side in (result["optimized"], name)]
    return text + f"Sequences per optimizer step DIFFER ({counts[0]:g} against {counts[1]:g}): losses by step do too."


def _scaling_text(result: Facts, name: str, pair: Facts) -> str:
    """Says what to do where more processes bring little; the other side's run says that the model fits on fewer."""
    own, other = (result["sides"][side]["num_processes"] for side in (result["optimized"], name))
    scaling = pair["ratio"]["value"] * other / own
    if own <= other or scaling >= POOR_SCALING:
        return ""
    return (
        f"{own} processes are {scaling:.2f} of {own / other:g} times as fast, and {other} hold the model: take DDP "
        "(ddp.yaml), not FSDP2, and more rows or passes a step (--effective_batch_size). "
    )


def _ablation_text(row: Facts) -> str:
    measured = f"{_interval_text(row['ratio'])}, " if row["ratio"] else ""
    return f"- {row['speedup']}: {measured}{row['verdict']}"


def _interval_text(interval: Mapping[str, float] | None, form: str = "{:.2f}x") -> str:
    if interval is None:
        return NOT_MEASURED
    value, low, high = (form.format(interval[end]) for end in ("value", "low", "high"))
    if "inf" in high:
        return value
    return f"{value} [{low.rstrip('x')}, {high.rstrip('x')}]"


def _range_text(spread: Mapping[str, float] | None, show: Any = "{:.4g}".format) -> str:
    if spread is None:
        return NOT_MEASURED
    return f"{show(spread['value'])} ({show(spread['smallest'])} to {show(spread['largest'])})"
