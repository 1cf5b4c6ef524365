"""Muon against AdamW: the loss after as many steps, over seeds and learning rates, and what a step costs.

Loss: recipes/mlm.py on its demo data (2 layers, 64 wide, 10 epochs), test split, both optimizers in turn for each seed
and rate. Time: the optimizer's step alone beside forward and backward, fp32, for the shape of ESM-2 8M, in turn; CPU
time of one thread, so that other work on the machine does not count.

OMP_NUM_THREADS=1 python benchmarks/muon_vs_adamw.py --output benchmarks/results/muon_vs_adamw_cpu.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_ext.hardware import detect_hardware
from hf_ext.masked_lm.arguments import MaskedLMArguments
from hf_ext.masked_lm.building import build_model
from hf_ext.models.muon import MuonAdamW, block_matrices

ROOT = Path(__file__).parents[1]
OPTIMIZERS = ("adamw", "muon")


def train(optimizer: str, rate: float, seed: int, epochs: int) -> dict[str, Any]:
    """One run of the recipe; the split and the order of rows are the seed's, for both optimizers the same."""
    from recipes import mlm

    with tempfile.TemporaryDirectory() as folder:
        command = ["--output_dir", folder, "--resume", "no", "--disable_tqdm", "true", "--save_strategy", "no"]
        command += ["--eval_strategy", "no", "--seed", str(seed), "--num_train_epochs", str(epochs)]
        command += ["--learning_rate", str(rate), *(["--speedups", "all", "muon"] if optimizer == "muon" else [])]
        results = mlm.main(command)
    run = {"optimizer": optimizer, "learning_rate": rate, "seed": seed}
    return {**run, "test_loss": results["test"]["model"]["token_loss"]}


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds, per rate, and Muon minus AdamW, paired by seed."""
    rows = []
    for rate in sorted({run["learning_rate"] for run in runs}):
        losses = {
            name: [r["test_loss"] for r in runs if (r["optimizer"], r["learning_rate"]) == (name, rate)]
            for name in OPTIMIZERS
        }
        pairs = [muon - adamw for adamw, muon in zip(losses["adamw"], losses["muon"])]
        row: dict[str, Any] = {"learning_rate": rate, "seeds": len(pairs), "muon_minus_adamw": pairs}
        for name, values in losses.items():
            spread = statistics.stdev(values) if len(values) > 1 else None
            row[name] = {"mean": statistics.mean(values), "standard_deviation": spread}
        rows.append(row)
    return rows


def time_step(size: str, rows: int, length: int, repeats: int) -> dict[str, Any]:
    """Median milliseconds, of CPU time, of forward and backward, and of each optimizer's step on the same gradients."""
    torch.manual_seed(0)
    model = build_model(MaskedLMArguments(model_size=size))
    ids = torch.randint(4, 24, (rows, length))
    trained = [p for p in model.parameters() if p.requires_grad]

    def pass_batch() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    adamw = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    muon = MuonAdamW(torch.optim.AdamW(trained, lr=1e-5, fused=True), block_matrices(model))
    actions: dict[str, Callable[[], Any]] = {"pass": pass_batch, "adamw": adamw.step, "muon": muon.step}
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats + 1):
        for name, action in actions.items():
            start = time.process_time()
            action()
            seconds[name].append(time.process_time() - start)
    medians = {f"{name}_ms": 1e3 * statistics.median(values[1:]) for name, values in seconds.items()}  # first: warm-up
    ratio = (medians["pass_ms"] + medians["muon_ms"]) / (medians["pass_ms"] + medians["adamw_ms"])
    return {"model_size": size, "rows": rows, "length": length, "repeats": repeats, **medians, "step_ratio": ratio}


def main() -> None:
    """Runs both parts and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    times = [time_step("esm2_8M", rows, 256, args.repeats) for rows in (2, 8, 16)]
    runs = [
        train(optimizer, rate, seed, args.epochs)
        for seed in range(args.seeds)
        for rate in args.rates
        for optimizer in OPTIMIZERS
    ]
    result = {
        "machine": detect_hardware(torch.device("cpu")).name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "epochs": args.epochs,
        "test_loss": summarize(runs),
        "step_time": times,
        "runs": runs,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({"test_loss": result["test_loss"], "step_time": times}, indent=2))


if __name__ == "__main__":
    main()
