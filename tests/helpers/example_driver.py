"""Runs a script of Hugging Face with the Trainer that is named, and without a network: `driver.py fast SCRIPT ARGS`."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import evaluate
import transformers

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments


class Metric:
    """In place of a metric that `evaluate` would download: the share of equal predictions, under all names."""

    def compute(self, predictions: Any = None, references: Any = None, **kwargs: Any) -> dict[str, float]:
        pairs = [(p, r) for p, r in zip(predictions, references)]
        share = sum(bool(p == r) for p, r in pairs) / len(pairs)
        names = ("accuracy", "f1", "overall_precision", "overall_recall", "overall_f1", "overall_accuracy")
        return dict.fromkeys(names, share)


if __name__ == "__main__":
    evaluate.load = lambda *args, **kwargs: Metric()
    if sys.argv[1] == "fast":  # what changing the import does
        transformers.Trainer, transformers.TrainingArguments = FastTrainer, FastTrainingArguments
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
