"""A plot as inline SVG: axes, lines, dots, hexagons and bars whose colours are the page's CSS variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

CHARACTER = 6.7  # mean width of one, in units of the drawing, at the page's 12.5 units
HEX_RADIUS = 6.0
HEX_LEVELS = 6

Values = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Scale:
    """One axis: its range, and whether steps are factors instead of differences."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, values: Values, *, log: bool = False, margin: float = 0.05) -> Scale:
        """The range of finite `values` (at least one) with a margin; equal values get one, too."""
        low, high = float(np.min(values)), float(np.max(values))
        if log:
            room = (high / low) ** margin if high > low else 2.0
            return cls(low / room, high * room, True)
        room = margin * (high - low) or max(abs(high) * 0.1, 0.5)
        return cls(low - room, high + room)

    def place(self, values: Values) -> np.ndarray:
        """Values to 0 (low) .. 1 (high)."""
        points = np.asarray(values, np.float64)
        if self.log:
            return np.log(points / self.low) / math.log(self.high / self.low)
        return (points - self.low) / (self.high - self.low)

    def ticks(self, count: int = 8) -> list[float]:
        """Round numbers inside the range: steps of 1, 2 or 5 times a power of ten."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            factors = (1,) if self.high / self.low > 1000 else (1, 2, 5)
            values = [factor * 10.0**power for power in powers for factor in factors]
            inside = [value for value in values if self.low <= value <= self.high]
            return inside if len(inside) > 1 else [self.low, self.high]
        size = 10.0 ** math.floor(math.log10((self.high - self.low) / count))
        step = size * next(factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (factor * size) <= count)
        return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def tick_text(value: float) -> str:
    """1,500; 0.25; 2e-05."""
    value = 0.0 if abs(value) < 1e-12 else value
    return f"{value:,.0f}" if abs(value) >= 1000 and value == round(value) else f"{value:.4g}"


class Plot:
    """Collects marks on two axes; `render` gives the SVG. A series is a number from 1: the page gives it a colour."""

    def __init__(
        self,
        x: Scale,
        y: Scale,
        x_label: str,
        y_label: str,
        *,
        height: int = 320,
        width: int = 460,
        y_names: Sequence[str] | None = None,
    ) -> None:
        self.x, self.y, self.labels = x, y, (x_label, y_label)
        self.width, self.height, self.y_names = width, height, y_names
        names = y_names if y_names is not None else [tick_text(value) for value in y.ticks()]
        self.left = 26 + CHARACTER * max((len(name) for name in names), default=0)
        self.marks: list[str] = []
        self.legend: list[tuple[str, str]] = []

    @property
    def _box(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the axes; the legend stands above them."""
        return self.left, 12 + 18 * len(self._legend_lines()), self.width - 12, self.height - 42

    def points(self, xs: Values, ys: Values) -> list[tuple[float, float]]:
        """Data to places in the drawing; points outside of the axes stand on their edge."""
        left, top, right, bottom = self._box
        across = left + (right - left) * np.clip(self.x.place(xs), 0, 1)
        down = bottom - (bottom - top) * np.clip(self.y.place(ys), 0, 1)
        return list(zip(across.tolist(), down.tolist()))

    def name(self, text: str, series: int, mark: str) -> None:
        """Puts a name into the legend, before anything is drawn. `mark`: line, dash, dot, diamond, ring or bar."""
        self.legend.append((text, _legend_mark(mark, series)))

    def line(self, xs: Values, ys: Values, series: int, kind: str = "line") -> None:
        """Straight pieces between points; `kind`: line, thin or dash."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in self.points(xs, ys))
        self.marks.append(f'<path class="{kind} s{series}" d="M{path}"/>')

    def dots(self, xs: Values, ys: Values, series: int, mark: str = "dot", size: float = 3.0) -> None:
        """One mark per point: dot, diamond, ring (open, larger) or faint (a dot that lets others through)."""
        self.marks += [_mark(mark, x, y, size, series) for x, y in self.points(xs, ys)]

    def spans(self, xs: Values, lows: Values, highs: Values, series: int) -> None:
        """A vertical bar from low to high at each x."""
        ends = zip(self.points(xs, lows), self.points(xs, highs))
        path = "".join(f"M{x:.1f} {low:.1f}V{high:.1f}" for (x, low), (_, high) in ends)
        self.marks.append(f'<path class="span s{series}" d="{path}"/>')

    def bars(self, edges: Values, heights: Values, series: int) -> None:
        """A histogram: `heights` [n] between `edges` [n + 1]."""
        tops = self.points(edges[:-1], heights)
        ends = self.points(edges[1:], np.zeros(len(heights)) + self.y.low)
        pieces = zip(tops, ends)
        path = "".join(f"M{x:.1f} {bottom:.1f}V{y:.1f}H{end:.1f}V{bottom:.1f}z" for (x, y), (end, bottom) in pieces)
        self.marks.append(f'<path class="bar s{series}" d="{path}"/>')

    def upright(self, x: float, text: str) -> None:
        """A vertical line through the axes with a word at its top."""
        _, top, right, bottom = self._box
        place = self.points([x], [self.y.low])[0][0]
        anchor = "end" if place > right - CHARACTER * len(text) - 8 else "start"
        shift = -4 if anchor == "end" else 4
        self.marks.append(f'<path class="rule" d="M{place:.1f} {top:.1f}V{bottom:.1f}"/>')
        self.marks.append(
            f'<text x="{place + shift:.1f}" y="{top + 10:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def hexagons(self, xs: Values, ys: Values, series: int) -> int:
        """Cells that are darker the more points they hold, in steps of equal ratio; returns the most in one cell."""
        centres, counts = _count_in_hexagons(np.array(self.points(xs, ys)))
        top = math.log(counts.max() + 1)
        levels = np.minimum((HEX_LEVELS * np.log(counts) / top).astype(int), HEX_LEVELS - 1)
        for level in sorted(set(levels.tolist())):
            path = "".join(f"M{x:.0f} {y:.0f}{_HEXAGON}" for x, y in centres[levels == level])
            opacity = round(0.22 + 0.78 * level / (HEX_LEVELS - 1), 2)
            self.marks.append(f'<path class="cell s{series}" opacity="{opacity}" d="{path}"/>')
        return int(counts.max())

    def render(self, alt: str) -> str:
        """The SVG; `alt` is what a reader hears who cannot see it."""
        left, top, right, bottom = self._box
        parts = [*self._axes(), *self.marks, f'<path class="axis" d="M{left:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}"/>']
        for number, line in enumerate(self._legend_lines()):
            x = left
            for text, mark in line:
                parts.append(f'<g transform="translate({x:.1f},{12 + 18 * number})">{mark}')
                parts.append(f'<text x="24" y="4">{escape(text)}</text></g>')
                x += _legend_width(text)
        inside = "".join(parts)
        return f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(alt)}">{inside}</svg>'

    def _axes(self) -> list[str]:
        left, top, right, bottom = self._box
        parts, previous = [], -math.inf
        for value in self.x.ticks():
            text, x = tick_text(value), self.points([value], [self.y.low])[0][0]
            parts.append(f'<path class="grid" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>')
            if x - CHARACTER * len(text) / 2 > previous + 6:
                parts.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{text}</text>')
                previous = x + CHARACTER * len(text) / 2
        names = self.y_names if self.y_names is not None else [tick_text(value) for value in self.y.ticks()]
        values = self.y.ticks() if self.y_names is None else list(range(len(names)))
        for value, text in zip(values, names):
            y = self.points([self.x.low], [value])[0][1]
            parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
            parts.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>')
        x_label, y_label = (escape(text) for text in self.labels)
        middle = (top + bottom) / 2
        parts.append(f'<text x="{(left + right) / 2:.1f}" y="{self.height - 8}" text-anchor="middle">{x_label}</text>')
        turned = f'transform="translate(13,{middle:.1f}) rotate(-90)"'
        return [*parts, f'<text {turned} text-anchor="middle">{y_label}</text>']

    def _legend_lines(self) -> list[list[tuple[str, str]]]:
        lines: list[list[tuple[str, str]]] = []
        room = 0.0
        for text, mark in self.legend:
            if not lines or _legend_width(text) > room:
                lines.append([])
                room = self.width - self.left
            lines[-1].append((text, mark))
            room -= _legend_width(text)
        return lines


def _legend_width(text: str) -> float:
    return 40 + CHARACTER * len(text)


def _legend_mark(mark: str, series: int) -> str:
    if mark in ("line", "thin", "dash"):
        return f'<path class="{mark} s{series}" d="M0 0H18"/>'
    if mark == "bar":
        return f'<path class="bar s{series}" d="M3 -5H15V5H3z"/>'
    line = f'<path class="line s{series}" d="M0 0H18"/>' if mark == "dot" else ""
    return line + _mark(mark, 9, 0, 3.5, series)


def _mark(mark: str, x: float, y: float, size: float, series: int) -> str:
    if mark == "diamond":
        edge = size * 1.5
        d = f"M{x:.1f} {y - edge:.1f}l{edge:.1f} {edge:.1f}l{-edge:.1f} {edge:.1f}l{-edge:.1f} {-edge:.1f}z"
        return f'<path class="dot s{series}" d="{d}"/>'
    radius = size * 2.2 if mark == "ring" else size
    return f'<circle class="{mark} s{series}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.3g}"/>'


def _count_in_hexagons(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centres (m, 2) and counts (m,) of the hexagons that hold `points` (n, 2), all in units of the drawing.

    A honeycomb is two rectangular grids, one shifted by half a cell; a point belongs to the nearer of its two centres.
    """
    size = np.array([math.sqrt(3) * HEX_RADIUS, 3 * HEX_RADIUS])
    first = np.round(points / size) * size
    second = (np.floor(points / size) + 0.5) * size
    nearer = ((points - first) ** 2).sum(1) <= ((points - second) ** 2).sum(1)
    centres, counts = np.unique(np.where(nearer[:, None], first, second).round(1), axis=0, return_counts=True)
    return centres, counts


_HALF = math.sqrt(3) / 2 * HEX_RADIUS
# Relative moves around a hexagon that stands on a corner, from its centre.
_HEXAGON = (
    f"m0 {-HEX_RADIUS:g}l{_HALF:.1f} {HEX_RADIUS / 2:g}v{HEX_RADIUS:g}l{-_HALF:.1f} {HEX_RADIUS / 2:g}"
    f"l{-_HALF:.1f} {-HEX_RADIUS / 2:g}v{-HEX_RADIUS:g}z"
)
