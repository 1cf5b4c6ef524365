"""A matplotlib figure as inline SVG whose colours are the page's CSS variables.

A renderer of our own, because what matplotlib's writes cannot stand in a page as it is: fixed colours, references
(`url(#..)`, `<use>`) by ids that are not unique in a page with several figures, and 100 bytes for each dot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np
from matplotlib.backend_bases import RendererBase
from matplotlib.colors import to_hex
from matplotlib.path import Path as Outline

_COMMANDS = {Outline.LINETO: "l", Outline.CURVE3: "q", Outline.CURVE4: "c"}
_CIRCLE: Any = Outline.unit_circle().codes
_ANCHORS = {"left": ("start", 0.0), "center": ("middle", 0.5), "right": ("end", 1.0)}


def to_svg(figure: Any, alt: str, variables: Mapping[str, str]) -> str:
    """The SVG of a figure made by `new_figure`.

    No ids, no references, no script, no date: charts drawn alike give the same text, and many stand in one page.

    Args:
        figure: of 72 dots per inch.
        alt: what a reader hears who cannot see it.
        variables: colours as #rrggbb -> names of the page's CSS variables; others are written as they are. The page
            shows text in `--soft`.
    """
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    renderer = SvgRenderer(width, height, variables)
    figure.draw(renderer)
    name, inside = escape(alt), "".join(renderer.parts)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}"><title>{name}</title>{inside}</svg>'


class SvgRenderer(RendererBase):
    """Writes what matplotlib draws as elements, in units of points; clips nothing: figures keep inside their axes."""

    def __init__(self, width: float, height: float, variables: Mapping[str, str]) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._size, self._variables = (width, height), variables
        self._cells: dict[str, str] | None = None

    def get_canvas_width_height(self) -> tuple[float, float]:
        return self._size

    def open_group(self, s: str, gid: str | None = None) -> None:
        self._cells = {} if s == "PolyCollection" else None

    def close_group(self, s: str) -> None:
        if self._cells:
            self.parts += [f'<path d="{data}" style="{style}"/>' for style, data in self._cells.items()]
        self._cells = None

    def draw_path(self, gc: Any, path: Any, transform: Any, rgbFace: Any = None) -> None:
        style, data = self._style(gc, rgbFace), self._data(path, transform)
        if self._cells is not None:  # hexagons do not overlap, so all of one shade are one element
            self._cells[style] = self._cells.get(style, "") + data
        elif data and style:
            self.parts.append(f'<path d="{data}" style="{style}"/>')

    def draw_markers(
        self, gc: Any, marker_path: Any, marker_trans: Any, path: Any, trans: Any, rgbFace: Any = None
    ) -> None:
        points = trans.transform(path.vertices)
        points = points[np.isfinite(points).all(1)]
        if marker_path.codes is not None and np.array_equal(marker_path.codes, _CIRCLE):
            radius = marker_path.get_extents(marker_trans).width / 2
            marks = [f'<circle cx="{x:.1f}" cy="{self._size[1] - y:.1f}" r="{radius:.3g}"/>' for x, y in points]
        else:
            shapes = [self._data(marker_path, marker_trans.frozen().translate(x, y)) for x, y in points]
            marks = [f'<path d="{shape}"/>' for shape in shapes]
        self.parts.append(f'<g style="{self._style(gc, rgbFace)}">{"".join(marks)}</g>')

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: Any = False, mtext: Any = None
    ) -> None:
        """Anchored as its author aligned it: the page's font is not as wide as the one that matplotlib measured."""
        anchor, part = _ANCHORS[mtext.get_horizontalalignment() if mtext else "left"]
        across = part and part * self.get_text_width_height_descent(s, prop, False)[0]
        x += across * math.cos(math.radians(angle))
        y -= across * math.sin(math.radians(angle))
        turn = f' transform="rotate({-angle:g} {x:.1f} {y:.1f})"' if angle else ""
        colour = self._colour(gc.get_rgb())
        style = "" if colour == "var(--soft)" else f' style="fill:{colour}"'
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{at}{turn}{style}>{escape(s)}</text>')

    def _data(self, path: Any, transform: Any) -> str:
        """Path data with one decimal, relative but for where each piece begins."""
        pieces: list[str] = []
        here = np.zeros(2, int)
        for values, code in path.iter_segments(transform, simplify=False):
            points = np.rint(10 * np.asarray(values).reshape(-1, 2)).astype(int)
            points[:, 1] = round(10 * self._size[1]) - points[:, 1]
            if code == Outline.CLOSEPOLY:
                pieces.append("z")
                continue
            ends = points if code == Outline.MOVETO else points - here
            pieces.append(_COMMANDS.get(code, "M") + " ".join(f"{value / 10:g}" for value in ends.ravel()))
            here = points[-1]
        return "".join(pieces)

    def _style(self, gc: Any, face: Any) -> str:
        """CSS of what is painted; empty where that is nothing."""
        forced = gc.get_alpha() if gc.get_forced_alpha() else None
        ink, width = gc.get_rgb(), gc.get_linewidth()
        filled = face is not None and (len(face) < 4 or face[3] > 0)
        drawn = width > 0 and ink[3] > 0
        parts = [f"fill:{self._colour(face)}" if filled else "fill:none"]
        parts += [f"stroke:{self._colour(ink)};stroke-width:{width:.3g}"] if drawn else []
        opacity = forced if forced is not None else (face[3] if filled and len(face) == 4 else ink[3])
        parts += [f"opacity:{opacity:.2g}"] if opacity < 1 else []
        dashes = gc.get_dashes()[1]
        parts += [f"stroke-dasharray:{' '.join(f'{dash:.3g}' for dash in dashes)}"] if drawn and dashes else []
        return ";".join(parts) if filled or drawn else ""

    def _colour(self, rgb: Any) -> str:
        value = to_hex(rgb)
        return f"var(--{self._variables[value]})" if value in self._variables else value
