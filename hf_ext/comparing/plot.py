"""A comparison as one PNG: speed of each side with its interval and rounds, and smoothed training losses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..reporting.charts.look import SERIES, SOFT, new_figure, plain_name, set_title, write_png
from .measures import loss_curve, smooth
from .running import SideRun


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
