"""A classifier of 16 rows that trains in milliseconds, as a user of Trainer would build it."""

from typing import Any

from miniature_esm import make_esm
from transformers import EsmForSequenceClassification

from hf_ext.training_args import FastTrainingArguments

ROWS = [{"input_ids": [0, 4 + i % 20, 5 + i % 7, 2], "labels": i % 2} for i in range(16)]


def make_model(**given: Any) -> EsmForSequenceClassification:
    """The same weights every time."""
    return make_esm(EsmForSequenceClassification, intermediate_size=16, **given)


def make_args(folder: Any, cls: type = FastTrainingArguments, **given: Any) -> Any:
    """Arguments of 4 steps of 4 rows, saved after each second one."""
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
    }
    return cls(output_dir=str(folder), **{**settings, **given})
