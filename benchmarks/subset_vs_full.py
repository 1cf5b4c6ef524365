"""Evaluations of 5 % of the rows against evaluations of all: does the interval hold the full score, and at what cost?

Coverage: heads on frozen embeddings, --num_seeds runs (each draws its own subset); in every evaluation the 95 %
interval of the subset's Spearman is compared with the Spearman of all validation rows. Cost: the same encoder with
LoRA, nothing cached; evaluations of the subset and of all rows alternate during training. Exits with 1 unless the
interval holds the full score in 90 % of the evaluations, in at most 10 % of the time.

OMP_NUM_THREADS=1 python benchmarks/subset_vs_full.py --table data/stability.csv.gz --encoder encoders/esm2_t6_8M \\
    --output benchmarks/results/subset_vs_full.json
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import spread
from datasets import Dataset
from transformers import TrainerCallback, set_seed

from hf_ext.affinity.arguments import AffinityArguments
from hf_ext.affinity.building import build_collator, build_model
from hf_ext.affinity.scoring import compute_metrics
from hf_ext.data.arguments import DataArguments
from hf_ext.evaluation import score_predictions
from hf_ext.models.encoders import LoraSettings
from hf_ext.trainer import FastTrainer
from hf_ext.training import evaluation
from hf_ext.training_args import FastTrainingArguments

LEAST_COVERAGE, MOST_TIME = 0.9, 0.1


class Coverage(TrainerCallback):
    """Per evaluation: step, score of the subset, its interval, score of all rows."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.seen: list[Any] = []
        self.rows: list[dict[str, float]] = []

    def compute_metrics(self, prediction: Any) -> dict[str, float]:
        """The task's own, noting what they are computed from."""
        self.seen.append(prediction)
        return compute_metrics(prediction)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Takes the interval as `score_predictions` gives it in reports."""
        subset = min(self.seen, key=lambda prediction: len(prediction.label_ids))  # the others are of all rows
        self.seen.clear()
        score = score_predictions(subset.predictions, subset.label_ids, seed=args.seed)["spearman"]
        full = metrics["eval_full_spearman"]
        seen = {"step": state.global_step, "subset": score["value"], "low": score["low"], "high": score["high"]}
        self.rows.append({**seen, "full": full, "holds": score["low"] <= full <= score["high"]})


class Alternate(TrainerCallback):
    """Evaluates the subset and all rows in turn, every few steps; the first pair is warm-up."""

    def __init__(self, every: int, num_pairs: int) -> None:
        self.trainer: Any = None
        self.every, self.num_pairs = every, num_pairs
        self.seconds: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Rows that are passed are looked at in full, in one pass."""
        if state.global_step % self.every or len(self.seconds) > self.num_pairs:
            return
        pair = {}
        for name, rows in (("subset", None), ("full", self.trainer.eval_dataset)):
            began = time.perf_counter()
            metrics = self.trainer.evaluate(rows)
            pair[name] = time.perf_counter() - began
            pair[f"{name}_rows_per_s"] = metrics["eval_samples_per_second"]
        self.seconds.append(pair)


def read_rows(path: Path, split: str, num: int, seed: int) -> Dataset:
    """`num` rows of a split, drawn at random: sequence and label."""
    with gzip.open(path, "rt", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == split]
    chosen = np.random.default_rng(seed).permutation(len(rows))[:num]
    return Dataset.from_list([{"sequence": rows[i]["sequence"], "label": float(rows[i]["label"])} for i in chosen])


def make_trainer(args: argparse.Namespace, folder: str, seed: int, training: str, callback: Any, **given: Any) -> Any:
    """A head on the encoder, frozen or with LoRA, on the benchmark's rows."""
    set_seed(seed)
    model_args = AffinityArguments(
        encoders=[str(args.encoder)], tower_inputs=["sequence"], tower_training=[training], head_sizes=[64]
    )
    model = build_model(model_args, ["sequence"], LoraSettings(r=8, alpha=16, dropout=0.0))
    fixed: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    settings = FastTrainingArguments(
        output_dir=folder,
        seed=seed,
        per_device_eval_batch_size=args.eval_batch_size,
        eval_subset=args.share,
        embedding_cache_dir=str(args.cache),
        logging_strategy="no",
        **{**fixed, **given},
    )
    trainer = FastTrainer(
        model,
        settings,
        build_collator(model, DataArguments(sequence_columns=["sequence"])),
        read_rows(args.table, "train", args.train_rows, 0),
        read_rows(args.table, args.split, args.eval_rows, 0),
        compute_metrics=getattr(callback, "compute_metrics", compute_metrics),
        callbacks=[callback],
    )
    callback.trainer = trainer
    return trainer


