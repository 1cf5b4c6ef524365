"""The pictures of docs/, drawn from benchmarks/results/; `tables.py` writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WIDTH, LABELS, BAR, GAP, TOP = 760, 300, 18, 8, 44
COLOURS = {"full": "#4c78c8", "lora": "#2a9d6f", "frozen": "#8b949e"}
# Text has enough contrast on white and on black; where the reader's system is dark, it is lighter.
STYLE = (
    "text{font:13px sans-serif;fill:#656d76}.title{font-weight:bold}"
    "@media(prefers-color-scheme:dark){text{fill:#9198a1}}"
)
GONE = ("nearest neighbours",)  # which these runs had fitted, and none fits any more
CASES = {  # of the ledger -> as the picture calls them
    "full": "full fine-tuning, float32",
    "full, bf16": "bf16",
    "full, fused GELU": "fused GELU",
    "full, AdamW in 8 bits": "AdamW in 8 bits",
    "full, all together": "these three together, layers computed again",
    "LoRA": "LoRA, float32",
    "LoRA, bf16, half base": "bf16, frozen weights in it too",
    "frozen": "frozen, encoding only",
}


def memory_switches() -> str:
    """Peak memory of one training step of ESM-2 150M, counted, by what trains and which switches are on."""
    rows = {row["case"]: row for row in json.loads((RESULTS / "memory_ledger_cpu.json").read_text())["rows"]}
    settings = rows["full"]["settings"]
    bars = [
        (label, rows[case]["allocations"]["bytes"] / 2**30, COLOURS[rows[case]["settings"]["trains"]])
        for case, label in CASES.items()
    ]
    title = (
        f"ESM-2 {settings['size']}, {settings['rows']} x {settings['length']} tokens: "
        "most memory at once in a training step, GiB"
    )
    return bar_chart(title, bars)


def bar_chart(title: str, bars: list[tuple[str, float, str]]) -> str:
    """Horizontal bars as SVG without a background.

    Args:
        bars: (label, value above 0, colour) of each, from the top.
    """
    scale = (WIDTH - LABELS - 60) / max(value for _, value, _ in bars)
    height = TOP + len(bars) * (BAR + GAP)
    lines = _open_svg(title, height)
    for place, (label, value, colour) in enumerate(bars):
        y, length = TOP + place * (BAR + GAP), max(1, round(value * scale))
        lines += [
            f'<text x="{LABELS - 10}" y="{y + 14}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABELS}" y="{y}" width="{length}" height="{BAR}" fill="{colour}" rx="2"/>',
            f'<text x="{LABELS + length + 6}" y="{y + 14}">{value:.2f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


RECOMPUTED = {  # sides of activation_checkpointing_cpu.json -> as the picture calls them
    "none": "nothing again",
    "attention": "attention",
    "feed_forward": "feed-forward",
    "every 2nd": "every 2nd layer",
    "full": "all layers",
}


def recomputed() -> str:
    """Bytes against CPU time of a pass, both over those of one that keeps all; sides that were measured alone."""
    shape = ("650M, 4 layers", "padded")
    rows = json.loads((RESULTS / "activation_checkpointing_cpu.json").read_text())["rows"]
    sides = [row for row in rows if (row["model"], row["layout"]) == shape]
    left, bottom, height = 90, 250, 200
    per_time, per_byte = (WIDTH - left - 200) / 0.5, height / 1.1  # from 1.0 to 1.5 times, and to 1.1
    lines = [f'<path d="M{left} {TOP}V{bottom}H{WIDTH - 60}" stroke="#8b949e" fill="none"/>']
    lines += [
        f'<text x="{left - 8}" y="{bottom - share * per_byte + 4:.0f}" text-anchor="end">{share:.1f}</text>'
        for share in (0.0, 0.5, 1.0)
    ]
    lines += [
        f'<text x="{left + (time - 1) * per_time:.0f}" y="{bottom + 18}" text-anchor="middle">{time:.1f}</text>'
        for time in (1.0, 1.1, 1.2, 1.3, 1.4)
    ]
    for row in sides:
        time, share = row["cpu_over_none"][1], row["most_over_none"]
        x, y = round(left + (time - 1) * per_time), round(bottom - share * per_byte)
        lines += [
            f'<circle cx="{x}" cy="{y}" r="5" fill="{COLOURS["full"]}"/>',
            f'<text x="{x + 10}" y="{y + 4}">{RECOMPUTED[row["policy"]]}:</text>',
            f'<text x="{x + 130}" y="{y + 4}">{share:.2f}</text>',
            f'<text x="{x + 170}" y="{y + 4}">{time:.2f}</text>',
        ]
    title = f"ESM-2 {shape[0]}: most bytes at once (up) against CPU time (right), of a training pass that keeps all"
    return "\n".join([*_open_svg(title, bottom + 30), *lines, "</svg>", ""])


def verdicts() -> str:
    """RMSE of two runs without settings beside their baselines, one better than all and one that is not."""
    runs = json.loads((RESULTS / "default_runs.json").read_text())["runs"]
    groups = []
    for data in ("gb1", "her2"):
        run = next(run for run in runs if run["data"] == data and run["asked"] == "auto")
        title = f"{data}: {run['verdict']['text'].partition(':')[0].lower()} ({run['sizes']['test']:,} test rows)"
        kept = {name: scores["rmse"] for name, scores in run["scores"].items() if name not in GONE}
        groups.append((title, kept))
    return interval_chart("RMSE on the test rows, with 95 % intervals (lower is better)", groups)


def interval_chart(title: str, groups: list[tuple[str, dict[str, Any]]]) -> str:
    """A dot and its interval per predictor, in groups with a title each, as SVG without a background.

    Args:
        groups: (title, {name: {"value", "low", "high"}}) of each, from the top.
    """
    scale = (WIDTH - LABELS - 60) / max(score["high"] for _, scores in groups for score in scores.values())
    y, lines = TOP, []
    for heading, scores in groups:
        lines.append(f'<text class="title" x="8" y="{y + 14}">{escape(heading)}</text>')
        y += BAR + GAP
        for name, score in scores.items():
            low, value, high = (round(LABELS + score[key] * scale) for key in ("low", "value", "high"))
            colour, middle = COLOURS["full" if name == "model" else "frozen"], y + BAR // 2
            lines += [
                f'<text x="{LABELS - 10}" y="{y + 14}" text-anchor="end">{escape(name)}</text>',
                f'<path d="M{low} {middle}H{high}" stroke="{colour}" stroke-width="3"/>',
                f'<circle cx="{value}" cy="{middle}" r="5" fill="{colour}"/>',
                f'<text x="{high + 8}" y="{y + 14}">{score["value"]:.2f}</text>',
            ]
            y += BAR + GAP
        y += GAP
    return "\n".join([*_open_svg(title, y), *lines, "</svg>", ""])


STRATEGIES = {"random": "#8b949e", "greedy": "#4c78c8", "ucb": "#2a9d6f", "thompson": "#c2571a"}


def replayed() -> str:
    """Share of the hits that are found after each round, a panel per set and a line per strategy, means over draws."""
    runs = json.loads((RESULTS / "replay.json").read_text())["runs"]
    panels: dict[str, dict[str, list[float]]] = {run["data"]: {} for run in runs}
    for name, lines in panels.items():
        for strategy in STRATEGIES:
            several = [run for run in runs if (run["data"], run["strategy"]) == (name, strategy)]
            num_hits = sum(run["num_hits"] for run in several)
            if several:
                lines[strategy] = [sum(each) / num_hits for each in zip(*(run["hits"] for run in several))]
    title = "Share of the hits found, from a random start on, after each round of measurements"
    return line_chart(title, panels, STRATEGIES)


FEW = {"model": "default", "one-hot ridge": "one-hot", "ridge on embeddings": "embeddings"}
FEW_COLOURS = {"default": "#4c78c8", "one-hot": "#8b949e", "embeddings": "#c2571a", "likelihood": "#2a9d6f"}


def few_labelled() -> str:
    """Spearman at 32, 128 and 512 labels, a panel per set, means over draws; a constant prediction counts as 0."""
    runs = json.loads((RESULTS / "few_labels.json").read_text())["runs"]
    panels: dict[str, dict[str, list[float]]] = {run["data"]: {} for run in runs}
    for run in runs:
        names = {"model": "likelihood"} if run["side"] == "likelihood" else FEW
        for who in [who for who in names if who in run["scores"]]:
            panels[run["data"]].setdefault(names[who], [])
    for (name, lines), label in product(panels.items(), FEW_COLOURS):
        side = "likelihood" if label == "likelihood" else "default"
        who = {shown: name for name, shown in FEW.items()}.get(label, "model")
        found: dict[int, list[float]] = {}
        for run in runs:
            if (run["data"], run["side"]) == (name, side) and label in lines:
                found.setdefault(run["labels"], []).append(run["scores"][who]["spearman"] or 0.0)
        if found:
            lines[label] = [mean(found[number]) for number in sorted(found)]
    return line_chart("Spearman at 32, 128 and 512 labels (of her2 without 512)", panels, FEW_COLOURS)


def line_chart(title: str, panels: dict[str, dict[str, list[float]]], colours: dict[str, str]) -> str:
    """Panels side by side with a line each per name, from 0 to 1, as SVG without a background.

    Args:
        panels: {its title: {name: values, from the left}}.
        colours: of each name.
    """
    width, bottom, height = (WIDTH - 60) // len(panels), 230, 160
    lines = []
    for panel, (heading, values) in enumerate(panels.items()):
        left = 40 + panel * width
        lines.append(f'<path d="M{left} {bottom - height}V{bottom}H{left + width - 30}" stroke="#8b949e" fill="none"/>')
        lines.append(f'<text class="title" x="{left + 8}" y="{TOP + 14}">{escape(heading)}</text>')
        step = (width - 75) / (max(map(len, values.values())) - 1)
        ends = []
        for name, of_name in values.items():
            points = [f"{left + i * step:.0f},{bottom - share * height:.0f}" for i, share in enumerate(of_name)]
            drawn = f'stroke="{colours[name]}" stroke-width="3" fill="none"'
            lines.append(f'<polyline points="{" ".join(points)}" {drawn}/>')
            x = left + (len(of_name) - 1) * step + 6
            ends.append((bottom - of_name[-1] * height, f"{of_name[-1]:.2f}", colours[name], x))
        lowest = bottom + 14.0
        for y, number, colour, x in sorted(ends, reverse=True):  # numbers that would touch move up
            lowest = min(y + 4, lowest - 14)
            lines.append(f'<text x="{x:.0f}" y="{lowest:.0f}" style="fill:{colour}">{number}</text>')
    lines += [f'<text x="34" y="{bottom - s * height + 4:.0f}" text-anchor="end">{s:g}</text>' for s in (0, 0.5, 1)]
    for place, (name, colour) in enumerate(colours.items()):
        lines.append(f'<text x="{40 + 120 * place}" y="{bottom + 28}" style="fill:{colour}">{name}</text>')
    return "\n".join([*_open_svg(title, bottom + 40), *lines, "</svg>", ""])


def _open_svg(title: str, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f"<style>{STYLE}</style>",
        f"<title>{escape(title)}</title>",
        f'<text class="title" x="8" y="22">{escape(title)}</text>',
    ]


FIGURES: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "memory_switches.svg": memory_switches,
    ROOT / "docs" / "memory_recomputed.svg": recomputed,
    ROOT / "docs" / "verdict.svg": verdicts,
    ROOT / "docs" / "replay.svg": replayed,
    ROOT / "docs" / "few_labels.svg": few_labelled,
}
