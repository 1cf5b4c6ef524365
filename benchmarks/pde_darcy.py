"""Darcy flow at 64 x 64 from 1,000 samples: our operator Transformer and neuraloperator's FNO, trained as long.

Both sides take turns of some seconds of CPU time in one process on one thread, on the same samples, with the same
augmentation (the eight symmetries of the square) and the same cosine decay over their budget; the error is the relative
L2 per test sample, averaged, which is also the loss of both. Nothing is chosen by the test samples: what counts is the
last evaluation. FNO as in Li et al. 2021 (arXiv:2010.08895): 12 modes, width 32, 4 layers, Adam at 1e-3, batch 20; they
report 0.0108 at 85 x 85 from 1,000 samples of the same distribution, after 500 epochs.

The file is written after each evaluation, so that a run that is stopped has left its curves.

pip install neuraloperator  # for the second side; without it the first one runs alone
OMP_NUM_THREADS=1 python benchmarks/pde_darcy.py --cpu_minutes 12 --output benchmarks/results/pde_darcy_cpu.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_ext.hardware import detect_hardware
from hf_ext.models.muon import MuonAdamW
from hf_ext.pde.configuration import OperatorConfig
from hf_ext.pde.data import baseline_errors, load_task, measure_units
from hf_ext.pde.model import OperatorTransformer, relative_l2

TASK, RESOLUTION, NUM_TRAIN, NUM_TEST = "darcy2d", 64, 1000, 200
SIZES = {"train": NUM_TRAIN, "test": NUM_TEST}
PUBLISHED = {"relative_l2": 0.0108, "resolution": 85, "num_train": 1000, "source": "arXiv:2010.08895, FNO, Darcy flow"}
TURN_S, NUM_EVALUATIONS, WARMUP = 20.0, 12, 0.05
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # coefficients and solutions to the loss of a batch


class Side:
    """One way to learn the same samples: its model, its optimizer, and the CPU time that it has had.

    Args:
        name: in the results.
        model: anything with parameters.
        optimizer: its learning rates are the peaks of the schedule.
        loss, predict: of a batch, (B, r, r) each; predictions are in the unit of the data.
        batch: rows of a step.
    """

    def __init__(self, name: str, model: nn.Module, optimizer: Any, loss: Step, predict: Any, batch: int):
        self.name, self.model, self.optimizer, self.loss, self.predict = name, model, optimizer, loss, predict
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self.batch, self.used_s, self.steps, self.curve = batch, 0.0, 0, list[dict[str, float]]()
        self.generator = torch.Generator().manual_seed(0)

    def train(
        self, inputs: torch.Tensor, targets: torch.Tensor, seconds: float, done: float, per_second: float
    ) -> None:
        """Steps for so many CPU seconds; the schedule stands at `done` (0 to 1), and moves by `per_second`."""
        self.model.train()
        start = time.process_time()
        while (spent := time.process_time() - start) < seconds:
            factor = schedule(min(1.0, done + spent * per_second))
            for group, peak in zip(self.optimizer.param_groups, self.peaks):
                group["lr"] = peak * factor
            rows = torch.randint(len(inputs), (self.batch,), generator=self.generator)
            self.optimizer.zero_grad()
            self.loss(*turn_about(inputs[rows], targets[rows], self.generator)).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.steps += 1
        self.used_s += time.process_time() - start

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Relative L2, the mean over samples; a point of the curve."""
        self.model.eval()
        predictions = torch.cat([self.predict(part) for part in inputs.split(50)])
        error = relative_l2(predictions.flatten(1), targets.flatten(1)).mean().item()
        self.curve.append({"cpu_s": round(self.used_s, 1), "steps": self.steps, "test_relative_l2": error})
        return error

    def report(self) -> dict[str, Any]:
        """What is written of it."""
        return {
            "parameters": sum(weight.numel() for weight in self.model.parameters()),
            "batch": self.batch,
            "steps": self.steps,
            "epochs": self.steps * self.batch / NUM_TRAIN,
            "cpu_s": self.used_s,
            "test_relative_l2": self.curve[-1]["test_relative_l2"] if self.curve else None,
            "curve": self.curve,
        }


def schedule(done: float) -> float:
    """Warm-up, then half a cosine down to 0."""
    return done / WARMUP if done < WARMUP else 0.5 * (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP)))


