"""What training scripts of one's own do: a loop, and `torch.save` of a dictionary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_runs import make_rows, small_esm
from token_rows import stack_rows

NUM_STEPS = 5


def write_config(folder: Path) -> Path:
    """A folder that says what the small ESM is, without weights."""
    small_esm(seed=9).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    (folder / "vocab.txt").write_text("A\nC\n")
    return folder


def train_by_hand(model: Any, num_steps: int = NUM_STEPS, **settings: Any) -> torch.optim.Optimizer:
    """A loop such as the old scripts have; returns the optimizer."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, **settings)
    rows = [stack_rows([row]) for row in make_rows(num_steps)]
    for batch in rows:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return optimizer


def save_old(path: Path, model: Any, optimizer: Any = None, **more: Any) -> Path:
    """The old scripts' file."""
    parts = {} if optimizer is None else {"optimizer_state_dict": optimizer.state_dict()}
    torch.save({"epoch": 3, "model_state_dict": model.state_dict(), **parts, **more}, path)
    return path
