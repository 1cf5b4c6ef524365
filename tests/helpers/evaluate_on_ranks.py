"""What each process of a two-process test runs: `python evaluate_on_ranks.py FOLDER`, alone or under torchrun.

Writes to FOLDER the metrics of evaluations of 37 rows, of regression and of masked tokens, while training on a subset
and after it, those of stock Trainer, and what differs from it where a subclass computes the loss: `metrics-RANK.json`.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset, IterableDataset
from ranks import leave
from small_evaluations import count, evaluations, make_rows, make_trainer
from stock_twins import run_both
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

import hf_ext.trainer
from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation.row_metrics import RowMetrics

RANK = int(os.environ.get("RANK", "0"))
BATCHES = (1, 4, 37)
TASKS = ("regression", "masked")


def make_evals(task: str, streams: bool, num_rows: int = 37) -> Dataset | IterableDataset:
    """Rows, or a stream of one shard, which two processes cannot share."""
    rows = make_rows(num_rows, task)
    return rows.to_iterable_dataset(1) if streams else rows


def evaluate(folder: Path, task: str, batch: int, streams: bool = False, **given) -> dict[str, float]:
    """Metrics of all 37 rows by an untrained model."""
    given = {"compute_metrics": count, "per_device_eval_batch_size": batch, **given}
    return make_trainer(folder, make_evals(task, streams), task, **given).evaluate()


def train(folder: Path, task: str, streams: bool = False) -> list[dict[str, float]]:
    """Logged evaluations of a run on a subset; the weights do not move, so that processes cannot differ by them."""
    given = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "learning_rate": 0.0, "eval_subset": 5}
    trainer = make_trainer(folder, make_evals(task, streams), task, compute_metrics=count, **given)
    trainer.train()
    return evaluations(trainer)


def score_groups(folder: Path) -> list[dict[str, float]]:
    """Logged evaluations of binders and of groups: 33 rows of 37, 11 of each group, then all, in batches of 4."""
    metrics = RowMetrics(threshold=14.0, group_column="group")
    given = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "learning_rate": 0.0, "eval_subset": 33}
    trainer = make_trainer(folder, make_rows(37), compute_metrics=metrics, **given)
    trainer.train()
    return evaluations(trainer)


def disagree(folder: Path) -> str:
    """What is said where each process reads a share of the stream only."""
    try:
        rows = make_rows(37).select(range(RANK, 37, 2)).to_iterable_dataset(1)
        make_trainer(folder, rows).evaluate()
    except DataError as error:
        return str(error)
    return ""


def refuse_dispatch(folder: Path) -> str:
    """What is said where the main process is to read the training rows of all."""
    try:
        make_trainer(folder, make_rows(4), accelerator_config={"dispatch_batches": True}).train()
    except ArgumentError as error:
        return str(error)
    return ""


def predict_stream(folder: Path, num_rows: int) -> list[float]:
    """Labels that `predict` gives back, in its order."""
    trainer = make_trainer(folder, None, eval_strategy="no", per_device_eval_batch_size=4)
    return trainer.predict(make_evals("regression", True, num_rows)).label_ids.tolist()


def measure(folder: Path) -> dict[str, object]:
    streams = {task: {str(batch): evaluate(folder, task, batch, True) for batch in (4, 37)} for task in TASKS}
    stock = {"trainer_cls": Trainer, "args_cls": TrainingArguments}
    return {
        "whole": {task: {str(batch): evaluate(folder, task, batch) for batch in BATCHES} for task in TASKS},
        "stream": streams,
        "predicted": {str(num): predict_stream(folder, num) for num in (1, 16, 37)},
        "stock": {task: evaluate(folder, task, 4, **stock) for task in TASKS},
        "training": {task: train(folder, task) for task in TASKS},
        "training stream": {task: train(folder, task, streams=True) for task in TASKS},
        "groups": score_groups(folder),
    }


def weigh(base: type) -> type:
    """A subclass whose loss counts no items: three classes of unequal weight."""

    class Weighted(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weight = torch.tensor([1.0, 9.0, 2.0])
            loss = cross_entropy(outputs["logits"].reshape(-1, 3), labels.reshape(-1), weight=weight)
            return (loss, outputs) if return_outputs else loss

    return Weighted


def override_loss(folder: Path, is_seen: bool = True) -> list[str]:
    """What is not as in stock Trainer where a subclass computes the loss: 23 rows, two epochs, evaluation, prediction.

    Where the override is not seen, rows are dealt out unevenly for it.
    """
    find, places = hf_ext.training.overrides.find_override, [*sys.modules.values()]
    asking = [module for module in places if getattr(module, "find_override", None) is find]
    for module in asking if not is_seen else ():
        module.find_override = lambda trainer, *names: None
    given = {"num_rows": 23, "gradient_accumulation_steps": 2, "max_steps": 5}
    try:
        ours, stock = run_both(folder, "EsmForTokenClassification", weigh, **given)
    finally:
        for module in asking:
            module.find_override = find
    assert len(ours.losses) == 5
    return ours.differences(stock)


def main(folder: Path) -> None:
    gc.freeze()  # Trainer collects garbage before each run: half a second over all that transformers has imported
    report = {**measure(folder), "dispatch": refuse_dispatch(folder)}
    report["disagree"] = disagree(folder)
    report["overridden"] = {seen: override_loss(folder / seen, seen == "seen") for seen in ("seen", "unseen")}
    (folder / f"metrics-{RANK}.json").write_text(json.dumps(report))
    leave(make_trainer(folder, make_rows(4)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
