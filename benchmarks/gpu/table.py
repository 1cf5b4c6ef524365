"""Tables of the sessions in benchmarks/results: gpu_session*.json of full size, on a card."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_ext.reporting.tables import format_markdown_table
from hf_ext.reporting.units import NOT_MEASURED

WAYS = ("full", "lora", "frozen")
MODELS = ("ESM-2 650M", "ESMC-300M")
PARTS = ("tests", "memory", "processes")


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """Those that say something about a card: toys and sessions on a CPU do not."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu_session*.json"))]
    return [each for each in found if each["size"] == "full" and each["machine"]["kind"] != "cpu"]


def speed_table(folder: Path) -> str:
    """A row per card, model, way of training and side; medians, least and most over the rounds."""
    rows = [row for session in read_sessions(folder) for row in _speed_rows(session)]
    if not rows:
        rows = [["any card", f"{model}, {ways}", *[NOT_MEASURED] * 7] for model in MODELS for ways in WAYS]
    headers = ["card", "what", "side", "real tokens / s", "MFU", "peak, GiB", "rows at a time", "max_speed is", "loss"]
    return format_markdown_table(rows, headers)


def _speed_rows(session: dict[str, Any]) -> list[list[str]]:
    card, cases = session["machine"]["device"], (_result(session, "speed") or {}).get("cases", {})
    return [row for name, case in cases.items() for row in _case_rows(card, name, case)]


def _case_rows(card: str, name: str, case: dict[str, Any]) -> list[list[str]]:
    rows = [[card, name, "-", f"failed: {case['failed']}", *["-"] * 5]] if "failed" in case else []
    for side, found in case["sides"].items():
        if "tokens_per_s" not in found:
            rows.append([card, name, side, found.get("not_measured", NOT_MEASURED), *["-"] * 5])
            continue
        times = (case.get("times_as_fast") or {}).get(side)
        at_a_time = "-" if name.endswith("frozen") else case["rows_per_step"] // found["passes_per_step"]
        cells = [_spread(found["tokens_per_s"], ",.0f"), _spread(found.get("mfu"), ".1%")]
        cells += [_median(found.get("peak_memory_gib"), ".1f"), str(at_a_time), _spread(times, ".2f", "x")]
        rows.append([card, name, side, *cells, _median(found.get("loss"), ".4f")])
    return rows


def _spread(found: dict[str, float] | None, form: str, unit: str = "") -> str:
    if not found:
        return "-"
    return "{}{} [{}, {}]".format(
        format(found["median"], form), unit, *(format(found[name], form) for name in ("least", "most"))
    )


def _median(found: dict[str, float] | None, form: str) -> str:
    return format(found["median"], form) if found else "-"


def parts_table(folder: Path) -> str:
    """What the other parts of each session found, a row each; how a part ended that did not finish."""
    rows = []
    for session in read_sessions(folder):
        for name in PARTS:
            entry = session["parts"].get(name, {"status": NOT_MEASURED})
            found = SUMMARIES[name](entry) if entry["status"] != NOT_MEASURED else "-"
            rows.append([session["machine"]["device"], name, entry["status"], found])
    rows = rows or [["any card", name, NOT_MEASURED, "-"] for name in PARTS]
    return format_markdown_table(rows, ["card", "part", "it", "what it found"])


def _result(session: dict[str, Any], name: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = session["parts"].get(name, {}).get("result")
    return found


def _tests(entry: dict[str, Any]) -> str:
    return (entry.get("log_end") or "-").splitlines()[-1]


def _memory(entry: dict[str, Any]) -> str:
    found = entry["result"] or {}
    off = [row["predicted_over_measured"] - 1 for row in found.get("ledger", []) if "measured_gib" in row]
    text = (
        f"ledger off by {min(off):+.1%} to {max(off):+.1%} in {len(off)} cases" if off else "no case of the ledger fits"
    )
    failed = [row.get("case", "") for row in found.get("ledger", []) if "failed" in row]
    failed += [name for name in ("finder", "ladder") if "failed" in found.get(name, {})]
    text += f"; failed: {', '.join(failed)}" if failed else ""
    finder, ladder = found.get("finder", {}).get("found", {}), found.get("ladder", {})
    rungs = ", ".join(rung["rung"] for rung in ladder.get("rungs", [])) or "none"
    return f"{text}; finder: {finder.get('rows', '-')} rows; ladder: {rungs}"


def _processes(entry: dict[str, Any]) -> str:
    runs = (entry["result"] or {}).get("runs", [])
    wrong = [row["file"] for row in runs if "failed" in row or not row.get("passed", True)]
    return f"{len(runs)} launches, {len(wrong)} wrong{' ' + ', '.join(wrong) if wrong else ''}"


SUMMARIES: dict[str, Callable[[dict[str, Any]], str]] = {"tests": _tests, "memory": _memory, "processes": _processes}
