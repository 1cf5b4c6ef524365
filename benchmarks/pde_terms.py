"""What the auxiliary losses of the operator cost, with 2,048 and 1,024 queries, and in every 4th step instead of each.

Two parts. Pieces: training steps of one process and one thread, with and without the terms, for both numbers of
queries, interleaved; from them follows what a run with the terms in every n-th step should take. Runs: the recipe
itself in fresh processes, sides in turns, over seeds: CPU time of the training loop per step, and errors.

python benchmarks/pde_terms.py --output benchmarks/results/pde_terms_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from hf_ext.pde.arguments import OperatorArguments
from hf_ext.pde.building import build_model, build_rows
from hf_ext.pde.data import OperatorCollator, load_task
from hf_ext.pde.terms import AuxiliaryTerms

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {"resolution": 64, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4}
ROWS, EVERY, MANY, FEW = 8, 4, 2048, 1024
SIDES = {
    "in every step, 2,048 points": (1, MANY),
    "in every 4th step, 1,024 points": (EVERY, FEW),
    "in every 4th step, 2,048 points": (EVERY, MANY),
    "never, 1,024 points": (0, FEW),
}
METRICS = ("advection1d_nrmse", "darcy2d_nrmse", "nrmse")


def measure_pieces(rounds: int, cache_dir: str) -> dict[str, dict[str, float]]:
    """Seconds of a step, median and quartiles: {"2048 plain", "2048 due", "1024 plain", "1024 due"}."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    args = OperatorArguments(**SHAPE, num_queries=MANY)
    samples = {task: load_task(task, "train", ROWS, resolution=64, seed=0, cache_dir=cache_dir) for task in args.tasks}
    model = build_model(args, samples)
    (rows,) = build_rows({"train": samples}).values()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = {
        queries: OperatorCollator(args.tasks, 64 * 64, queries)([rows[i] for i in range(ROWS)])
        for queries in (MANY, FEW)
    }
    seconds: dict[str, list[float]] = {f"{q} {kind}": [] for q in batches for kind in ("plain", "due")}
    for turn in range(rounds + 1):
        for name, taken in seconds.items():
            queries, kind = name.split()
            every = int(kind == "due")
            model.terms = AuxiliaryTerms(inverse_every=every, physics_every=every)
            begin = time.perf_counter()
            model.train()(**batches[int(queries)]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if turn:  # the first warms up
                taken.append(time.perf_counter() - begin)
    return {name: _spread(taken) for name, taken in seconds.items()}


def _spread(values: list[float]) -> dict[str, float]:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(median), "low": float(low), "high": float(high), "n": len(values)}


def predict(pieces: dict[str, dict[str, float]], queries: int, every: int) -> float:
    """Seconds of a mean step."""
    plain, due = (pieces[f"{queries} {kind}"]["median"] for kind in ("plain", "due"))
    return plain + (due - plain) / every if every else plain


def run_recipe(folder: Path, seed: int, steps: int, rows: int, every: int, queries: int) -> dict:
    """CPU seconds of a step, start and scoring left out, and the errors on the test samples."""
    command = [
        sys.executable,
        str(ROOT / "recipes" / "pde_operator.py"),
        "--output_dir",
        str(folder),
        "--use_cpu",
        "true",
    ]
    command += [word for name, value in SHAPE.items() for word in (f"--{name}", str(value))]
    command += [
        "--num_train_samples",
        str(rows),
        "--num_eval_samples",
        "100",
        "--per_device_train_batch_size",
        str(ROWS),
    ]
    command += ["--num_queries", str(queries), "--inverse_loss_every", str(every), "--physics_every", str(every)]
    command += ["--eval_strategy", "no", "--save_strategy", "no", "--without", "precision", "--disable_tqdm", "true"]
    command += ["--seed", str(seed), "--data_cache_dir", str(folder.parent / "data")]
    seconds = []
    for number in (steps, 8):  # the second run is what is no training
        begin = resource.getrusage(resource.RUSAGE_CHILDREN)
        extra = ["--max_steps", str(number), "--output_dir", str(folder / str(number))]
        subprocess.run([*command, *extra], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(now.ru_utime + now.ru_stime - begin.ru_utime - begin.ru_stime)
    scores = json.loads((folder / str(steps) / "all_results.json").read_text())["test"]["scores"]["model"]
    errors = {metric: scores[metric]["value"] for metric in METRICS}
    return {"cpu_s_per_step": (seconds[0] - seconds[1]) / (steps - 8), **errors}


def describe_side(name: str, runs: dict[str, list[dict]], pieces: dict[str, dict[str, float]]) -> dict:
    """Predicted and measured speed against the first side, and the errors of each seed."""
    first = next(iter(SIDES))
    ratios = [a["cpu_s_per_step"] / b["cpu_s_per_step"] for a, b in zip(runs[first], runs[name])]
    (every, queries), (base_every, base_queries) = SIDES[name], SIDES[first]
    return {
        "name": name,
        "predicted_speedup": predict(pieces, base_queries, base_every) / predict(pieces, queries, every),
        "speedup": None if name == first else dict(zip(("low", "median", "high"), np.quantile(ratios, [0, 0.5, 1]))),
        **{metric: [run[metric] for run in runs[name]] for metric in METRICS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--rows", type=int, default=500)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pieces = measure_pieces(args.rounds, str(Path(folder) / "data"))
        runs: dict[str, list[dict]] = {name: [] for name in SIDES}
        for seed in range(args.seeds):
            for number, (name, side) in enumerate(SIDES.items()):
                run = run_recipe(Path(folder) / f"{seed}-{number}", seed, args.steps, args.rows, *side)
                runs[name].append(run)
                print(seed, name, run, flush=True)
    terms = {q: pieces[f"{q} due"]["median"] - pieces[f"{q} plain"]["median"] for q in (MANY, FEW)}
    result = {
        "shape": {**SHAPE, "rows": ROWS, "steps": args.steps, "train_samples": args.rows},
        "pieces": pieces,
        "share_of_terms": terms[MANY] / pieces[f"{MANY} due"]["median"],
        "terms_cut": 1 - terms[FEW] / EVERY / terms[MANY],
        "sides": [describe_side(name, runs, pieces) for name in SIDES],
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
