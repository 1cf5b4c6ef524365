"""What a plan costs where nothing can pay: small models that no speed-up is for, stock Trainer beside `FastTrainer`.

    python benchmarks/plan_cost.py [--rounds 5]

Seconds of the constructor, and the median time of a step after the first ten. Sides take turns, each in a process of
its own, since memory that a plan keeps makes a whole process faster; of two runs there the second counts, so that
imports and first calls count for nobody. Then what the plan leaves small models without: CPU time of a step of two
linear layers in float32, with oneDNN's products, and in bf16 too. Writes `results/plan_cost.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import interleave, quartiles
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from hf_ext import FastTrainer, FastTrainingArguments

RESULT = Path(__file__).resolve().parent / "results" / "plan_cost.json"
STEPS, WARM, ROWS, WIDTH = 300, 10, 16, 64


class Perceptron(torch.nn.Module):
    """Two layers, and the loss that Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.layers(inputs).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(predicted, labels), "logits": predicted}


def make_bert() -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    """A classifier of two layers, 64 wide, and 1,000 rows of 40 tokens."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH}
    model = BertForSequenceClassification(BertConfig(vocab_size=32, **sizes))
    rows = [{"input_ids": torch.randint(1, 32, (40,)), "labels": torch.randint(2, ())} for _ in range(1_000)]
    return model, rows


def make_perceptron() -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    """Two layers, and 1,000 rows of 64 numbers."""
    return Perceptron(), [{"inputs": torch.randn(WIDTH), "labels": torch.randn(())} for _ in range(1_000)]


MODELS = {"BERT, 2 layers": make_bert, "perceptron": make_perceptron}


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.times.append(time.perf_counter())


def train(
    name: str, trainer_class: type[Trainer], arguments_class: type[TrainingArguments], **own: Any
) -> dict[str, float]:
    """One run of `STEPS` steps: seconds of the constructor, and of a step (median after the first ten)."""
    set_seed(0)
    model, rows = MODELS[name]()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        plain = {"max_steps": STEPS, "per_device_train_batch_size": ROWS, "report_to": "none", "logging_steps": 1000}
        args = arguments_class(folder, save_strategy="no", use_cpu=True, disable_tqdm=True, **plain, **own)
        began = time.perf_counter()
        trainer = trainer_class(model, args, train_dataset=rows, callbacks=[clock])
        built = time.perf_counter() - began
        trainer.train()
    steps = [after - before for before, after in zip(clock.times[WARM:], clock.times[WARM + 1 :])]
    return {"constructor_s": built, "step_ms": 1000 * statistics.median(steps)}


SIDES: dict[str, Callable[[str], dict[str, float]]] = {
    "stock Trainer": partial(train, trainer_class=Trainer, arguments_class=TrainingArguments),
    "no speed-up": partial(train, trainer_class=FastTrainer, arguments_class=FastTrainingArguments, speedups=[]),
    "all": partial(train, trainer_class=FastTrainer, arguments_class=FastTrainingArguments, speedups=["all"]),
}


def run_apart(name: str, side: str) -> dict[str, float]:
    """What a side takes in a process of its own."""
    command = [sys.executable, __file__, "--of", name, side]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def compare(name: str, rounds: int) -> dict[str, Any]:
    """Quartiles over rounds of what each side took, and of its step beside stock Trainer's of the same round."""
    found = interleave({side: partial(run_apart, name, side) for side in SIDES}, rounds)
    stock = [one["step_ms"] for one in found["stock Trainer"]]
    return {
        side: {key: quartiles([one[key] for one in each], 4) for key in ("constructor_s", "step_ms")}
        | {"step_ratio": quartiles([one["step_ms"] / base for one, base in zip(each, stock)], 3)}
        for side, each in found.items()
    }


def time_products(width: int, rows: int, precision: str, is_half: bool) -> float:
    """CPU microseconds of a step of two linear layers: the least of some steps that take 50 ms together."""
    set_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, 1))
    inputs = torch.randn(rows, width)
    times: list[float] = []
    torch.set_float32_matmul_precision(precision)
    while sum(times) < 0.05 or len(times) < 20:
        began = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            found = layers(inputs)
        found.float().square().mean().backward()
        layers.zero_grad()
        times.append(time.process_time() - began)
    torch.set_float32_matmul_precision("highest")
    return 1e6 * min(times)


def compare_products(rounds: int) -> dict[str, Any]:
    """Operations forward, and quartiles of what a step takes, by width and rows."""
    found = {}
    for width, rows in ((64, 16), (64, 256), (256, 16), (256, 64), (512, 16), (256, 256), (512, 64), (512, 256)):
        sides = {"float32": ("highest", False), "oneDNN": ("medium", False), "bf16": ("medium", True)}
        times = interleave({name: partial(time_products, width, rows, *side) for name, side in sides.items()}, rounds)
        took = {name: quartiles(each, 1) for name, each in times.items()}
        found[f"{width} wide, {rows} rows"] = {"mflop": 2e-6 * rows * width * (width + 1), "step_us": took}
    return found


def main() -> None:
    """Runs the sides in turn, prints and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--of", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.of:
        name, side = given.of
        print(json.dumps([SIDES[side](name) for _ in range(2)][-1]))
        return
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "steps": STEPS, "rounds": given.rounds}
    result["models"] = {name: compare(name, given.rounds) for name in MODELS}
    result["products"] = compare_products(given.rounds)
    print(json.dumps(result, indent=1))
    given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