def measure_coverage(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """All evaluations of all seeds."""
    runs = []
    for seed in range(args.num_seeds):
        seen = Coverage()
        evaluation.FULL_EVERY = 1  # the subset is held against all rows each time
        given = {"num_train_epochs": args.epochs, "eval_strategy": "epoch"}
        given |= {"speedups": ["embedding_cache"], "per_device_train_batch_size": 32, "learning_rate": 3e-4}
        make_trainer(args, f"{folder}/seed{seed}", seed, "frozen", seen, **given).train()
        runs.append(seen.rows)
    rows = [row for run in runs for row in run]
    held = [row["holds"] for row in rows]
    return {
        "num_seeds": len(runs),
        "num_evaluations": len(rows),
        "num_held": sum(held),
        "share_held": sum(held) / len(held),
        "share_held_by_seed": [round(sum(r["holds"] for r in run) / len(run), 3) for run in runs],
        "num_seeds_held_at_the_end": sum(run[-1]["holds"] for run in runs),
        "median_interval_width": statistics.median(row["high"] - row["low"] for row in rows),
        "median_absolute_difference": statistics.median(abs(row["subset"] - row["full"]) for row in rows),
        "full_score": {
            "first": spread([run[0]["full"] for run in runs]),
            "last": spread([r[-1]["full"] for r in runs]),
        },
    }


def measure_time(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Seconds of alternating evaluations, real passes through the encoder."""
    pairs = Alternate(every=2, num_pairs=args.num_pairs)
    given = {"max_steps": 2 * (args.num_pairs + 1) + 1, "per_device_train_batch_size": 8, "eval_strategy": "no"}
    make_trainer(args, f"{folder}/time", 0, "lora", pairs, **given).train()
    measured = pairs.seconds[1:]
    ratios = [pair["subset"] / pair["full"] for pair in measured]
    return {
        "num_pairs": len(measured),
        "subset_s": spread([pair["subset"] for pair in measured]),
        "full_s": spread([pair["full"] for pair in measured]),
        "ratio": spread(ratios),
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True, help="CSV.gz with sequence, label and split.")
    parser.add_argument("--encoder", type=Path, required=True, help="Folder of the encoder.")
    parser.add_argument("--output", type=Path, required=True, help="Where the JSON goes.")
    parser.add_argument("--cache", type=Path, default=None, help="Where embeddings are kept; default: nowhere.")
    parser.add_argument("--split", default="valid", help="Split that is evaluated.")
    parser.add_argument("--train_rows", type=int, default=1500)
    parser.add_argument("--eval_rows", type=int, default=4000)
    parser.add_argument("--timed_rows", type=int, default=2000, help="Evaluation rows where time is measured.")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--num_seeds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--num_pairs", type=int, default=5)
    parser.add_argument("--eval_batch_size", type=int, default=64)
    return parser.parse_args()


def main() -> None:
    """Writes the JSON, prints it, and fails where one of the two aims is missed."""
    args = parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        args.cache = args.cache or Path(folder) / "cache"
        timed = measure_time(argparse.Namespace(**{**vars(args), "eval_rows": args.timed_rows}), folder)
        coverage = measure_coverage(args, folder)
    settings = {name: getattr(args, name) for name in vars(args) if name not in ("output", "table", "encoder", "cache")}
    names = {"table": args.table.name, "encoder": args.encoder.name, "metric": "spearman", "confidence": 0.95}
    report = {
        "settings": {**settings, **names},
        "seconds": round(time.perf_counter() - start, 1),
        "coverage": coverage,
        "time": timed,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    if coverage["share_held"] < LEAST_COVERAGE or timed["ratio"]["median"] > MOST_TIME:
        sys.exit(
            f"Aims: at least {LEAST_COVERAGE:.0%} of the intervals hold the score, at most {MOST_TIME:.0%} of the time."
        )


if __name__ == "__main__":
    main()
