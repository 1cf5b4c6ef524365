"""A short run through the public surface of any version: `any_version_run.py FOLDER KIND (whole|killed|resumed)`.

Writes to FOLDER/MODE.safetensors the weights it ends in, and to FOLDER/MODE.json what it logged. With PYTHONPATH, the
version is that of the tree named there; the last line printed says which it was.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import EsmConfig, EsmForSequenceClassification, TrainerCallback

import hf_ext
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

KILLED_AFTER = 5  # of 9 steps, one after the checkpoint
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2, "eval_subset": 4, "metric_for_best_model": "loss"},
    "stream": {"max_steps": 9},
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "muon": {"speedups": ["muon"], "learning_rate": 1e-2},
}
COMPARED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_full_loss", "step")


class Killed(BaseException):
    """Ends a run without a word to it."""


class Kill(TrainerCallback):
    """Raises after `KILLED_AFTER` optimizer steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == KILLED_AFTER:
            raise Killed


def make_rows(number: int) -> Dataset:
    """Rows of token ids, 6 to 17 long, with a label."""
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(6, 18, (number,), generator=generator).tolist()
    ids = [torch.randint(4, 24, (length,), generator=generator).tolist() for length in lengths]
    columns = {"input_ids": ids, "attention_mask": [[1] * length for length in lengths]}
    return Dataset.from_dict({**columns, "labels": torch.randn(number, generator=generator).tolist()})


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads to the longest."""
    width = max(len(row["input_ids"]) for row in rows)
    padded = {"input_ids": 1, "attention_mask": 0}
    batch = {
        name: torch.tensor([list(row[name]) + [fill] * (width - len(row[name])) for row in rows])
        for name, fill in padded.items()
    }
    return {**batch, "labels": torch.tensor([row["labels"] for row in rows])}


def train(folder: Path, kind: str, mode: str) -> None:
    """Trains three epochs of three steps on 12 rows, with dropout."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = EsmConfig(vocab_size=33, pad_token_id=1, mask_token_id=32, num_labels=1, hidden_dropout_prob=0.1, **sizes)
    settings = {"per_device_train_batch_size": 4, "num_train_epochs": 3, "logging_steps": 1, "save_steps": 4}
    settings |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "seed": 3, "learning_rate": 1e-3}
    given = {**settings, **KINDS[kind], "resume": "auto" if mode == "resumed" else "no"}
    rows = make_rows(12)
    trainer = FastTrainer(
        EsmForSequenceClassification(config),
        FastTrainingArguments(output_dir=str(folder / ("whole" if mode == "whole" else "killed")), **given),
        collate,
        rows.to_iterable_dataset() if kind == "stream" else rows,
        make_rows(8) if "eval_strategy" in given else None,
        callbacks=[Kill()] if mode == "killed" else [],
    )
    try:
        trainer.train()
    except Killed:
        return
    save_file(
        {name: tensor.contiguous() for name, tensor in trainer.model.state_dict().items()},
        folder / f"{mode}.safetensors",
    )
    log = [{name: entry[name] for name in COMPARED if name in entry} for entry in trainer.state.log_history]
    (folder / f"{mode}.json").write_text(json.dumps([entry for entry in log if entry.keys() != {"step"}]))
    trainer.end()


if __name__ == "__main__":
    train(Path(sys.argv[1]), *sys.argv[2:])
    print(Path(hf_ext.__file__).parents[1])
