"""Tables of the sessions in benchmarks/results: gpu_session*.json of full size, on a card."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hf_ext.text import MISSING, NOT_MEASURED, format_markdown_table

SPEED = {
    "full_esm2": "ESM-2, full",
    "lora_esm2": "ESM-2, LoRA",
    "full_esmc": "ESM C 300M, full",
    "generator": "generator, Transformer",
    "encoding": "frozen, encoding only",
}
OTHERS = ("tests", "memory", "processes")
STOCK, OURS = "stock", "max_speed"
HEADERS = ["card", "what", "side", "rounds", "real residues or tokens / s", "MFU", "a step, s", "peak, GiB"]
HEADERS += ["of stock", "loss, or states"]


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """Those that say something about a card: toys and sessions on a CPU do not."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu_session*.json"))]
    return [each for each in found if each["size"] == "full" and each["machine"]["kind"] != "cpu"]


def read_part(session: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """What a part found, and in a line how it ended; `rounds` also of a file that has quartiles of three rounds."""
    part = session["parts"].get(name, {"status": NOT_MEASURED, "result": None})
    result = part["result"] or {}
    if result and "rounds" not in result and name == "encoding":
        rounds = {side: turns for one in result.items() for side, turns in _from_quartiles(*one).items()}
        off = {model: found["relative_difference"] for model, found in result.items()}
        result = {"rounds": rounds, "relative_difference": off}
    return result, f"{part['status']}: {part['reason']}" if part.get("reason") else part["status"]


def _from_quartiles(model: str, found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The three rounds of each side, from the smallest: inclusive quartiles of three are means with the one between."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    for side, rates in found["tokens_per_s"].items():
        peak = found["peak_memory_gib"][side] * 2**30
        of_stock = found["times_as_fast"] if side != STOCK else [1.0] * 3
        pairs = zip(_undo_quartiles(rates), _undo_quartiles(of_stock))
        rounds[f"{model}, {side}"] = [{"rate": rate, "peak_bytes": peak, "of_stock": ratio} for rate, ratio in pairs]
    return rounds


def _undo_quartiles(three: Sequence[float]) -> list[float]:
    low, middle, high = three
    return [2 * low - middle, middle, 2 * high - middle]


def speed_table(folder: Path) -> str:
    """A row per card, model, way of training and side; how a part or side ended that has no numbers."""
    rows = [row for session in read_sessions(folder) for name in SPEED for row in _speed_rows(session, name)]
    rows = rows or [["any card", what, *[NOT_MEASURED] * 8] for what in SPEED.values()]
    return format_markdown_table(rows, HEADERS)


def _speed_rows(session: dict[str, Any], name: str) -> list[list[str]]:
    result, ended = read_part(session, name)
    card, what = name_card(session), result.get("what", SPEED[name])
    rows = []
    for side, turns in result.get("rounds", {}).items():
        model, _, own = side.rpartition(", ") if name == "encoding" else (what, "", side)
        stock = result["rounds"].get(f"{model}, {STOCK}" if name == "encoding" else STOCK, [])
        ratios = [one.get("of_stock") or one["rate"] / other["rate"] for one, other in zip(turns, stock)]
        cells = [
            spread([one["rate"] for one in turns], "{:,.0f}"),
            spread([100 * one["mfu"] for one in turns if one.get("mfu")], "{:.1f}", " %"),
            spread([one["step_s"] for one in turns if one.get("step_s")], "{:.3f}"),
            f"{max(one['peak_bytes'] for one in turns) / 2**30:.1f}",
            MISSING if own == STOCK else spread(ratios, "{:.2f}", "x"),
            spread([one["loss"] for one in turns if one.get("loss") is not None], "{:.4f}"),
        ]
        off = result.get("relative_difference", {})
        if own == OURS and model in off:
            cells[-1] = f"states off by {off[model]:.2%}"
        rows.append([card, f"{model}, frozen" if name == "encoding" else what, own, str(len(turns)), *cells])
    for side, problem in result.get("problems", {}).items():
        rows.append([card, what, side, "0", problem, *[MISSING] * 5])
    if not rows or ended != "finished":
        rows.append([card, what, MISSING, MISSING, ended, *[MISSING] * 5])
    return rows


def name_card(session: dict[str, Any]) -> str:
    return f"{session['machine']['device']}, {session['commit']}"


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """The median, with the smallest and the largest where there are several."""
    if not values:
        return MISSING
    middle, low, high = (form.format(one) for one in (median(values), min(values), max(values)))
    return f"{middle}{unit}" + (f" [{low}, {high}]" if len(values) > 1 else "")


def parts_table(folder: Path) -> str:
    """What the other parts of each session found, a row each; how a part ended that did not finish."""
    rows = []
    for session in read_sessions(folder):
        for name in OTHERS:
            result, ended = read_part(session, name)
            log = session["parts"].get(name, {}).get("log_end") or [MISSING]
            found = _summarize(name, result, session["versions"]) or log[-1]
            rows.append([name_card(session), name, ended, found])
    rows = rows or [["any card", name, NOT_MEASURED, MISSING] for name in OTHERS]
    return format_markdown_table(rows, ["card", "part", "it", "what it found"])


def _summarize(name: str, result: dict[str, Any], versions: dict[str, str | None]) -> str:
    """In words; empty where a part found nothing."""
    said = [f"{side}: {problem}" for side, problem in result.get("problems", {}).items()]
    if name == "tests" and (tests := result.get("tests")):
        counts = Counter(outcome.partition(" ")[0] for outcome in tests.values())
        said.append(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
        said += [one.rpartition("/")[2] for one, outcome in tests.items() if outcome.startswith("failed")]
    for side, turns in result.get("rounds", {}).items():
        said.append(_summarize_turn(side, turns[-1]))
    if said and name == "tests" and not versions["flash-attn"]:
        said.append(f"flash-attn was not installed: it and faesm's kernel {NOT_MEASURED}")
    return "; ".join(said)


def _summarize_turn(side: str, turn: dict[str, Any]) -> str:
    if "predicted_bytes" in turn:
        predicted, measured = (turn[f"{one}_bytes"] / 2**30 for one in ("predicted", "measured"))
        return f"{side}: {predicted:.2f} GiB predicted, {measured:.2f} allocated ({predicted / measured - 1:+.1%})"
    equal = "as one process" if turn["passed"] else "OTHER than one process"
    return f"{side}: {equal} (losses by {turn['loss_difference']:.0e}, weights by {turn['weight_difference']:.0e})"
