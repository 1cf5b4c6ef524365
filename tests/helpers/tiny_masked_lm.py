"""A tiny ESM-2 masked language model, rows with labels, and trainers that differ in nothing but the arguments."""

import torch
from closeness import largest
from datasets import Dataset
from miniature_esm import MASK, make_wide_esm
from token_rows import IGNORED, pad_rows

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}


def make_rows(num: int = 24, seed: int = 0) -> Dataset:
    """Rows of 4 to 40 tokens, of which about a quarter is masked and labelled; their lengths as a column."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for size in torch.randint(4, 41, (num,), generator=generator).tolist():
        ids = torch.randint(4, 24, (size,), generator=generator)
        is_masked = torch.rand(size, generator=generator) < 0.25
        is_masked[0] = True
        labels = ids.where(is_masked, torch.tensor(IGNORED))
        rows.append({"input_ids": ids.masked_fill(is_masked, MASK).tolist(), "labels": labels.tolist(), "length": size})
    return Dataset.from_list(rows)


def make_args(folder="o", **given) -> FastTrainingArguments:
    """SGD, because AdamW divides rounding by rounding where a gradient is zero, and twins would drift apart."""
    settings = {"per_device_train_batch_size": 4, "optim": "sgd", "learning_rate": 0.1, "max_steps": 4, "seed": 3}
    return FastTrainingArguments(output_dir=str(folder), **{**QUIET, **settings, **given})


def make_trainer(folder, model=None, rows=None, plan=None, callbacks=None, **given) -> FastTrainer:
    args = make_args(folder, **given)
    model = make_wide_esm() if model is None else model
    return FastTrainer(model, args, pad_rows, make_rows() if rows is None else rows, plan=plan, callbacks=callbacks)


def largest_weight_difference(model: torch.nn.Module, other: torch.nn.Module) -> float:
    """Between two models with the same parameters."""
    theirs = dict(other.named_parameters())
    assert dict(model.named_parameters()).keys() == theirs.keys()
    return largest((weight - theirs[name]).abs().max() for name, weight in model.named_parameters())
