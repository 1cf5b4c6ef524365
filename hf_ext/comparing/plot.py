"""A comparison as one PNG: speed of each side with its interval and rounds, and smoothed training losses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..reporting.plots import BLUE, DPI, EVAL_COLOURS, GREY
from .measures import loss_curve, smooth
from .running import SideRun


def plot_comparison(result: dict[str, Any], runs: Sequence[SideRun], path: str | os.PathLike[str]) -> Path:
    """Draws the speeds of all sides to the left, loss curves of baselines and the optimized side to the right.

    Args:
        result: what `comparison.json` holds.
        runs: all runs, for rounds and curves.
        path: where the PNG goes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = max(3.5, 1.2 + 0.45 * len(result["sides"]))
    figure = Figure(figsize=(11, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
    main = [name for name, side in result["sides"].items() if side["role"] in ("baseline", "optimized")]
    colours = dict(zip([result["optimized"], *(n for n in main if n != result["optimized"])], (BLUE, *EVAL_COLOURS)))
    _draw_speeds(left, result, colours)
    _draw_losses(right, runs, colours)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, format="png")
    return target


def _draw_speeds(axes: Any, result: dict[str, Any], colours: dict[str, str]) -> None:
    names = list(result["sides"])
    for row, name in enumerate(names):
        rate = result["sides"][name]["rate"]
        colour = colours.get(name, GREY)
        axes.plot([rate["low"], rate["high"]], [row, row], color=colour, linewidth=3, solid_capstyle="butt")
        axes.plot([rate["smallest"], rate["largest"]], [row, row], "|", color=colour, markersize=12)
        axes.plot(rate["value"], row, "o", color=colour, markersize=7)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{result['unit']} per second (95 % interval; bars: slowest and fastest round)")
    axes.set_title("Speed", loc="left", fontweight="bold")


def _draw_losses(axes: Any, runs: Sequence[SideRun], colours: dict[str, str]) -> None:
    styles = dict(zip(colours, ("-", "--", ":", "-.", (0, (1, 3)), (0, (5, 5)))))  # told apart without colour too
    for run in runs:
        curve = loss_curve(run) if run.side.name in colours and not run.error else {}
        if curve:
            name = run.side.name
            steps = sorted(curve)
            losses = smooth([curve[step] for step in steps])
            label = name if run.round == 0 else None
            order = 3 if run.side.role == "baseline" else 2  # broken lines over the whole one, which would hide them
            look = {"color": colours[name], "linestyle": styles[name], "linewidth": 1.4, "zorder": order}
            axes.plot(steps, losses, label=label, **look)
    axes.set(xlabel="step", ylabel="training loss, smoothed")
    axes.set_title("Loss of every round", loc="left", fontweight="bold")
    if axes.lines:
        axes.legend(frameon=False)
