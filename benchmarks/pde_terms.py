"""What the auxiliary losses of the operator cost, with 2,048 and 1,024 queries, and in every 4th step instead of each.

Two parts. Pieces: training steps of one process and one thread, with and without the terms, for both numbers of
queries, interleaved; from them follows what a run with the terms in every n-th step should take. Runs: the recipe
itself, both ways, over seeds, by recipes/compare.py; what that measured stands beside the prediction.

python benchmarks/pde_terms.py --output benchmarks/results/pde_terms_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
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
from hf_ext.pde.collator import OperatorCollator
from hf_ext.pde.data import load_task
from hf_ext.pde.terms import AuxiliaryTerms

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {"resolution": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 8}
ROWS, EVERY, MANY, FEW = 8, 4, 2048, 1024
BEFORE = f"--inverse_loss_every 1 --physics_every 1 --num_queries {MANY}"
AFTER = f"--inverse_loss_every {EVERY} --physics_every {EVERY} --num_queries {FEW}"


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
    return plain + (due - plain) / every


def run_recipe(folder: Path, rounds: int, steps: int, rows: int) -> dict:
    """What recipes/compare.py measured of the recipe, before and after."""
    shape = [word for name, value in SHAPE.items() for word in (f"--{name}", str(value))]
    common = [*shape, "--num_train_samples", str(rows), "--num_eval_samples", "100", "--max_steps", str(steps)]
    common += ["--per_device_train_batch_size", str(ROWS), "--eval_strategy", "no", "--save_strategy", "no"]
    command = [sys.executable, str(ROOT / "recipes" / "compare.py"), "--recipe", str(ROOT / "recipes/pde_operator.py")]
    command += ["--output_dir", str(folder), "--rounds", str(rounds), "--metric", "test.scores.model.nrmse.value"]
    command += ["--baseline", "max_speed", "--baseline_args", BEFORE, "--optimized", "max_speed"]
    command += ["--optimized_args", AFTER, "--", *common, "--use_cpu", "true"]
    subprocess.run(command, check=True, cwd=folder.parent)
    return json.loads((folder / "comparison.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=400)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pieces = measure_pieces(args.rounds, str(Path(folder) / "data"))
        compared = run_recipe(Path(folder) / "comparison", args.seeds, args.steps, args.rows)
    before, after = predict(pieces, MANY, 1), predict(pieces, FEW, EVERY)
    terms = {
        queries: pieces[f"{queries} due"]["median"] - pieces[f"{queries} plain"]["median"] for queries in (MANY, FEW)
    }
    result = {
        "shape": {**SHAPE, "rows": ROWS},
        "pieces": pieces,
        "share_of_terms": terms[MANY] / before,
        "terms_cut": 1 - terms[FEW] / EVERY / terms[MANY],
        "predicted_speedup": before / after,
        "steps": args.steps,
        "train_rows": args.rows,
        "comparison": compared,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "comparison"}, indent=1))


if __name__ == "__main__":
    main()
