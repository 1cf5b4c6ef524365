"""How long a save stalls training: FastTrainer's checkpoints against stock Trainer's, interleaved; exit 1 above 1.5x.

    python benchmarks/checkpoint_stall.py --output benchmarks/results/checkpoint_stall.json

An ESM of ESM-2 8M's shape, so about 92 MB of weights and AdamW state. Every round trains stock, then FastTrainer, each
in a fresh folder, and saves after every second step. The stall is how long the training thread stands still for one
save: all time between the end of an optimizer step and the beginning of the next one, over the two steps from a save to
the next; FastTrainer, which commits a checkpoint during the step after it, waits for that at the end of the step.
`next_step_slower_ms` is what that step takes longer than other steps do meanwhile. What is dirty in the page cache is
written back before each save, outside the measurement, so that no side waits for the other's bytes. Stock does not wait
for the disk and does not hash.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import make_esm2
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_ext.files import used_bytes
from hf_ext.hardware import detect_hardware
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

ALLOWED_RATIO = 1.5
MB = 10**6
SIDES: dict[str, tuple[type[Trainer], type[TrainingArguments]]] = {
    "stock": (Trainer, TrainingArguments),
    "fast": (FastTrainer, FastTrainingArguments),
}


SAVE_STEPS = 2
ROW_TOKENS, ROWS = 256, 2  # a step of some 0.2 s


class SaveClock(TrainerCallback):
    """How long the training thread stands still between steps, and how long steps take. To be the first callback."""

    def __init__(self) -> None:
        self.ended: float | None = None
        self.gaps: dict[int, float] = {}
        self.steps: dict[int, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()
        if self.ended is not None:
            self.gaps[state.global_step] = self.began - self.ended

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps[state.global_step] = time.perf_counter() - self.began
        if state.global_step % SAVE_STEPS == 0:
            os.sync()
        self.ended = time.perf_counter()

    def stalls(self) -> list[float]:
        """Seconds per save, of all saves but the first and the last."""
        saves = [step for step in self.gaps if step % SAVE_STEPS == 0]
        return [sum(self.gaps[step + i] for i in range(SAVE_STEPS)) for step in saves[1:-1]]

    def slower(self) -> list[float]:
        """Seconds that the step after a save takes longer than the median of the others."""
        usual = statistics.median(
            self.steps[step] for step in self.steps if step % SAVE_STEPS == 0 and step > SAVE_STEPS
        )
        return [self.steps[step] - usual for step in self.steps if step % SAVE_STEPS == 1 and step > SAVE_STEPS]


def train(side: str, folder: Path, num_saves: int) -> tuple[list[float], list[float], int]:
    """Stalls and slowed steps around `num_saves` saves, in seconds, and bytes on disk of the last checkpoint."""
    trainer_class, args_class = SIDES[side]
    last = SAVE_STEPS * (num_saves + 2)
    args = args_class(
        output_dir=str(folder),
        max_steps=last,
        save_steps=SAVE_STEPS,
        per_device_train_batch_size=ROWS,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    ids = torch.arange(ROW_TOKENS) % 20 + 4
    clock = SaveClock()
    rows = [{"input_ids": ids, "labels": ids}] * (ROWS * last)
    trainer_class(make_esm2("8M", token_dropout=True), args, train_dataset=rows, callbacks=[clock]).train()
    return clock.stalls(), clock.slower(), used_bytes(folder / f"checkpoint-{last}")


def describe(seconds: list[float]) -> dict[str, float]:
    """Quartiles in milliseconds."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {"low_ms": round(1e3 * low, 1), "median_ms": round(1e3 * middle, 1), "high_ms": round(1e3 * high, 1)}


def run_round(saves_per_round: int, folder: Path) -> dict[str, tuple[list[float], list[float], int]]:
    """What `train` returns, per side."""
    found = {}
    for side in SIDES:
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            found[side] = train(side, Path(fresh) / "run", saves_per_round)
    return found


def measure(num_rounds: int, saves_per_round: int, folder: Path) -> dict[str, Any]:
    """Quartiles of each side, and of fast over stock round by round; the first round warms up and is not counted."""
    rounds = [run_round(saves_per_round, folder) for _ in range(num_rounds + 1)][1:]
    every = {side: [second for found in rounds for second in found[side][0]] for side in SIDES}
    ratios = [statistics.median(found["fast"][0]) / statistics.median(found["stock"][0]) for found in rounds]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "num_saves": len(every["fast"]),
        "megabytes": {side: round(size / MB, 1) for side, (*_, size) in rounds[-1].items()},
        **{side: describe(found) for side, found in every.items()},
        "next_step_slower_ms": {
            side: round(1e3 * statistics.median(second for found in rounds for second in found[side][1]), 1)
            for side in SIDES
        },
        "ratio": round(statistics.median(every["fast"]) / statistics.median(every["stock"]), 2),
        "ratio_by_round": {"low": round(low, 2), "high": round(high, 2)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--saves_per_round", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="On the disk to measure.")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    result = {
        "device": detect_hardware("cpu").name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": args.rounds,
        **measure(args.rounds, args.saves_per_round, args.folder),
        "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    if result["ratio"] > ALLOWED_RATIO:
        sys.exit(
            f"A save stalls training {result['ratio']} times as long as stock Trainer's; allowed: {ALLOWED_RATIO}."
        )


if __name__ == "__main__":
    main()
