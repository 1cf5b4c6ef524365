"""A comparison as Markdown."""

from __future__ import annotations

from typing import Any

from ..reporting.tables import format_markdown_table
from ..reporting.units import NOT_MEASURED, rounded, share
from .timeline import format_timeline


def format_comparison(result: dict[str, Any]) -> str:
    """The whole report; sections that have nothing to say are left out."""
    lines = [f"# {result['optimized']} against {', '.join(result['against'])}", ""]
    lines += [
        f"{result['recipe']} on {result['baseline']['device']}, {result['rounds']} interleaved rounds in fresh "
        "processes. Values are medians over rounds, with 95 % intervals (rounds and steps drawn again); evaluation, "
        "saving, compilation and warm-up are in no rate."
    ]
    if result["timed_by"] == "processor":
        lines.append("Rates are of processor time, without data workers; step times and the timeline are of the clock.")
    if result["rounds"] == 1:
        lines.append("One round only: the intervals hold variation between steps, none between runs.")
    lines += ["", _sides_table(result), ""]
    lines += [_pair_text(result, name, pair) for name, pair in result["against"].items()]
    if result.get("timeline"):
        embedding = {name: side["embedding_seconds"] for name, side in result["sides"].items()}
        lines += ["", "## Timeline", "", format_timeline(result["timeline"], embedding)]
    if result["criteria"]:
        lines += ["", "## Criteria", "", *(f"- {criterion['line']}" for criterion in result["criteria"])]
    if result["ablation"]:
        lines += ["", "## Each speed-up", "", *(f"- {_ablation_text(row)}" for row in result["ablation"])]
    return "\n".join(lines)


def _sides_table(result: dict[str, Any]) -> str:
    unit = result["unit"]
    named = "real residues" if unit == "residues" else unit
    headers = ["side", f"{named} / s", "padded tokens / s", "step ms [quartiles]", "waiting for data", "MFU"]
    headers += [
        "peak GiB",
        "warm-up s",
        "embedding s",
        "whole run s",
        "its CPU s",
        "stolen meanwhile",
        "sequences / step",
        result["metric"],
    ]
    rows = [
        [
            name,
            _interval_text(side["rate"]),
            rounded(side.get("padded_tokens_per_s")),
            "{median:.1f} [{q1:.1f}, {q3:.1f}]".format(**{k: 1000 * v for k, v in side["step_seconds"].items()}),
            share(side["data_wait_share"]),
            share(side.get("mfu")),
            f"{side['peak_memory_gib']:.3f}",
            f"{side['warmup_seconds']:.2f}",
            rounded(side["embedding_seconds"]),
            f"{side['wall_seconds']:.1f}",
            rounded(side["cpu_seconds"]),
            share(side["stolen_share"]),
            f"{side['sequences_per_step']:g}",
            _metric_text(side["metric"]),
        ]
        for name, side in result["sides"].items()
    ]
    if any("launch" in side for side in result["sides"].values()):
        headers += ["processes", "launched with"]
        launches = [[str(side["num_processes"]), side["launch"]] for side in result["sides"].values()]
        rows = [[*row, *launch] for row, launch in zip(rows, launches)]
    return format_markdown_table(rows, headers)


def _pair_text(result: dict[str, Any], name: str, pair: dict[str, Any]) -> str:
    ratio, loss = pair["ratio"], pair["loss"]
    text = f"- **{result['optimized']} / {name}: {ratio['value']:.2f}x** [{ratio['low']:.2f}, {ratio['high']:.2f}] in "
    text += f"{result['unit']} per second (rounds {ratio['smallest']:.2f}-{ratio['largest']:.2f}). "
    if loss:
        text += f"Training loss, difference: final {loss['final']:+.4g}, mean {loss['mean']:+.4g}, largest between "
        text += f"smoothed curves {loss['largest_gap']:.4g}. "
    else:
        text += "Training loss: not compared, as no step was logged by both or one trained on a sample. "
    worse = pair["metric_drop"]
    text += f"{result['metric']}: " + ("not measured. " if worse is None else f"worse by {worse:+.4g}. ")
    if pair["same_sequences_per_step"]:
        return text + "Sequences per optimizer step are the same."
    counts = [result["sides"][side]["sequences_per_step"] for side in (result["optimized"], name)]
    return text + f"Sequences per optimizer step DIFFER ({counts[0]:g} against {counts[1]:g}): losses by step do too."


def _ablation_text(row: dict[str, Any]) -> str:
    what = {"without": "leaving it out", "only": "alone"}[row["how"]]
    ratio = row["ratio"]
    measured = f"{ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}], " if ratio else ""
    return f"{row['speedup']} ({what}): {measured}{row['verdict']}"


def _interval_text(rate: dict[str, float]) -> str:
    return f"{rounded(rate['value'])} [{rounded(rate['low'])}, {rounded(rate['high'])}]"


def _metric_text(metric: dict[str, float] | None) -> str:
    if metric is None:
        return NOT_MEASURED
    return f"{metric['mean']:.4g} ({metric['smallest']:.4g}-{metric['largest']:.4g})"
