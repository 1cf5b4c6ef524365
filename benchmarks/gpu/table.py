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
PARTS = ("tests", "parity", "compile", "memory", "processes", "bits")


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """Those that say something about a card: toys and sessions on a CPU do not."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu_session*.json"))]
    return [each for each in found if each["size"] == "full" and each["machine"]["kind"] != "cpu"]


def speed_table(folder: Path) -> str:
    """A row per card, model, way of training and side; medians, least and most over the rounds."""
    rows = [row for session in read_sessions(folder) for row in _speed_rows(session)]
    if not rows:
        rows = [["any card", f"{model}, {ways}", *[NOT_MEASURED] * 8] for model in MODELS for ways in WAYS]
    headers = ["card", "what", "side", "real tokens / s", "MFU", "peak, GiB", "rows at a time", "max_speed is", "loss"]
    return format_markdown_table(rows, [*headers, "roofline, eager to fused"])


def _speed_rows(session: dict[str, Any]) -> list[list[str]]:
    card, cases = session["machine"]["device"], (_result(session, "speed") or {}).get("cases", {})
    return [row for name, case in cases.items() for row in _case_rows(card, name, case)]


def _case_rows(card: str, name: str, case: dict[str, Any]) -> list[list[str]]:
    rows = [[card, name, "-", f"failed: {case['failed']}", *["-"] * 6]] if "failed" in case else []
    for side, found in case["sides"].items():
        if "tokens_per_s" not in found:
            rows.append([card, name, side, found.get("not_measured", NOT_MEASURED), *["-"] * 6])
            continue
        times = (case.get("times_as_fast") or {}).get(side)
        at_a_time = case["rows_per_step"] // found["passes_per_step"] if "passes_per_step" in found else "-"
        cells = [_spread(found["tokens_per_s"], ",.0f"), _spread(found.get("mfu"), ".1%")]
        cells += [_median(found.get("peak_memory_gib"), ".1f"), str(at_a_time), _spread(times, ".2f", "x")]
        rows.append([card, name, side, *cells, _median(found.get("loss"), ".4f"), _roofline(case)])
    return rows


def _roofline(case: dict[str, Any]) -> str:
    at = case.get("roofline", {}).get("at")
    return f"{at[0]['tokens_per_s']:,.0f} to {at[-1]['tokens_per_s']:,.0f}" if at else "-"


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
            found = SUMMARIES[name](entry["result"]) if entry.get("result") else "-"
            rows.append([session["machine"]["device"], name, entry["status"], found])
    rows = rows or [["any card", name, NOT_MEASURED, "-"] for name in PARTS]
    return format_markdown_table(rows, ["card", "part", "it", "what it found"])


def _result(session: dict[str, Any], name: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = session["parts"].get(name, {}).get("result")
    return found


def _tests(found: dict[str, Any]) -> str:
    failed = ", ".join(each["test"].rpartition("::")[2] for each in found.get("failed", []))
    return f"{found.get('passed', 0)} of {found['collected']} passed" + (f"; failed: {failed}" if failed else "")


def _parity(found: dict[str, Any]) -> str:
    rows = found.get("rows", [])
    wrong = [f"{row['kernel']} {row['dtype']}" for row in rows if row.get("problem") or "failed" in row]
    compared = [row for row in rows if "noise" in row]
    return f"{len(compared)} compared with float32; " + (f"wrong: {', '.join(wrong)}" if wrong else "none wrong")


def _compile(found: dict[str, Any]) -> str:
    times = next(iter((found.get("times_as_fast") or {}).values()), None)
    return f"compiled {_spread(times, '.2f', 'x')} as fast; {found.get('compile', '')}"


def _memory(found: dict[str, Any]) -> str:
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


def _processes(found: dict[str, Any]) -> str:
    runs, wrong = found.get("runs", []), found.get("wrong", [])
    left_out = "".join(f"; {what}: {why}" for what, why in found.get("not_run", {}).items())
    return f"{len(runs)} launches, {len(wrong)} wrong{' ' + ', '.join(wrong) if wrong else ''}{left_out}"


def _bits(found: dict[str, Any]) -> str:
    if "not_run" in found:
        return str(found["not_run"])
    states = ", ".join(f"{row['optimizer']} {row['loss']:.3f}" for row in found.get("states", []))
    bases = ", ".join(f"{row['bits'] or 'float'}: {row['weights_gib']:.2f}" for row in found.get("bases", []))
    return f"loss: {states}; base, GiB: {bases}"


SUMMARIES: dict[str, Callable[[dict[str, Any]], str]] = {
    "tests": _tests,
    "parity": _parity,
    "compile": _compile,
    "memory": _memory,
    "processes": _processes,
    "bits": _bits,
}
