"""Processor time of a training step of a model that is almost none, with stock Trainer and with FastTrainer.

    python benchmarks/step_overhead.py

A BERT of one layer and width 8 on rows of 16 tokens, so that what a trainer itself does is most of a step. The sides
take turns in one process of one thread; of each round the seconds of all steps, without construction. Writes
`benchmarks/results/step_overhead.json`: per round the milliseconds of a step, and the ratio to stock's of that round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from hf_ext import FastTrainer, FastTrainingArguments

RESULT = Path(__file__).parent / "results" / "step_overhead.json"
SIDES: dict[str, tuple[type[Trainer], type[TrainingArguments], dict[str, Any]]] = {
    "stock": (Trainer, TrainingArguments, {}),
    "fast": (FastTrainer, FastTrainingArguments, {}),
    "all": (FastTrainer, FastTrainingArguments, {"speedups": ["all"]}),
}


class StepClock(TrainerCallback):
    """Processor and wall seconds from the first step's begin to the end of training."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.process_time(), time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.cpu_s, self.wall_s = time.process_time() - self.began[0], time.perf_counter() - self.began[1]


def measure(side: str, steps: int) -> tuple[float, float]:
    """Milliseconds of a step: of the processor, and of the clock."""
    trainer_class, arguments_class, extra = SIDES[side]
    set_seed(0)
    config = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    ids = torch.randint(5, 30, (64, 16)).tolist()
    rows = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 16] * 64, "labels": [0, 1] * 32})
    with tempfile.TemporaryDirectory() as folder:
        args = arguments_class(
            folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            save_strategy="no",
            logging_steps=100,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **extra,
        )
        clock = StepClock()
        trainer = trainer_class(BertForSequenceClassification(config), args, train_dataset=rows, callbacks=[clock])
        trainer.train()
        if side != "stock":
            trainer.end()
    return 1000 * clock.cpu_s / steps, 1000 * clock.wall_s / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for side in SIDES:
        measure(side, 20)
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for _ in range(given.rounds):
        for side in SIDES:
            found[side].append(measure(side, given.steps))
            print(f"{side}: {found[side][-1][0]:.2f} ms of the processor", flush=True)
    result: dict[str, Any] = {"steps": given.steps, "torch": torch.__version__}
    for side, times in found.items():
        ratios = [cpu / stock for (cpu, _), (stock, _) in zip(times, found["stock"])]
        result[side] = {
            "cpu_ms": [round(cpu, 3) for cpu, _ in times],
            "wall_ms": [round(wall, 3) for _, wall in times],
            "median_ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    given.output.write_text(json.dumps(result, indent=1) + "\n")
    print({side: result[side]["median_ratio"] for side in SIDES})


if __name__ == "__main__":
    main()
