"""`class X(LibraryTrainer, FastTrainer)`: another library's Trainer with ours behind it, as TRL's SFTTrainer is made.

The class here has SFTTrainer's shape and none of its code: arguments of a subclass, losses and logs of its own, a card
written before each checkpoint.
"""

import os
import shutil
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_classifier import ROWS, make_args, make_model
from transformers import Trainer, TrainingArguments

from hf_ext.checkpoints import verify
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments


@dataclass
class LibraryConfig(TrainingArguments):
    """Other defaults than Trainer's, and a field of its own."""

    logging_steps: float = field(default=1)
    size_weight: float = field(default=0.0, metadata={"help": "Part of the loss."})

    def __post_init__(self):
        super().__post_init__()
        if self.size_weight < 0:
            raise ValueError("size_weight must not be negative.")


class LibraryTrainer(Trainer):
    """Knows nothing of hf_ext."""

    def __init__(self, model=None, args=None, train_dataset=None, eval_dataset=None):
        self._metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.cards: list[int] = []
        super().__init__(
            model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, compute_loss_func=None
        )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        entropy = torch.distributions.Categorical(logits=outputs.logits).entropy().mean()
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["entropy"].append(entropy.item())
        loss = loss + self.args.size_weight * outputs.logits.pow(2).mean()
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args, **kwargs):
        with nullcontext():
            return super().training_step(*args, **kwargs)

    def log(self, logs, start_time=None):
        mode = "train" if self.model.training else "eval"
        means = {key: sum(values) / len(values) for key, values in self._metrics[mode].items()}
        logs.update(means if mode == "train" else {f"eval_{key}": value for key, value in means.items()})
        super().log(logs, start_time)
        self._metrics[mode].clear()

    def _save_checkpoint(self, model, trial):
        self.create_model_card(model_name=Path(self.args.output_dir).name)
        super()._save_checkpoint(model, trial)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        self.cards.append(self.state.global_step)
        Path(self.args.output_dir).mkdir(exist_ok=True)
        Path(self.args.output_dir, "README.md").write_text(f"# {model_name}\n")


@dataclass
class FastConfig(LibraryConfig, FastTrainingArguments):
    pass


class FastLibraryTrainer(LibraryTrainer, FastTrainer):
    pass


def train(cls, args_cls, folder, resume=None, **given) -> Any:
    args = make_args(folder, args_cls, **{"eval_strategy": "steps", "eval_steps": 2, "size_weight": 0.5, **given})
    trainer = cls(make_model(), args, train_dataset=ROWS, eval_dataset=ROWS[:4])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def numbers(trainer) -> list[tuple]:
    names = ("step", "loss", "grad_norm", "entropy")
    log = [entry for entry in trainer.state.log_history if "train_loss" not in entry]
    return [tuple(entry.get(name) for name in names) for entry in log]


def differing(one, other) -> list[str]:
    left, right = one.model.state_dict(), other.model.state_dict()
    return [name for name in right if not torch.equal(left[name], right[name])]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    ours = train(FastLibraryTrainer, FastConfig, folder / "ours")
    return ours, train(LibraryTrainer, LibraryConfig, folder / "stock")


def test_a_librarys_trainer_learns_what_it_learns_without_us(pair):
    ours, stock = pair
    assert numbers(ours) == numbers(stock)
    assert len(numbers(stock)) == 6  # four steps, two evaluations
    assert differing(ours, stock) == []
    assert [t.state.log_history[-2]["eval_entropy"] for t in pair] == [stock.state.log_history[-2]["eval_entropy"]] * 2


def test_its_cards_and_checkpoints_are_there(pair):
    ours, stock = pair
    assert ours.cards == stock.cards == [2, 4]
    folder = Path(ours.args.output_dir)
    assert sorted(os.listdir(folder)) == sorted(os.listdir(stock.args.output_dir))
    assert [verify(folder / f"checkpoint-{step}", step)[1] for step in (2, 4)] == [[], []]


def test_it_goes_on_exactly(pair, tmp_path):
    ours, _ = pair
    shutil.copytree(Path(ours.args.output_dir, "checkpoint-2"), tmp_path / "checkpoint-2")
    resumed = train(FastLibraryTrainer, FastConfig, tmp_path, str(tmp_path / "checkpoint-2"))
    assert differing(resumed, ours) == []
    assert numbers(resumed)[-3:] == numbers(ours)[-3:]


def test_its_arguments_are_checked_and_ours_are_taken(tmp_path):
    with pytest.raises(ValueError, match="size_weight must not be negative"):
        FastConfig(str(tmp_path), use_cpu=True, size_weight=-1.0)
    args = FastConfig(str(tmp_path), use_cpu=True, speedups=["all"], use_peft=True)
    assert (args.logging_steps, args.speedups, args.use_peft) == (1, ["all"], True)
