"""What embedding once is worth: a loop that runs every row of every epoch through the encoders, one sequence at a time,
against `recipes/max_speed.py`. On one machine; the slow side on a sample of rows, before and after the fast one.

    python benchmarks/embed_once.py --output benchmarks/results/embed_once_omicron.json --config omicron.yaml

Other flags are the recipe's. It has a fresh cache, so that encoding is part of the fast side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import run_timed
from torch import nn
from transformers import set_seed

from hf_ext.arguments import parse_command
from hf_ext.data import DataArguments, SequenceCollator, load_data
from hf_ext.models import AffinityModel
from hf_ext.models.affinity import AffinityOutput
from hf_ext.property import TASK, AffinityArguments, build_collator
from hf_ext.property.building import build_model
from hf_ext.training_args import FastTrainingArguments

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "max_speed.py"
BATCH, PASSES = 12, 4  # rows of a pass, passes of an optimizer step of the loop


class RowByRow(nn.Module):
    """An `AffinityModel` that takes rows of text, and encodes each input of each row by itself."""

    def __init__(self, model: AffinityModel, collator: SequenceCollator):
        super().__init__()
        model.attach_encoders()
        self.model, self.collator = model, collator

    def forward(self, rows: list[dict[str, Any]]) -> AffinityOutput:
        """Loss and predictions of `rows`."""
        pooled = {name: torch.cat([self.embed(name, row) for row in rows]) for name in self.collator.columns}
        labels = torch.tensor([float(row["label"]) for row in rows])
        return self.model(embeddings=pooled, labels=labels, missing={})

    def embed(self, name: str, row: dict[str, Any]) -> torch.Tensor:
        """The pooled embedding of one input of one row: (1, width), float32."""
        batch = self.collator.encode_rows(name, [row])
        with torch.no_grad():
            return self.model.encode(name, dict(batch))


def time_loop(loop: RowByRow, rows: list[dict[str, Any]]) -> list[float]:
    """Seconds per row, one value per pass: each sequence encoded alone, then the head trained."""
    optimizer, seconds = torch.optim.AdamW(loop.model.head.parameters(), lr=1e-3), []
    for step, start in enumerate(range(0, len(rows), BATCH)):
        batch, began = rows[start : start + BATCH], time.perf_counter()
        (loop(batch).loss / PASSES).backward()
        if (step + 1) % PASSES == 0:
            optimizer.step()
            optimizer.zero_grad()
        seconds.append((time.perf_counter() - began) / len(batch))
    return seconds


def run_recipe(words: list[str], folder: Path, name: str, *more: str) -> tuple[dict[str, Any], float]:
    """Its results, and seconds from start to end."""
    places = ["--output_dir", str(folder / name), "--embedding_cache_dir", str(folder / "cache")]
    done, _, wall_s = run_timed([sys.executable, str(RECIPE), *words, *places, *more])
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads((folder / name / "all_results.json").read_text()), wall_s


def run_fast(words: list[str], folder: Path) -> dict[str, Any]:
    """The whole run at max_speed's batch, then one epoch at the loop's batch from the filled cache."""
    results, whole_s = run_recipe(words, folder, "run")
    batch = f"--per_device_train_batch_size {BATCH} --gradient_accumulation_steps {PASSES} --num_train_epochs 1"
    rest = "--eval_strategy no --save_strategy no --load_best_model_at_end false"
    again, _ = run_recipe(words, folder, "epoch", *batch.split(), *rest.split())
    return {
        "whole_run_seconds": whole_s,
        "epoch_at_loop_batch_seconds": again["train"]["train_runtime"],
        "batch_size": results["settings"]["per_device_train_batch_size"],
        "test": results["test"],
    }


def main() -> None:
    """Measures and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--slow_rows", type=int, default=600, help="Rows that stand for the slow side.")
    given, words = parser.parse_known_args()
    types = (AffinityArguments, DataArguments, FastTrainingArguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, (model_args, data_args, args) = parse_command(types, TASK.defaults, None, [*words, "--output_dir", name])
        train = load_data(data_args, output_dir=name, seed=args.seed).splits["train"]
        rows = train.shuffle(seed=args.seed).select(range(given.slow_rows)).to_list()
        set_seed(args.seed)
        model = build_model(model_args, data_args.sequence_columns)
        loop = RowByRow(model, build_collator(model, data_args, model_args.max_length)).train()
        half = len(rows) // 2
        slow = time_loop(loop, rows[:half])
        fast = run_fast(words, folder)
        slow += time_loop(loop, rows[half:])
    epoch_s, epochs = statistics.median(slow) * len(train), args.num_train_epochs
    result = {
        "machine": {"torch": torch.__version__, "num_threads": torch.get_num_threads()},
        "num_train_rows": len(train),
        "num_epochs": epochs,
        "slow": {
            "num_rows": len(rows),
            "batch_size": BATCH,
            "accumulation": PASSES,
            "seconds_per_row_quartiles": statistics.quantiles(slow, n=4),
            "epoch_seconds": epoch_s,
            "whole_run_days": epoch_s * epochs / 86400,
        },
        "fast": fast,
        "epoch_speedup_at_loop_batch": epoch_s / fast["epoch_at_loop_batch_seconds"],
        "whole_run_speedup": epoch_s * epochs / fast["whole_run_seconds"],
    }
    given.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
