"""What the parts of `hf_ext.training` take, without a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from hf_ext.training.now import Training
from hf_ext.training_args import FastTrainingArguments


def make_args(folder: Path, **given: Any) -> FastTrainingArguments:
    """Arguments of a run on the CPU."""
    return FastTrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **given)


def make_now(*callbacks: TrainerCallback, **of_state: Any) -> Training:
    """The moment of a run of ten steps in two epochs."""
    model = nn.Linear(1, 1)
    state = TrainerState(**{"max_steps": 10, "epoch": 0.5, **of_state})
    handler = CallbackHandler(list(callbacks), model, None, None, None)
    return Training(model, model, None, None, None, state, TrainerControl(), handler)
