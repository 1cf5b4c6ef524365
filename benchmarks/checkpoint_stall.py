"""How long a save stalls training: FastTrainer's checkpoints against stock Trainer's, interleaved; exit 1 above 1.5x.

    python benchmarks/checkpoint_stall.py --output benchmarks/results/checkpoint_stall.json

An ESM of ESM-2 8M's shape, so about 92 MB of weights and AdamW state. Every round trains stock and FastTrainer, each in
a fresh folder, and saves after every second step. The stall is how long the training thread stands still for one save:
all time between the end of an optimizer step and the beginning of the next one, over the two steps from a save to the
next. What is dirty in the page cache is written back before each save, outside the measurement, so that no side waits
for the other's bytes. Stock does not wait for the disk and does not hash.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import interleave, make_esm2, quartiles
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_ext.files import used_bytes
from hf_ext.hardware import detect_hardware
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

ALLOWED_RATIO = 1.5
SIDES: dict[str, tuple[type[Trainer], type[TrainingArguments]]] = {
    "stock": (Trainer, TrainingArguments),
    "fast": (FastTrainer, FastTrainingArguments),
}
SAVE_STEPS = 2
ROW_TOKENS, ROWS = 256, 2  # a step of some 0.2 s


class SaveClock(TrainerCallback):
    """How long the training thread stands still between steps. To be the first callback."""

    def __init__(self) -> None:
        self.ended: float | None = None
        self.gaps: dict[int, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.ended is not None:
            self.gaps[state.global_step] = time.perf_counter() - self.ended

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % SAVE_STEPS == 0:
            os.sync()
        self.ended = time.perf_counter()

    def stalls(self) -> list[float]:
        """Seconds per save, of all saves but the first and the last."""
        saves = [step for step in self.gaps if step % SAVE_STEPS == 0]
        return [sum(self.gaps[step + i] for i in range(SAVE_STEPS)) for step in saves[1:-1]]


def train(side: str, num_saves: int, folder: Path) -> tuple[list[float], int]:
    """Seconds that training stood still for each save, and the bytes of a checkpoint."""
    trainer_class, args_class = SIDES[side]
    last = SAVE_STEPS * (num_saves + 2)
    settings: dict[str, Any] = {"max_steps": last, "save_steps": SAVE_STEPS, "per_device_train_batch_size": ROWS}
    settings |= {"logging_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    ids = torch.arange(ROW_TOKENS) % 20 + 4
    rows = [{"input_ids": ids, "labels": ids}] * (ROWS * last)
    clock = SaveClock()
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        args = args_class(output_dir=f"{fresh}/run", **settings)
        trainer_class(make_esm2("8M", token_dropout=True), args, train_dataset=rows, callbacks=[clock]).train()
        return clock.stalls(), used_bytes(Path(fresh, "run", f"checkpoint-{last}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--saves_per_round", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="On the disk to measure.")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    found = interleave({side: partial(train, side, args.saves_per_round, args.folder) for side in SIDES}, args.rounds)
    stalls = {side: [second for seconds, _ in rounds for second in seconds] for side, rounds in found.items()}
    ratio = round(statistics.median(stalls["fast"]) / statistics.median(stalls["stock"]), 2)
    result = {
        "device": detect_hardware("cpu").name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": args.rounds,
        "num_saves": len(stalls["fast"]),
        "megabytes": {side: round(rounds[-1][1] / 10**6, 1) for side, rounds in found.items()},
        "stall_ms": {side: quartiles([1e3 * second for second in seconds], 1) for side, seconds in stalls.items()},
        "ratio": ratio,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    if ratio > ALLOWED_RATIO:
        sys.exit(f"A save stalls training {ratio} times as long as stock Trainer's; allowed: {ALLOWED_RATIO}.")


if __name__ == "__main__":
    main()
