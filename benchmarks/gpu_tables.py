"""Tables of the sessions in benchmarks/results: gpu_session*.json of full size, on a card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_ext.text import NOT_MEASURED, format_markdown_table

SPEED = {
    "full_esm2": "ESM-2 650M, full",
    "lora_esm2": "ESM-2 650M, LoRA",
    "full_esmc": "ESM C 300M, full",
    "lora_esmc": "ESM C 300M, LoRA",
    "encoding": "frozen, encoding only",
}
OTHERS = ("tests", "attention", "memory", "processes")


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """Those that say something about a card: toys and sessions on a CPU do not."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu_session*.json"))]
    return [each for each in found if each["size"] == "full" and each["machine"]["kind"] != "cpu"]


def speed_table(folder: Path) -> str:
    """A row per card, model, way of training and side; how a part ended that has no numbers."""
    rows = [row for session in read_sessions(folder) for name in SPEED for row in _speed_rows(session, name)]
    rows = rows or [["any card", what, *[NOT_MEASURED] * 5] for what in SPEED.values()]
    headers = ["card", "what", "side", "real tokens or residues / s", "peak, GiB", "max_speed is", "final loss"]
    return format_markdown_table(rows, headers)


def _speed_rows(session: dict[str, Any], name: str) -> list[list[str]]:
    card, part = session["machine"]["device"], session["parts"].get(name, {"status": NOT_MEASURED, "result": None})
    if not part["result"]:
        return [[card, SPEED[name], "-", part["status"], "-", "-", "-"]]
    if name == "encoding":
        return [row for model, found in part["result"].items() for row in _encoding_rows(card, model, found)]
    rows = []
    for side, found in part["result"]["sides"].items():
        ratio = part["result"]["times_as_fast"].get(side)
        numbers = [
            "{value:,.0f} [{smallest:,.0f}, {largest:,.0f}]".format(**found["rate"]),
            f"{found['peak_memory_gib']:.1f}",
        ]
        times = f"{ratio['value']:.2f}x" if ratio else "-"
        if ratio and ratio["high"] is not None:  # of one round there is no interval
            times += " [{low:.2f}, {high:.2f}]".format(**ratio)
        rows.append([card, SPEED[name], side, *numbers, times, f"{found['final_loss']['value']:.4f}"])
    return rows


def _encoding_rows(card: str, model: str, found: dict[str, Any]) -> list[list[str]]:
    rows = []
    for side, rate in found["tokens_per_s"].items():
        numbers = ["{1:,.0f} [{0:,.0f}, {2:,.0f}]".format(*rate), f"{found['peak_memory_gib'][side]:.1f}"]
        times = "{1:.2f}x [{0:.2f}, {2:.2f}]".format(*found["times_as_fast"]) if side == "stock" else "-"
        rows.append([card, f"{model}, frozen", side, *numbers, times, "-"])
    return rows


def parts_table(folder: Path) -> str:
    """What the other parts of each session found, a row each; how a part ended that did not finish."""
    rows = []
    for session in read_sessions(folder):
        for name in OTHERS:
            part = session["parts"].get(name, {"status": NOT_MEASURED, "result": None})
            rows.append([session["machine"]["device"], name, part["status"], _summary(name, part, session["versions"])])
    rows = rows or [["any card", name, NOT_MEASURED, "-"] for name in OTHERS]
    return format_markdown_table(rows, ["card", "part", "it", "what it found"])


def _summary(name: str, part: dict[str, Any], versions: dict[str, str | None]) -> str:
    if name == "tests":
        without = "" if versions["flash-attn"] else f"; flash-attn was not installed: faesm's kernel {NOT_MEASURED}"
        return (part.get("log_end") or ["-"])[-1] + without
    if name == "attention":
        return "; ".join(map(_kernel_row, (part["result"] or {}).items())) or "-"
    rows = (part["result"] or {}).get("rows", [])
    if name == "processes":
        wrong = [row["file"] for row in rows if not row["passed"]]
        return f"{len(rows)} launches, {len(wrong)} wrong {', '.join(wrong)}".strip()
    off = [row["predicted_by_allocations"] - 1 for row in rows if "predicted_by_allocations" in row]
    return f"ledger off by {min(off):+.1%} to {max(off):+.1%} in {len(off)} of {len(rows)} cases" if off else "-"


def _kernel_row(found: tuple[str, dict[str, Any]]) -> str:
    """A kernel beside that of `auto`, encoding ESM-2 650M."""
    name, measured = found
    if "problem" in measured:
        return f"{name}: {measured['problem']}"
    best, other = measured["kernels"]
    times = "{1:.2f}x [{0:.2f}, {2:.2f}]".format(*measured["times_as_fast"])
    return f"{other} is {times} as fast as {best}"
