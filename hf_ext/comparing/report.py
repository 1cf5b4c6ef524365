"""A comparison as Markdown: a table of the sides, and a sentence for each baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..files import Facts
from ..text import MISSING, NOT_MEASURED, format_markdown_table, rounded, seconds, share


def format_comparison(result: Facts) -> str:
    """Formats the whole report; sections that have nothing to say are left out."""
    lines = [f"# {result['optimized']} against {', '.join(result['against'])}", ""]
    lines += [
        f"{result['recipe']} on {result['device']}, {result['rounds']} interleaved rounds in fresh processes. Values "
        "are medians over rounds (smallest to largest), ratios and differences means over rounds with 95 % intervals. "
        "Evaluation, saving, compilation and warm-up are in no rate."
    ]
    lines += ["One round only: nothing is known of how rounds vary."] if result["rounds"] == 1 else []
    lines += ["", _sides_table(result), ""]
    lines += [_pair_text(result, name, pair) for name, pair in result["against"].items()]
    if result["criteria"]:
        lines += ["", "## Criteria", "", *(f"- {criterion['line']}" for criterion in result["criteria"])]
    if result["ablation"]:
        lines += ["", "## Each speed-up, left out", "", *map(_ablation_text, result["ablation"])]
    return "\n".join(lines)


def _sides_table(result: Facts) -> str:
    named = "real residues" if result["unit"] == "residues" else result["unit"]
    headers = ["side", f"{named} / s", "peak GiB", "waiting for data", "before step 1", "an epoch", "whole run"]
    headers += ["sequences / step", "final loss", result["metric"]]
    rows = [
        [
            f"{name}, {side['num_processes']} processes" if side["num_processes"] > 1 else name,
            _range_text(side["rate"], rounded),
            f"{side['peak_memory_gib']:.3f}",
            share(side["data_wait_share"]),
            seconds(side["one_off_seconds"]),
            MISSING if side["epoch_seconds"] is None else seconds(side["epoch_seconds"]),
            seconds(side["wall_seconds"]),
            f"{side['sequences_per_step']:g}",
            _range_text(side["final_loss"]),
            _range_text(side["metric"]),
        ]
        for name, side in result["sides"].items()
    ]
    return format_markdown_table(rows, headers)


def _pair_text(result: Facts, name: str, pair: Facts) -> str:
    text = f"- **{result['optimized']} / {name}: {_interval_text(pair['ratio'], '{:.2f}x')}** in {result['unit']} per "
    text += f"second. Final training loss: {_interval_text(pair['loss'], '{:+.4g}')}. "
    text += f"{result['metric']}: by {_interval_text(pair['metric_drop'], '{:+.4g}')} worse (below 0: better). "
    if pair["same_sequences_per_step"]:
        return text + "Sequences per optimizer step are the same."
    counts = [result["sides"][side]["sequences_per_step"] for side in (result["optimized"], name)]
    return text + f"Sequences per optimizer step DIFFER ({counts[0]:g} against {counts[1]:g}): losses by step do too."


def _ablation_text(row: Facts) -> str:
    measured = f"{_interval_text(row['ratio'], '{:.2f}x')}, " if row["ratio"] else ""
    return f"- {row['speedup']}: {measured}{row['verdict']}"


def _interval_text(interval: Mapping[str, float] | None, form: str) -> str:
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
