"""A comparison as Markdown, and as a picture of speeds and losses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..reporting.charts import SERIES, SOFT, new_figure, plain_name, set_title, write_png
from ..reporting.tables import format_markdown_table
from ..reporting.units import NOT_MEASURED, rounded, seconds, share
from .measures import loss_curve, smooth
from .running import SideRun


def format_comparison(result: dict[str, Any]) -> str:
    """The whole report; sections that have nothing to say are left out."""
    lines = [f"# {result['optimized']} against {', '.join(result['against'])}", ""]
    lines += [
        f"{result['recipe']} on {result['baseline']['device']}, {result['rounds']} interleaved rounds in fresh "
        "processes. Values are medians over rounds, with 95 % intervals (rounds and steps drawn again); evaluation, "
        "saving, compilation and warm-up are in no rate."
    ]
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
    headers += ["peak GiB", "warm-up s", "embedding s", "whole run s", "sequences / step", result["metric"]]
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
            f"{side['sequences_per_step']:g}",
            _metric_text(side["metric"]),
        ]
        for name, side in result["sides"].items()
    ]
    return format_markdown_table(rows, headers)


def _pair_text(result: dict[str, Any], name: str, pair: dict[str, Any]) -> str:
    ratio, loss = pair["ratio"], pair["loss"]
    text = f"- **{result['optimized']} / {name}: {ratio['value']:.2f}x** [{ratio['low']:.2f}, {ratio['high']:.2f}] in "
    text += f"{result['unit']} per second (rounds {ratio['smallest']:.2f}-{ratio['largest']:.2f}). "
    if loss:
        text += f"Training loss, difference: final {loss['final']:+.4g}, mean {loss['mean']:+.4g}, largest between "
        text += f"smoothed curves {loss['largest_gap']:.4g}. "
    else:
        text += "Training loss: not compared, as no step was logged by both. "
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


def format_timeline(timeline: Mapping[str, Any], embedding_seconds: Mapping[str, float | None]) -> str:
    """A table of epochs by sides, and what its numbers rest on.

    Args:
        timeline: from `make_timeline`.
        embedding_seconds: by side, None where nothing was embedded before training.
    """
    sides, baseline = timeline["sides"], timeline["baseline"]
    headers = ["after epoch", baseline]
    for name in sides:
        if name != baseline:
            headers += [name, "saved" if len(sides) == 2 else f"saved by {name}"]
    rows = []
    for i, epoch in enumerate(timeline["epochs"]):
        row = [str(epoch), seconds(sides[baseline]["seconds"][i])]
        for name, side in sides.items():
            if name != baseline:
                row += [seconds(side["seconds"][i]), _signed(side["saved_seconds"][i])]
        rows.append(row)
    notes = [_basis(name, side, embedding_seconds.get(name)) for name, side in sides.items()]
    return "\n".join([format_markdown_table(rows, headers), "", *notes, "", "Evaluations and saves come on top."])


def _signed(value: float) -> str:
    return seconds(value) if value >= 0 else f"-{seconds(-value)}"


def _basis(name: str, side: Mapping[str, Any], embedding: float | None) -> str:
    text = f"- {name}: measured on {side['rows_measured']:,} rows, projected to epochs of {side['rows_per_epoch']:,}; "
    text += f"before the first step {seconds(side['one_off_seconds'])}"
    return text + (f", of these {seconds(embedding)} embedding once." if embedding else ".")


def plot_comparison(result: dict[str, Any], runs: Sequence[SideRun], path: str | os.PathLike[str]) -> Path:
    """Draws the speeds of all sides to the left, loss curves of baselines and the optimized side to the right.

    Args:
        result: what `comparison.json` holds.
        runs: all runs, for rounds and curves.
        path: where the PNG goes.
    """
    height = max(250, 90 + 32 * len(result["sides"]))
    speed = f"{result['unit']} per second (95 % interval; bars: slowest and fastest round)"
    figure, (left, right) = new_figure((speed, ""), ("step", "training loss, smoothed"), width=900, height=height)
    main = [name for name, side in result["sides"].items() if side["role"] in ("baseline", "optimized")]
    colours = dict(zip([result["optimized"], *(n for n in main if n != result["optimized"])], SERIES))
    _draw_speeds(left, result, colours)
    _draw_losses(right, runs, colours)
    return write_png(figure, path)


def _draw_speeds(axes: Any, result: dict[str, Any], colours: dict[str, str]) -> None:
    names = list(result["sides"])
    for row, name in enumerate(names):
        rate = result["sides"][name]["rate"]
        colour = colours.get(name, SOFT)
        axes.plot([rate["low"], rate["high"]], [row, row], color=colour, linewidth=3, solid_capstyle="butt")
        axes.plot([rate["smallest"], rate["largest"]], [row, row], "|", color=colour, markersize=12)
        axes.plot(rate["value"], row, "o", color=colour, markersize=7)
    axes.set_yticks(range(len(names)), map(plain_name, names), parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    set_title(axes, "Speed")


def _draw_losses(axes: Any, runs: Sequence[SideRun], colours: dict[str, str]) -> None:
    styles = dict(zip(colours, ("-", "--", ":", "-.", (0, (1, 3)), (0, (5, 5)))))  # told apart without colour too
    handles: dict[str, Any] = {}
    for run in runs:
        curve = loss_curve(run) if run.side.name in colours and not run.error else {}
        if curve:
            name = run.side.name
            steps = sorted(curve)
            losses = smooth([curve[step] for step in steps])
            order = 3 if run.side.role == "baseline" else 2  # broken lines over the whole one, which would hide them
            look = {"color": colours[name], "linestyle": styles[name], "linewidth": 1.4, "zorder": order}
            handles.setdefault(name, axes.plot(steps, losses, **look)[0])
    set_title(axes, "Loss of every round")
    if handles:
        for text in axes.legend([*handles.values()], map(plain_name, handles), frameon=False).get_texts():
            text.set_parse_math(False)
