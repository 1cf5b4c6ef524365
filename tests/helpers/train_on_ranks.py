"""Runs whose rows and weights two processes report: `leave_on_ranks.py` calls `write_report`.

Writes to FOLDER, per rank: the gradient of one step on 16 rows, with hf_ext and without, and in `report-RANK.json` the
rows of each batch of a run of two epochs, of one resumed in the middle of the second, and of one that resumes without
its sampler being told the epoch.
"""

import gc
import json
import os
from pathlib import Path

import torch
from datasets import Dataset
from miniature_esm import NO_DROPOUT, make_esm
from safetensors.torch import save_file
from token_rows import RecordingCollator
from transformers import EsmForTokenClassification, Trainer, TrainerCallback, TrainingArguments

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

RANK = int(os.environ.get("RANK", "0"))
NUM_ROWS = 50
BUDGET = 60


def make_rows(num: int) -> Dataset:
    """Rows of 3 to 30 tokens; in later rows fewer tokens have a label."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(3, 31, (num,), generator=generator).tolist()
    ids = [torch.randint(4, 24, (size,), generator=generator).tolist() for size in sizes]
    labels = [[i % 3 if t <= i or t == 0 else -100 for t, i in enumerate(row)] for row in ids]
    return Dataset.from_dict({"row": list(range(num)), "input_ids": ids, "labels": labels, "length": sizes})


class FirstGradient(TrainerCallback):
    """Keeps the gradients of the first optimizer step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            named = model.named_parameters()
            self.gradients = {n.removeprefix("module."): p.grad.clone() for n, p in named if p.grad is not None}


def make_model() -> EsmForTokenClassification:
    tokens = {"vocab_size": 24, "mask_token_id": 23, "num_labels": 3}
    return make_esm(EsmForTokenClassification, **tokens, **NO_DROPOUT)


def settings(folder: Path, **given) -> dict:
    fixed = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_grad_norm": 0.0, "seed": 3}
    return {"output_dir": str(folder), "remove_unused_columns": False, "save_strategy": "no", **fixed, **given}


def first_gradient(folder: Path, batch: int, steps: int, *, stock: bool = False) -> dict[str, torch.Tensor]:
    """Gradient of one optimizer step on 16 rows, in `steps` passes of `batch` rows per process."""
    callback = FirstGradient()
    trainer_cls, args_cls = (Trainer, TrainingArguments) if stock else (FastTrainer, FastTrainingArguments)
    given = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps, "max_steps": 1}
    args = args_cls(**settings(folder, **given))
    trainer = trainer_cls(make_model(), args, RecordingCollator(), make_rows(16), callbacks=[callback])
    trainer.train()
    return callback.gradients


def train_two_epochs(folder: Path, resume: str | None = None, tell_epoch: bool = True, **given) -> FastTrainer:
    fixed = {"max_tokens_per_batch": BUDGET, "num_train_epochs": 2, "learning_rate": 1e-2}
    given = {**fixed, "lr_scheduler_type": "constant", **given}
    args = FastTrainingArguments(**settings(folder, **given))
    trainer = FastTrainer(make_model(), args, RecordingCollator(), make_rows(NUM_ROWS))
    if not tell_epoch:
        trainer._ext_parts.loaders.on_epoch_begin = lambda *given, **more: None
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def write_report(folder: Path) -> None:
    gc.freeze()  # Trainer collects garbage before each run: half a second over all that transformers has imported
    save_file(first_gradient(folder / "g", 2, 4), folder / f"exact-{RANK}.safetensors")
    save_file(first_gradient(folder / "s", 2, 4, stock=True), folder / f"stock-{RANK}.safetensors")
    whole = train_two_epochs(folder / "whole")
    per_epoch = whole.state.max_steps // 2
    step = per_epoch + 2
    train_two_epochs(folder / "saved", max_steps=step, save_strategy="steps", save_steps=step)
    checkpoint = str(folder / "saved" / f"checkpoint-{step}")
    resumed = train_two_epochs(folder / "resumed", checkpoint, allow_changed=["max_steps"])
    lost = train_two_epochs(folder / "lost", checkpoint, tell_epoch=False, allow_changed=["max_steps"])
    same = all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters()))
    report = {
        "per_epoch": per_epoch,
        "step": step,
        "whole": whole.data_collator.batches,
        "resumed": resumed.data_collator.batches,
        "lost": lost.data_collator.batches,
        "same_weights": same,
    }
    (folder / f"report-{RANK}.json").write_text(json.dumps(report))
