"""The parts that save and resume a run, around a model of one layer: built by hand, without a Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from miniature_esm import make_esm
from transformers import EsmForSequenceClassification, TrainerControl, TrainerState

from hf_ext.checkpoints.agreement.run_facts import describe_run
from hf_ext.training.backends import Replicated
from hf_ext.training.carried import Carried
from hf_ext.training.checkpoint_model import CheckpointModel
from hf_ext.training.checkpointer import Checkpointer, Writers
from hf_ext.training.commit import Committer
from hf_ext.training.disk_space import DiskSpace
from hf_ext.training.now import Training
from hf_ext.training.places import Places
from hf_ext.training.progress_file import LossSums
from hf_ext.training.restoring import Restorer
from hf_ext.training.resuming import Resumer
from hf_ext.training.stopper import Stopper
from hf_ext.training.team import Team
from hf_ext.training_args import FastTrainingArguments


class Counter:
    """State of a part: a number."""

    def __init__(self, name: str, value: Any = 0):
        self.name, self.value = name, value

    def state(self) -> Any:
        return self.value

    def load(self, tree: Any) -> None:
        self.value = tree

    def num_bytes(self) -> int:
        return 0


class Parts:
    """A run that has taken no step yet; `given` are further arguments."""

    def __init__(self, folder: Path, **given: Any):
        settings = {"use_cpu": True, "report_to": "none", "seed": 3, "save_strategy": "steps", **given}
        self.args = FastTrainingArguments(output_dir=str(folder), **settings)
        self.model = make_esm(EsmForSequenceClassification, intermediate_size=16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.state = TrainerState(epoch=0.0, num_input_tokens_seen=0, save_steps=1, logging_steps=1, eval_steps=1)
        self.facts = describe_run(self.args, self.model, None, None, 1, None)
        self.tree = Counter("early_stopping", {"rule": None})
        self.positions = [Counter("evaluation_pending", False), Counter("data_position", None)]
        self.begun, self.order = Counter("begun_loaders", ["train"]), Counter("row_order", {"began": None})

        team, backend = Team(self.args), Replicated(self.args, None, None)
        self.places = Places(self.args.output_dir, self.args.local_checkpoint_dir)
        self.space = DiskSpace(self.args, self.places, backend)
        self.stopper = Stopper(self.args, team)
        self.committer = Committer(self.args, team, self.places, self.space, self.stopper)
        carried = Carried([self.tree], self.positions, [self.begun], [self.order])
        self.writer = CheckpointModel(team, backend)
        self.checkpointer = Checkpointer(self.args, team, self.places, self.space, self.committer, backend, carried)
        self.resumer = Resumer(self.args, team, self.places, backend)
        self.restorer = Restorer(self.args, team, self.places, self.space, self.resumer, backend)

    def now(self) -> Training:
        accelerator: Any = SimpleNamespace(scaler=None, device="cpu", optimizer_step_was_skipped=False)
        handler: Any = SimpleNamespace(callbacks=[])
        parts = self.optimizer, self.schedule, accelerator, self.state, TrainerControl(), handler
        return Training(self.model, self.model, *parts)

    def find(self, asked: Any) -> str | None:
        """As `train` does when it begins."""
        folder, resumed = self.resumer.find(asked, self.facts), self.resumer.resumed
        self.committer.begin_run(self.facts, resumed.own_step if resumed else None)
        self.space.begin_run(resumed.best if resumed else None)
        return folder

    def step(self, loss: float = 1.0) -> None:
        """One step of the optimizer, with gradients that the seed decides."""
        for parameter in self.model.parameters():
            parameter.grad = torch.rand_like(parameter)
        self.optimizer.step()
        self.schedule.step()
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / 4
        self.unlogged = torch.tensor(loss)

    def sizes(self) -> Any:
        return self.space.sizes(self.model, self.optimizer, 0)

    def write_model(self, folder: Path) -> None:
        """As Trainer's chain `save_model` -> `_save` does."""

        def save_model(place: str) -> None:
            assert self.writer.takes_model(place)
            assert self.writer.takes(place, self.writer.gather(self.model, is_used=True))
            self.writer.save(self.model, lambda place: None)

        self.writer.write(self.model, folder, save_model, lambda place: None, has_own_loader=False)

    def save(self, is_read_at_once: bool = False) -> None:
        writers = Writers(self.write_model, lambda place: None, self.sizes)
        sums = LossSums(self.unlogged, 2.5, self.state.global_step - 1)
        self.checkpointer.save(self.now(), sums, writers, is_read_at_once)

    def finish(self) -> int | None:
        return self.committer.finish(self.state)

    def saved(self, *steps: int) -> Parts:
        """With a checkpoint of each of these steps, the last ones of the run."""
        self.find("no")
        for step in range(1, max(steps) + 1):
            self.step()
            if step in steps:
                self.save()
                self.finish()
        return self

    def progress(self, step: int) -> dict[str, Any]:
        return json.loads((self.places.store.path(step) / "progress.json").read_text())
