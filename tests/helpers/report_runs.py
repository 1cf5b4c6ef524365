"""Folders as finished runs leave them, small and written by hand, and what their pages say."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from page_checks import Page

from hf_ext.reporting import page_record, write_card, write_report
from hf_ext.tasks import TASKS, find_task

RATES = {"train_residues_per_s": 187770.0, "train_gpu_utilization": 0.7}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
VERDICT = "Better than ridge on embeddings: Spearman 0.80 against 0.60 [0.55, 0.65]."


def make_score(
    value: float | None, low: float | None = None, high: float | None = None, **extra: Any
) -> dict[str, Any]:
    """A score as `score_predictions` gives it."""
    undefined = "all 40 predictions are equal (7.5)" if value is None else None
    return {"value": value, "low": low, "high": high, "n": 40, "undefined": undefined, "confidence": 0.95, **extra}


CUT = "longer than the 128 residues that --max_length 130 allows: 2 of 900 sequences. Their ends are cut off."


def affinity_results(**changes: Any) -> dict[str, Any]:
    """A record with everything in it; `changes` replace keys, None takes one out."""
    groups = {f"mAb{i}": {"value": 0.1 * i - 0.2, "n": 10 * (i + 1), "undefined": None} for i in range(9)}
    groups["single"] = {"value": None, "n": 1, "undefined": "one row"}
    scores = {
        "model": {
            "spearman": make_score(0.8, 0.75, 0.85),
            "rmse": make_score(0.5, 0.45, 0.55),
            "recall": make_score(0.75, 0.7, 0.8, threshold=9.0, base_rate=0.1),
            "per_group_spearman": make_score(0.3, 0.1, 0.5, groups=groups),
        },
        "training mean": {"spearman": make_score(None), "rmse": make_score(1.1, 1.0, 1.2)},
        "ridge on embeddings": {"spearman": make_score(0.6, 0.55, 0.65), "rmse": make_score(0.9, 0.85, 0.95)},
    }
    audit = {"n": 2400, "min": 4.0, "max": 12.0, "mean": 7.5, "tied_share": 0.4, "alarms": ["36.6 % are exactly 6."]}
    leak = {
        "num_test_rows": 300,
        "num_test_sequences": 40,
        "num_test_rows_in_train": 299,
        "num_test_sequences_in_train": 39,
        "num_checked": 1,
        "near": [{"identity": 0.9, "num_rows": 0}, {"identity": 0.7, "num_rows": 1}],
    }
    results = {
        "format": 1,
        "task": "affinity",
        "created": "2026-11-20T15:40:00Z",
        "command": "accelerate launch recipes/max_speed.py --output_dir /home/somebody/runs/first --seed 7",
        "seed": 7,
        "verdict": {"text": VERDICT, "is_better": True},
        "model": {
            "class": "AffinityModel",
            "num_parameters": 12_345_678,
            "num_trainable": 345_678,
            "loss": "mse",
            "towers": [
                {
                    "encoder": "facebook/esm2_t6_8M_UR50D",
                    "revision": COMMIT,
                    "training": "frozen",
                    "inputs": [["heavy", "light"]],
                },
                {
                    "encoder": "/home/somebody/encoders/esm",
                    "revision": None,
                    "training": "lora",
                    "pooling": "cls",
                    "inputs": [["antigen"]],
                },
            ],
        },
        "train": {"train_runtime": 754.2, "train_loss": 0.21, "epoch": 3.0, **RATES},
        "best": {"step": 200, "spearman": 0.79},
        "alarms": [{"step": 100, "name": "", "alarms": ["9 distinct values in 512 predictions."]}],
        "early_stopping": {"patience": 3, "stopped_at_step": 300, "decisions": []},
        "test": {
            "num_rows": 40,
            "scores": scores,
            "notes": [
                "2 of 40 rows are new to training in antigen: these 2 are too few to be scored apart (it takes 30)."
            ],
            "baselines": {"ridge on embeddings": {"num_rows": 2000, "of_rows": 2400, "num_features": 192}},
            "collapse": {"alarms": ["RMSE 2.1025 is no better than the 2.1001 of a constant."]},
            "slices": [
                {
                    "name": "rows whose heavy is not in training",
                    "num_rows": 31,
                    "scores": {"model": {"spearman": make_score(0.41, 0.2, 0.6)}},
                }
            ],
        },
        "labels": {"train": audit, "test": {**audit, "alarms": []}},
        "data": {
            "source": "data/pairs.csv",
            "streaming": False,
            "rows_read": 3100,
            "rows_rejected": 10,
            "rejected_by_rule": {"the label is missing": 10},
            "changes": {"heavy": {"lower case": 12}},
            "split": {"rule": "random", "seed": 42, "notes": ["Validation was taken out of train."]},
            "sizes": {"train": 2400, "validation": 300, "test": 300},
            "leaks": {"compared": "test", "columns": {"heavy": leak, "antigen": leak}, "row": leak},
            "inputs": {"heavy": {"unknown_share": 0.0012, "longest": 131, "cut": CUT}},
        },
        "settings": {
            "sequence_columns": ["heavy", "light", "antigen"],
            "label_column": ["pKd"],
            "too_long": "truncate",
            "learning_rate": 0.001,
            "hub_token": "hf_" + "x" * 34,
            "output_dir": "/home/somebody/runs/first",
            "init_head_from": "secret-folder/../runs/frozen",
        },
        "settings_from": {
            **{"learning_rate": "recipe", "output_dir": "command line", "init_head_from": "command line"},
            "hub_token": "command line",
        },
        "environment": {
            "python": "3.11.7",
            "device": "cpu",
            "cpu_count": 2,
            "versions": {"torch": "2.13.0", "faesm": None},
        },
        "costs": {"wall_s": 900.0, "train_s": 754.2, "peak_memory_gib": 1.25, "memory_of": "process"},
        "ensemble": {
            "members": [
                {"name": "constant", "error": 1.1, "weight": 0.0},
                {"name": "ridge on features, penalty 1", "error": 0.9, "weight": 0.25},
                {"name": "network on features, rate 0.001", "error": 0.8, "weight": 0.75},
            ],
            "error": 0.75,
            "measure": "RMSE",
            "num_folds": 5,
            "num_held_out": 200,
            "seconds": 12.5,
        },
        "advice": ["Next: --use_peft fine-tunes."],
    }
    return {key: value for key, value in {**results, **changes}.items() if value is not None}


def masked_lm_results(**changes: Any) -> dict[str, Any]:
    """A record of masked language modelling."""
    model = {"token_loss": 2.1, "perplexity": 8.17, "accuracy": 0.41, "num_tokens": 919}
    results = {
        "format": 1,
        "task": "masked_lm",
        "verdict": {"text": "Better than residue frequencies.", "is_better": True},
        "model": {"class": "EsmForMaskedLM", "num_parameters": 1000, "num_trainable": 1000},
        "train": {"train_runtime": 9.8, "train_residues_per_s": 50445.0},
        "test": {"model": model, "unigram": {**model, "perplexity": 16.59, "accuracy": 0.12}},
        "settings": {"sequence_columns": ["sequence"], "model_name_or_path": "/home/somebody/models/esm"},
    }
    return {key: value for key, value in {**results, **changes}.items() if value is not None}


def log_history() -> list[dict[str, float]]:
    """Thirty training losses, six evaluations of a subset, two of them with a full pass."""
    log: list[dict[str, float]] = [
        {"step": step, "epoch": step / 100, "loss": 20 / step} for step in range(10, 310, 10)
    ]
    for step in range(50, 301, 50):
        entry = {"step": step, "epoch": step / 100, "eval_loss": 22 / step, "eval_spearman": 0.8 - 10 / step}
        if step in (200, 300):
            entry |= {"eval_full_loss": 23 / step, "eval_full_spearman": 0.79 - 5 / step}
        log.append({**entry, "eval_runtime": 0.1})
    return log


PLAN = {
    "preset": "max_speed",
    "hardware": {"name": "cpu-avx512", "memory_gib": 23.5},
    "decisions": [
        {
            "name": "packing",
            "kind": "I",
            "status": "applied",
            "reason": "half of a batch is padding",
            "evidence": {"ratio": 2.2},
        },
        {"name": "tf32", "kind": "N", "status": "skipped", "reason": "cpu-avx512 has no TF32", "evidence": {}},
        {"name": "lora", "kind": "L", "status": "off", "reason": "not asked for", "evidence": {}},
    ],
}


def write_run(
    folder: Path,
    results: dict[str, Any],
    num_rows: int = 120,
    plan: dict | None = PLAN,
    log: list | None = None,
    has_page: bool = True,
) -> Path:
    """Writes the four files of a run; `num_rows` 0 leaves predictions out, `plan` None the plan, `log` [] the state.

    The record has what its task says of it, as a run writes it; without `has_page` it is one of an earlier version.
    """
    if has_page and results.get("task") in TASKS:
        results = {**results, "page": page_record(find_task(results["task"]).describe(results))}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "all_results.json").write_text(json.dumps(results, default=str))
    if plan is not None:
        (folder / "plan.json").write_text(json.dumps(plan))
    if log is None or log:
        state = {"global_step": 300, "log_history": log or log_history()}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    if num_rows:
        write_predictions(folder / "predictions.csv", num_rows)
    return folder


def read_pages(folder: Path, **options: Any) -> tuple[Page, str]:
    """The report that is written anew, and the text of the card after its YAML block."""
    report = Page(write_report(folder).read_text(encoding="utf-8"))
    return report, write_card(folder, **options).read_text(encoding="utf-8").split("\n---\n", 1)[1]


def section(card: str, title: str) -> str:
    """A section of a card."""
    return card.split(f"\n## {title}\n")[1].split("\n## ")[0]


def table_rows(card: str) -> list[list[str]]:
    """Rows of all its tables, as cells."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in card.splitlines() if line.startswith("|")]


def write_predictions(path: Path, num_rows: int, constant: float | None = None) -> None:
    """Predictions that scatter around labels, or are all equal; sequences of 90 to 130 residues."""
    random = np.random.default_rng(0)
    labels = random.normal(7.5, 1.2, num_rows)
    predictions = labels + random.normal(0, 0.5, num_rows) if constant is None else np.full(num_rows, constant)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["heavy", "antigen", "source_row", "label", "prediction"])
        for i in range(num_rows):
            writer.writerow(["A" * (90 + i % 41), "G" * (60 + i % 7), i + 1, labels[i], predictions[i]])
