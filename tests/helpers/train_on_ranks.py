"""A tiny token classifier with rows and arguments of its own, for processes that a launcher starts."""

from pathlib import Path

import torch
from datasets import Dataset
from miniature_esm import NO_DROPOUT, make_esm
from transformers import EsmForTokenClassification


def make_rows(num: int) -> Dataset:
    """Rows of 3 to 30 tokens; in later rows fewer tokens have a label."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(3, 31, (num,), generator=generator).tolist()
    ids = [torch.randint(4, 24, (size,), generator=generator).tolist() for size in sizes]
    labels = [[i % 3 if t <= i or t == 0 else -100 for t, i in enumerate(row)] for row in ids]
    return Dataset.from_dict({"row": list(range(num)), "input_ids": ids, "labels": labels, "length": sizes})


def make_model() -> EsmForTokenClassification:
    tokens = {"vocab_size": 24, "mask_token_id": 23, "num_labels": 3}
    return make_esm(EsmForTokenClassification, **tokens, **NO_DROPOUT)


def settings(folder: Path, **given) -> dict:
    fixed = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_grad_norm": 0.0, "seed": 3}
    return {"output_dir": str(folder), "remove_unused_columns": False, "save_strategy": "no", **fixed, **given}
