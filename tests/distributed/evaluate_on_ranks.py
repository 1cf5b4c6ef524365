"""What each process of a two-process test runs: `python evaluate_on_ranks.py FOLDER`, alone or under torchrun.

Writes to FOLDER the metrics of evaluations of 37 rows, of regression and of masked tokens, while training on a subset
and after it, and those of stock Trainer: `metrics-RANK.json`.
"""

import gc
import json
import os
import sys
from pathlib import Path

from ranks import leave
from small_evaluations import count, evaluations, make_rows, make_trainer
from transformers import Trainer, TrainingArguments

RANK = int(os.environ.get("RANK", "0"))
BATCHES = (1, 4, 37)
TASKS = ("regression", "masked")


def evaluate(folder: Path, task: str, batch: int, **given) -> dict[str, float]:
    """Metrics of all 37 rows by an untrained model."""
    given = {"compute_metrics": count, "per_device_eval_batch_size": batch, **given}
    return make_trainer(folder, make_rows(37, task), task, **given).evaluate()


def train(folder: Path, task: str) -> list[dict[str, float]]:
    """Logged evaluations of a run on a subset; the weights do not move, so that processes cannot differ by them."""
    given = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "learning_rate": 0.0, "max_eval_samples": 5}
    trainer = make_trainer(folder, make_rows(37, task), task, compute_metrics=count, **given)
    trainer.train()
    return evaluations(trainer)


def clock(folder: Path) -> list[int]:
    """Steps that were evaluated because of the time of the second process alone."""
    trainer = make_trainer(
        folder, make_rows(37), eval_strategy="no", eval_minutes=60.0, max_steps=3, max_eval_samples=5
    )
    schedule = next(c for c in trainer.callback_handler.callbacks if type(c).__name__ == "EvaluationSchedule")
    if RANK == 1:
        schedule._is_time = lambda args: trainer._agree([trainer.state.global_step == 2])[0]
    trainer.train()
    return [log["step"] for log in evaluations(trainer)]


def measure(folder: Path) -> dict[str, object]:
    stock = {"trainer_cls": Trainer, "args_cls": TrainingArguments}
    return {
        "whole": {task: {str(batch): evaluate(folder, task, batch) for batch in BATCHES} for task in TASKS},
        "stock": {task: evaluate(folder, task, 4, **stock) for task in TASKS},
        "training": {task: train(folder, task) for task in TASKS},
    }


def main(folder: Path) -> None:
    gc.freeze()  # Trainer collects garbage before each run: half a second over all that transformers has imported
    report = {**measure(folder), "clock": clock(folder)}
    (folder / f"metrics-{RANK}.json").write_text(json.dumps(report))
    leave(make_trainer(folder, make_rows(4)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
