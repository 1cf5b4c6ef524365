"""A process that trains and pushes: `python pushing_process.py FOLDER [NAME=VALUE ...]`, arguments of the run as JSON.

HF_ENDPOINT is a server of the test, HF_TOKEN its token. It ends as a script does that calls no `end`.
"""

import json
import sys
import time

import torch
from datasets import Dataset
from miniature_esm import make_esm
from transformers import EsmForSequenceClassification, TrainerCallback

from hf_ext.errors import exit_on_errors
from hf_ext.hub import pusher
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments


class Slow(TrainerCallback):
    """Steps that take long enough for a push to begin in the next one."""

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        time.sleep(0.2)


def main(folder: str, *given: str) -> None:
    pusher.GRACE_S = 1.0
    torch.manual_seed(1)
    ids = torch.randint(4, 24, (20, 9)).tolist()
    rows = Dataset.from_dict({"input_ids": ids, "labels": [i % 2 for i in range(20)]})
    settings = {"per_device_train_batch_size": 2, "save_steps": 2, "save_total_limit": 1, "report_to": "none"}
    settings |= {"use_cpu": True, "push_to_hub": True, "hub_model_id": "me/x", "resume": "auto"}
    settings |= {name: json.loads(value) for name, value in (text.split("=", 1) for text in given)}
    trainer = FastTrainer(
        make_esm(EsmForSequenceClassification),
        FastTrainingArguments(output_dir=folder, **settings),
        train_dataset=rows,
        callbacks=[Slow()],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    with exit_on_errors():
        main(*sys.argv[1:])
