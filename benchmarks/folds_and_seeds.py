"""What `--folds 5 --num_seeds 3` says of three data sets, one command each: how far folds and seeds differ.

python benchmarks/folds_and_seeds.py DATA ENCODER WORK [--only GB1 HER2] [--rows 400]

DATA has gb1.csv.gz (FLIP), her2.csv.gz (heavy, pKd) and secondary_structure.csv.gz; ENCODER is a folder or a Hub id.
Rows without a label are left out; of GB1 2,000 rows are drawn, of secondary structure 200, with five epochs. Runs go
to WORK, where a command that was killed goes on; the result is written to `results/folds_and_seeds.json` after each.
`--rows` draws so many of each, for a try, and writes to WORK instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from common import run_timed

RESULT = Path(__file__).resolve().parent / "results" / "folds_and_seeds.json"
# Data, its column of labels, how many rows are drawn, and words of the run.
SETS = {
    "HER2": ("her2.csv.gz", "pKd", None, "--sequence_columns heavy"),
    "GB1": ("gb1.csv.gz", "target", 2000, ""),
    "secondary structure": ("secondary_structure.csv.gz", "labels", 200, "--mask_column resolved --num_train_epochs 5"),
}
METRICS = ("spearman", "rmse", "accuracy", "mcc")
KEPT = ("value", "low", "high", "interval_by", "num_units")


def measure(name: str, folders: argparse.Namespace) -> dict[str, Any]:
    """Runs the command of one set; what it found, and what it cost."""
    file, label, most, words = SETS[name]
    rows = pd.read_csv(folders.data / file, dtype=str).dropna(subset=[label])
    if drawn := folders.rows or most:
        rows = rows.sample(drawn, random_state=0)
    table = folders.work / file.removesuffix(".gz")
    rows.to_csv(table, index=False)
    out = folders.work / name.replace(" ", "_")
    given = f"--folds 5 --num_seeds 3 --label_column {label} {words} --disable_tqdm true"
    given += f" --embedding_cache_dir {folders.work / 'cache'}"
    command = [sys.executable, "-m", "hf_ext", "train", "--dataset_name", str(table), "--encoders", folders.encoder]
    done, cpu_s, wall_s = run_timed([*command, "--output_dir", str(out), *given.split()])
    if done.returncode:
        raise SystemExit(f"{name}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    results = json.loads((out / "all_results.json").read_text())
    plans = [json.loads(path.read_text()) for path in sorted(out.glob("fold_*/seed_*/plan.json"))]
    caches = [one for plan in plans for one in plan["decisions"] if one["name"] == "embedding_cache"]
    scores = {
        who: {metric: {key: one.get(key) for key in KEPT} for metric, one in both.items() if metric in METRICS}
        for who, both in results["test"]["scores"].items()
    }
    return {
        "data": name,
        "rows": results["test"]["num_rows"],
        "encoded": [one["evidence"].get("num_encoded") for one in caches],
        "scores": scores,
        "verdict": results["verdict"]["text"],
        "repeats": results["repeats"],
        "cpu_s": cpu_s,
        "wall_s": wall_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "encoder", "work"):
        parser.add_argument(name, type=str if name == "encoder" else Path)
    parser.add_argument("--only", nargs="+", choices=SETS, default=[*SETS])
    parser.add_argument("--rows", type=int)
    folders = parser.parse_args()
    folders.work.mkdir(parents=True, exist_ok=True)
    result = folders.work / RESULT.name if folders.rows else RESULT
    found = json.loads(result.read_text())["sets"] if result.is_file() else {}
    for name in folders.only:
        found[name] = measure(name, folders)
        result.write_text(json.dumps({"sets": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
