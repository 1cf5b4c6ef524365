"""Places, disk space and stops of a run, around a model of one layer: built by hand, without a Trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from miniature_esm import make_esm
from transformers import EsmForSequenceClassification, TrainerControl, TrainerState

from hf_ext.distributed import Team
from hf_ext.training.backends import Replicated
from hf_ext.training.disk_space import DiskSpace
from hf_ext.training.now import Training
from hf_ext.training.places import Places
from hf_ext.training.stopper import Stopper
from hf_ext.training_args import FastTrainingArguments


class Parts:
    """A run that has taken no step yet; `given` are further arguments."""

    def __init__(self, folder: Path, **given: Any):
        settings = {"use_cpu": True, "report_to": "none", "seed": 3, "save_strategy": "steps", **given}
        self.args = FastTrainingArguments(output_dir=str(folder), **settings)
        self.model = make_esm(EsmForSequenceClassification, intermediate_size=16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.state = TrainerState(epoch=0.0, num_input_tokens_seen=0, save_steps=1, logging_steps=1, eval_steps=1)
        team, backend = Team(self.args), Replicated(self.args, None, None)
        self.places = Places(self.args.output_dir, self.args.local_checkpoint_dir)
        self.space = DiskSpace(self.args, self.places, backend)
        self.stopper = Stopper(self.args, team)

    def now(self) -> Training:
        accelerator: Any = SimpleNamespace(scaler=None, device="cpu", optimizer_step_was_skipped=False)
        handler: Any = SimpleNamespace(callbacks=[])
        parts = self.optimizer, self.schedule, accelerator, self.state, TrainerControl(), handler
        return Training(self.model, self.model, *parts)
