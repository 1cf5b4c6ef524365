"""Runs whose loss has a term that is due in every n-th step, over points of which each step takes a few."""

from pathlib import Path

import torch
from datasets import Dataset
from torch import nn
from transformers import Trainer, default_data_collator

from hf_ext.models.auxiliary import compute_every, subsample
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

EVERY, NUM_POINTS, TAKEN, NUM_STEPS, ROWS_PER_STEP = 3, 12, 4, 10, 8


class Field(nn.Module):
    """Values at places, by a small network; `inverse` is reached by the auxiliary term alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.forward_net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        self.inverse = nn.Linear(1, 1)

    def forward(self, places, labels, with_inverse=False):
        found = self.forward_net(places)
        loss = (found - labels).square().mean()
        return {
            "loss": loss,
            "term": (self.inverse(found) - places).square().mean() if with_inverse else found.new_zeros(()),
        }


def make_rows(num: int = 40) -> Dataset:
    """40 rows: five steps are an epoch."""
    places = torch.rand(num, NUM_POINTS, 1, generator=torch.Generator().manual_seed(0))
    values = torch.sin(7 * places)
    return Dataset.from_dict({"places": places.tolist(), "labels": values.tolist(), "row": [*range(num)]})


class Uses:
    """In front of a Trainer: both tools in its loss. `due` holds the steps in which the term was computed."""

    def is_due_and_points(self, inputs, training):
        due = compute_every(EVERY, lambda: True, step=self.state.global_step, training=training)
        draw = {"seed": self.args.seed, "epoch": int(self.state.epoch), "row_ids": inputs.pop("row")}
        places, labels = subsample((inputs["places"], inputs["labels"]), TAKEN, **draw, training=training)
        return bool(due), places, labels

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        due, places, labels = self.is_due_and_points(inputs, model.training)
        outputs = model(places, labels, with_inverse=due)
        if due and model.training:
            self.due = [*getattr(self, "due", []), self.state.global_step]
        loss = outputs["loss"] + outputs["term"]
        return (loss, outputs) if return_outputs else loss


class Fast(Uses, FastTrainer):
    """Of ours."""


class Stock(Uses, Trainer):
    """Of transformers."""


class CountsBatches(Fast):
    """Broken: a counter of its own, which goes by micro-batches and begins anew in a resumed run."""

    num_batches = -1

    def is_due_and_points(self, inputs, training):
        _, places, labels = super().is_due_and_points(inputs, training)
        self.num_batches += 1
        return self.num_batches % EVERY == 0, places, labels


class DrawsGlobally(Fast):
    """Broken: points from torch's generator, a choice for the whole batch."""

    def is_due_and_points(self, inputs, training):
        due, *_ = super().is_due_and_points({**inputs}, training)
        del inputs["row"]
        chosen = torch.randperm(NUM_POINTS)[:TAKEN].sort().values
        return due, inputs["places"][:, chosen], inputs["labels"][:, chosen]


def make_trainer(
    kind: type, folder: Path, accumulation: int = 1, num_processes: int = 1, model=None, callbacks=(), **given
):
    """10 steps of 8 rows each, in `accumulation` passes."""
    each = ROWS_PER_STEP // accumulation // num_processes
    settings = {"max_steps": NUM_STEPS, "learning_rate": 1e-2, "report_to": "none", "disable_tqdm": True, "seed": 3}
    settings |= {"per_device_train_batch_size": each, "gradient_accumulation_steps": accumulation, "logging_steps": 1}
    settings |= {"save_strategy": "no", "remove_unused_columns": False, "use_cpu": num_processes == 1, **given}
    args = FastTrainingArguments(str(folder), **settings)
    model = Field() if model is None else model
    return kind(model, args, default_data_collator, make_rows(), make_rows(16), callbacks=[*callbacks])


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)
