"""How charts look: colours, sizes, thresholds. Made of matplotlib's objects: no pyplot, nothing global changes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...files import replacing
from ..units import tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The page's variables in its light mode; series after Okabe and Ito, told apart with every common colour blindness.
PAPER, SOFT, EDGE = "#ffffff", "#545d68", "#d5dbe1"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#b0578d", "#8a6500", "#3a86b0")
VARIABLES = {PAPER: "paper", SOFT: "soft", EDGE: "edge", **{colour: f"c{i}" for i, colour in enumerate(SERIES, 1)}}
MAX_DOTS = 1500  # more rows are drawn as density: dots would hide each other, and the page would grow
LOG_RATIO = 30.0  # from here on an axis of losses is logarithmic
DPI = 170
FONT = 12  # points; the page shows its text as large
LEGEND_CHARACTERS = 62  # in a row


@dataclass(frozen=True)
class Chart:
    """A figure, what a reader hears who cannot see it, and a caption that says what to look for."""

    figure: Figure
    alt: str
    caption: str

    def svg(self) -> str:
        """For a page; see `to_svg`."""
        from .svg import to_svg

        return to_svg(self.figure, self.alt, VARIABLES)


def new_figure(*labels: tuple[str, str], height: float = 320, width: float = 460) -> tuple[Figure, list[Axes]]:
    """A figure of this size in points, and axes side by side: one for each pair of labels, across and up."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    for axes, (across, up) in zip(figure.subplots(1, len(labels), squeeze=False)[0], labels):
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(SOFT)
        axes.grid(color=EDGE, linewidth=0.7)
        axes.set_axisbelow(True)
        for axis, label in ((axes.xaxis, across), (axes.yaxis, up)):
            axis.set_major_formatter(tick)
            style_axis(axis, plain_name(label, 80))
    return figure, figure.axes


def style_axis(axis: Any, label: str) -> None:
    """Text in the page's colour and size, and no tick marks: there is a grid."""
    axis.set_label_text(label, color=SOFT, fontsize=FONT, parse_math=False)
    axis.set_tick_params(length=0, colors=SOFT, labelsize=FONT)


def set_title(axes: Axes, text: str) -> None:
    """Above the axes; in a file that stands alone, for in a page the caption says it."""
    axes.set_title(text, loc="left", color=SOFT, fontweight="bold", parse_math=False)


def set_log(axes: Axes, which: str, values: Any) -> None:
    """Makes axis "x" or "y" logarithmic around `values`, with ticks at 1, 2 and 5 times powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = 0.8 * np.min(values), 1.25 * np.max(values)
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 1000 else (1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(tick)


def set_range(axes: Axes, xs: Any, ys: Any, margin: float = 0.04) -> None:
    """Limits with room around all values; equal values get some, too."""
    for values, place in ((xs, axes.set_xlim), (ys, axes.set_ylim)):
        low, high = float(np.min(values)), float(np.max(values))
        room = margin * (high - low) or 0.5
        place(low - room, high + room)


def add_legend(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Above the axes, in as many columns as the names leave room for."""
    longest = max(map(len, names))
    columns = max(1, LEGEND_CHARACTERS // (longest + 6))
    look = {
        "frameon": False,
        "labelcolor": SOFT,
        "fontsize": FONT,
        "borderaxespad": 0.2,
        "handlelength": 1.8,
        "columnspacing": 1.2,
    }
    legend = figure.legend(handles, names, loc="outside upper left", ncols=columns, **look)
    for text in legend.get_texts():
        text.set_parse_math(False)


def plain_name(text: str, longest: int = 40) -> str:
    """A name of the user's on one line, cut where it would leave no room for the chart."""
    text = " ".join(str(text).split())
    return text if len(text) <= longest else f"{text[: longest - 2]}.."


def write_png(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes the figure; the folder is made. Returns `path`."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as draft:
        figure.savefig(draft, format="png", dpi=DPI)
    return target
