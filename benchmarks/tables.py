"""Writes the tables of README.md from the JSON in benchmarks/results/; `--check` only says whether they are current.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from hf_ext.reporting.tables import format_markdown_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def embed_once() -> str:
    """The README's first result: one row per side of `benchmarks/embed_once.py`."""
    result = json.loads((RESULTS / "embed_once_omicron.json").read_text())
    slow, fast = result["slow"], result["fast"]
    floor = json.loads((RESULTS / "one_hot_ridge_omicron.json").read_text())["scores"]["spearman"]
    epochs = int(result["num_epochs"])
    rows = [
        [
            "every row through the encoders, one sequence at a time",
            f"{slow['epoch_seconds'] / 3600:.1f} h (scaled from {slow['num_rows']:,} rows)",
            f"{slow['whole_run_days']:.1f} days",
            "not measured",
        ],
        [
            f"embedded once, then batches of {slow['batch_size']}",
            f"{fast['epoch_at_loop_batch_seconds']:.0f} s ({result['epoch_speedup_at_loop_batch']:.0f}x)",
            "-",
            "-",
        ],
        [
            f"embedded once, then batches of {fast['batch_size']} (`max_speed`)",
            "-",
            f"{fast['whole_run_seconds'] / 60:.1f} min ({result['whole_run_speedup']:.0f}x)",
            _interval(fast["test"]["scores"]["model"]["spearman"]),
        ],
        ["for comparison, no encoder: one-hot ridge per antibody", "-", "-", _interval(floor)],
    ]
    return format_markdown_table(rows, ["", "one epoch", f"{epochs} epochs, all included", "test Spearman [95 %]"])


def _interval(score: dict[str, Any]) -> str:
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


def compare() -> str:
    """One row per side of the comparison on two CPU cores, the optimized side last."""
    result = json.loads((RESULTS / "compare_mlm_8M_cpu.json").read_text())
    rows = []
    for name, side in result["sides"].items():
        if side["role"] not in ("baseline", "optimized"):
            continue
        pair = result["against"].get(name)
        ratio = "{value:.2f}x [{low:.2f}, {high:.2f}]".format(**pair["ratio"]) if pair else "-"
        loss = f"{pair['loss']['final']:+.4f}" if pair else "-"
        step = f"{1000 * side['step_seconds']['median']:,.0f}"
        rows.append([name, f"{side['rate']['value']:,.0f}", step, f"{side['peak_memory_gib']:.2f}", ratio, loss])
    for kind in ("full", "LoRA", "frozen, encoding only"):
        rows.append([f"one GPU, ESM-2 650M, {kind}", *["not measured"] * 5])
    headers = [
        "side",
        "real residues / s",
        "median step, ms",
        "peak memory, GiB",
        f"{result['optimized']} is",
        "its final loss",
    ]
    return format_markdown_table(rows, headers)


def scores() -> str:
    """Test scores of every data set under `benchmarks/results/<name>_seed<k>.json`, mean and spread over seeds."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("*_seed*.json")):
        sets.setdefault(path.stem.rpartition("_seed")[0], []).append(json.loads(path.read_text()))
    rows = []
    for name, runs in sets.items():
        cells = [_over_seeds(runs, predictor, metric) for predictor, metric in _COLUMNS]
        rows.append([name, str(len(runs)), f"{runs[0]['test']['num_rows']:,}", *cells])
    headers = ["data", "seeds", "test rows", *(f"{metric}, {predictor}" for predictor, metric in _COLUMNS)]
    return format_markdown_table(rows, headers)


_COLUMNS = [
    ("model", "spearman"),
    ("ridge on embeddings", "spearman"),
    ("model", "rmse"),
    ("ridge on embeddings", "rmse"),
    ("training mean", "rmse"),
]


def _is_frozen(run: dict[str, Any]) -> bool:
    return any(d["name"] == "embedding_cache" and d["status"] == "applied" for d in run["decisions"])


def _over_seeds(runs: list[dict[str, Any]], predictor: str, metric: str) -> str:
    if predictor == "ridge on embeddings" and not _is_frozen(runs[0]):
        return "-"  # embeddings of an encoder that trained are no baseline
    values = [run["test"]["scores"][predictor][metric]["value"] for run in runs]
    if len(values) < 2 or predictor != "model":
        return f"{values[0]:.3f}"
    return f"{mean(values):.3f} +- {stdev(values):.3f}"


TABLES: dict[str, Callable[[], str]] = {
    "compare": compare,
    "embed_once": embed_once,
    "scores": scores,
}


def render(text: str) -> str:
    """`text` with every table block filled from its JSON."""
    return _BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]]()}\n{block[3]}", text)


def main() -> None:
    """Rewrites README.md, or exits with 1 if `--check` finds it out of date."""
    path = ROOT / "README.md"
    text = path.read_text()
    if "--check" in sys.argv:
        sys.exit(0 if render(text) == text else f"{path} is not what benchmarks/tables.py writes: run it.")
    path.write_text(render(text))


if __name__ == "__main__":
    main()
