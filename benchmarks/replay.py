"""What `hf-ext predict --rank` would have found: rounds of measurements replayed on sets whose labels are all known.

python benchmarks/replay.py DATA ENCODER WORK [--draws 3] [--rounds 3] [--only gb1] [--strategies random greedy ucb]

DATA has gb1.csv.gz, betalactamase.csv.gz and her2.csv.gz, ENCODER is a folder. A round begins with a random batch, the
same for all strategies; then a model with mixed heads is fitted on what is measured, every fifth row of it for
validation, and the next batch is chosen among all other rows: at random, by the prediction (greedy), by ucb (beta 1)
or by thompson. Hits are rows whose label is among the highest 1 % of the set, of her2, which is small, 5 %. Beside the
hits stand the calibration error of the standard deviations of all rows that are not measured, and the rank correlation
with the size of the errors. Embeddings are cached in WORK. `results/replay.json` is written after each draw; a second
call continues. One core takes about ten minutes for all, and some more for the embeddings.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset

from hf_ext import FastTrainer, FastTrainingArguments
from hf_ext.data import DataArguments
from hf_ext.evaluation import unpack_std
from hf_ext.finished import acquire, choose_batch
from hf_ext.heads import fit_ensemble, score_spread
from hf_ext.property import TASK, AffinityArguments, PredictArguments, build_collator
from hf_ext.property.building import build_model

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "replay.json"
# Columns of sequence and label, residues that are read, rows at most, rows of a round, share that are hits.
SETS = {
    "gb1": ("sequence", "target", 56, 5000, 96, 0.01),  # the domain itself; behind it all rows are the same
    "betalactamase": ("seq", "label", None, 2500, 96, 0.01),
    "her2": ("heavy", "pKd", None, 5000, 48, 0.05),
}
STRATEGIES = ("random", "greedy", "ucb", "thompson")
STEPS = ("learning_rate", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size")


def read_rows(folder: Path, name: str) -> Dataset:
    """Rows of a set in random order, always the same: distinct sequences, and the mean of their labels."""
    sequence, label, residues, most, *_ = SETS[name]
    table = pd.read_csv(folder / f"{name}.csv.gz").dropna(subset=[label])
    means = table.groupby(table[sequence].str[:residues])[label].mean()
    rows = pd.DataFrame({"sequence": means.index, "label": means.to_numpy()})
    return Dataset.from_pandas(rows.sample(frac=1, random_state=0).head(most), preserve_index=False)


def fit(rows: Dataset, measured: list[int], folders: argparse.Namespace, seed: int) -> FastTrainer:
    """A trainer whose model has mixed heads, fitted on the rows `measured`, as `hf-ext train` fits them."""
    order = np.random.default_rng(seed).permutation(measured)
    parts = {"validation": rows.select(order[::5]), "train": rows.select(np.delete(order, np.s_[::5]))}
    settings = {name: TASK.defaults[name] for name in STEPS}
    args = FastTrainingArguments(
        str(folders.work / "run"),
        speedups=["all"],
        embedding_cache_dir=str(folders.work / "cache"),
        weight_decay=TASK.defaults["weight_decay"],
        seed=seed,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    torch.manual_seed(seed)
    own = AffinityArguments(encoders=[str(folders.encoder)], head_sizes=[256, 64], head_dropout=0.1)
    model = build_model(own, ["sequence"])
    trainer = FastTrainer(model, args, build_collator(model, DataArguments()), train_dataset=parts["train"])
    trainer.fit_scaling()
    fit_ensemble(trainer, parts, None)
    return trainer


def replay(rows: Dataset, strategy: str, size: int, is_hit: np.ndarray, seed: int, folders: argparse.Namespace) -> Any:
    """Hits after each batch, the first, random one included, and how good the deviations were before each other."""
    first = np.random.default_rng(seed).permutation(len(rows))
    measured = first[:size].tolist()
    found = [int(is_hit[measured].sum())]
    spreads = []
    labels = np.array(rows["label"])
    for number in range(1, 1 + folders.rounds):
        if strategy == "random":
            measured = first[: size * (1 + number)].tolist()
        else:
            trainer = fit(rows, measured, folders, seed)
            rest = np.setdiff1d(np.arange(len(rows)), measured)
            output = trainer.predict(rows.select(rest), ignore_keys=[])
            trainer.end()
            means = np.asarray(output.predictions[0], np.float64)
            stds = unpack_std(output)
            facts = score_spread(stds, labels[rest] - means, rows.select(rest))
            spreads.append({name: facts[name] for name in ("calibration_error", "spearman", "std", "rmse")})
            own = PredictArguments(model="", rank=size, by=strategy, seed=seed * 100 + number)
            measured += rest[choose_batch(acquire(own, means, stds), size)].tolist()
        found.append(int(is_hit[measured].sum()))
    return {"hits": found, "spreads": spreads}


def main() -> None:
    """Replays what is asked for and not yet there, and writes the JSON after each draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "encoder", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--only", nargs="*", default=[*SETS])
    parser.add_argument("--strategies", nargs="*", default=[*STRATEGIES])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULT)
    folders = parser.parse_args()
    done = json.loads(folders.output.read_text())["runs"] if folders.output.exists() else []
    for seed in range(folders.draws):
        for name in folders.only:
            rows = read_rows(folders.data, name)
            *_, size, share = SETS[name]
            labels = np.array(rows["label"])
            threshold = float(np.quantile(labels, 1 - share))
            for strategy in folders.strategies:
                if any((one["data"], one["strategy"], one["seed"]) == (name, strategy, seed) for one in done):
                    continue
                began = time.process_time()
                found = replay(rows, strategy, size, labels >= threshold, seed, folders)
                facts = {"num_rows": len(rows), "batch": size, "threshold": threshold, "share": share}
                facts["num_hits"] = int((labels >= threshold).sum())
                about = {"data": name, "strategy": strategy, "seed": seed, "encoder": folders.encoder.name}
                done.append({**about, **facts, **found, "cpu_s": time.process_time() - began})
                folders.output.write_text(json.dumps({"runs": done}, indent=1) + "\n")
                print(name, strategy, seed, found["hits"], f"{done[-1]['cpu_s']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