def turn_about(
    inputs: torch.Tensor, targets: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch under one of the eight symmetries of the square, which the equation and its distribution have too."""
    for drawn, change in zip(
        torch.randint(2, (3,), generator=generator).tolist(),
        (lambda x: x.flip(1), lambda x: x.flip(2), lambda x: x.transpose(1, 2)),
    ):
        if drawn:
            inputs, targets = change(inputs), change(targets)
    return inputs, targets


def ours(units: dict[str, Any], hidden_size: int, patch_size: int, rate: float) -> Side:
    """The operator with Muon for its blocks' matrices, AdamW for the rest; a quarter of the points in each step."""
    config = OperatorConfig(
        tasks=[TASK],
        resolution=RESOLUTION,
        patch_size=patch_size,
        hidden_size=hidden_size,
        num_hidden_layers=4,
        **units,
    )
    model = OperatorTransformer(config)
    model.input_decoders.requires_grad_(False)  # no inverse losses here
    adamw = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], rate, (0.9, 0.98), weight_decay=0.01)
    matrices = [layer.weight for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    drawing = torch.Generator().manual_seed(1)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        points = torch.rand(len(inputs), 1, RESOLUTION**2, generator=drawing).argsort(-1)[..., : RESOLUTION**2 // 4]
        labels = targets.flatten(1)[:, None].take_along_dim(points, dim=2)
        return model(darcy2d_inputs=inputs, labels=labels, points=points).loss

    def predict(inputs: torch.Tensor) -> torch.Tensor:
        return model(darcy2d_inputs=inputs).logits[:, 0]

    return Side("operator", model, MuonAdamW(adamw, matrices), loss, predict, batch=16)


def theirs(units: dict[str, Any]) -> Side:
    """neuraloperator's FNO in the sizes of the paper, on standardised coefficients and solutions."""
    from neuralop.models import FNO

    model = FNO(n_modes=(12, 12), in_channels=1, out_channels=1, hidden_channels=32, n_layers=4)
    mean, std = units["input_means"][TASK], units["input_stds"][TASK]

    def predict(inputs: torch.Tensor) -> torch.Tensor:
        found = model(((inputs - mean) / std)[:, None])[:, 0]
        return found * units["target_stds"][TASK] + units["target_means"][TASK]

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return relative_l2(predict(inputs).flatten(1), targets.flatten(1)).mean()

    return Side("fno", model, torch.optim.Adam(model.parameters(), 1e-3, weight_decay=1e-4), loss, predict, batch=20)


def run(arguments: argparse.Namespace) -> None:
    """Turns until each side has had its CPU time, or the wall time is over, towards which the schedule hurries then."""
    splits = {split: load_task(TASK, split, num, resolution=RESOLUTION, seed=0) for split, num in SIZES.items()}
    arrays = {
        split: [torch.from_numpy(found[kind]) for kind in ("inputs", "targets")] for split, found in splits.items()
    }
    units = measure_units({TASK: splits["train"]})
    torch.manual_seed(0)
    sides = [ours(units, arguments.hidden_size, arguments.patch_size, arguments.learning_rate)]
    if importlib.util.find_spec("neuralop"):
        sides.append(theirs(units))
    errors = baseline_errors(TASK, splits["train"], splits["test"])
    trivial = {name: float(found.mean()) for name, found in errors.items()}
    budget_s, start, done, rate = arguments.cpu_minutes * 60, time.monotonic(), 0.0, 1 / (arguments.cpu_minutes * 60)
    while done < 1:
        before, evaluations = done, len(sides[0].curve)
        for side in sides:
            side.train(*arrays["train"], TURN_S, done, rate)
        by_wall = (time.monotonic() - start) / (60 * arguments.wall_minutes)
        done = max(sides[0].used_s / budget_s, by_wall)
        rate = (done - before) / TURN_S
        if done >= 1 or done * NUM_EVALUATIONS >= evaluations + 1:
            for side in sides:
                print(f"{done:.2f} {side.name} {side.steps} {side.evaluate(*arrays['test']):.4f}", flush=True)
            write(arguments, sides, trivial, done)


def write(arguments: argparse.Namespace, sides: list[Side], trivial: dict[str, float], done: float) -> None:
    """All that is known so far."""
    settings = {name: value for name, value in vars(arguments).items() if name != "output"}
    packages = ["torch", "transformers", *(["neuraloperator"] if len(sides) > 1 else [])]
    found = {
        "machine": detect_hardware(torch.device("cpu")).name,
        "versions": {name: version(name) for name in packages},
        "settings": {**settings, "resolution": RESOLUTION, "num_train": NUM_TRAIN, "num_test": NUM_TEST, "seeds": 1},
        "done": round(min(1.0, done), 3),
        "published": PUBLISHED,
        "baselines": trivial,
        "sides": {side.name: side.report() for side in sides},
    }
    arguments.output.write_text(json.dumps(found, indent=1, default=str) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu_minutes", type=float, default=12.0, help="Of training, for each side.")
    parser.add_argument("--wall_minutes", type=float, default=120.0, help="For both together, at most.")
    parser.add_argument("--hidden_size", type=int, default=96)
    parser.add_argument("--patch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    parser.add_argument("--output", type=Path, required=True)
    torch.set_num_threads(1)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
