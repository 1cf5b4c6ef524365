"""Tiny runs to which something goes wrong: a full ESM regression, and LoRA on a saved base."""

import copy
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from miniature_esm import make_narrow_esm
from peft import LoraConfig, get_peft_model
from run_outcomes import Killed
from token_rows import make_number_rows, stack_rows
from transformers import EsmForSequenceClassification, TrainerCallback, TrainingArguments

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

NUM_ROWS = 12
NUM_STEPS = 6  # of 2 rows: one epoch
SETTINGS = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False, "seed": 3}
SETTINGS |= {"per_device_train_batch_size": 2, "num_train_epochs": 1, "learning_rate": 1e-2}
SETTINGS |= {"logging_steps": 1, "save_steps": 2, "max_grad_norm": 1.0}


class Watch(TrainerCallback):
    """Notes where a run begins and its weights from there on; raises `Killed` after optimizer step `kill_at`."""

    def __init__(self, kill_at: int | None = None):
        self.kill_at = kill_at
        self.began_at: int | None = None
        self.weights: dict[int, dict[str, bytes]] = {}  # after each step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began_at = state.global_step
        self.weights = {state.global_step: bits(kwargs["model"])}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights[state.global_step] = bits(kwargs["model"])
        if state.global_step == self.kill_at:
            raise Killed


def make_rows(num: int = NUM_ROWS, **labels: float) -> Dataset:
    """Rows with labels between 0.4 and 2.3; `row3=nan` replaces one."""
    return make_number_rows(num, **labels)


def make_lora(base: Path) -> Any:
    """Adapters and a new head on an ESM saved in `base`."""
    make_narrow_esm().save_pretrained(base)
    torch.manual_seed(0)
    model = EsmForSequenceClassification.from_pretrained(base)
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))


class Maker:
    """Builds trainers on copies of one model, so that runs that are to be compared begin alike."""

    def __init__(self, template: Any, collator: Any = None):
        self.template, self.collator = template, collator or stack_rows
        self.watch = Watch()

    def __call__(
        self, folder: Path | str, kill_at: int | None = None, trainer: type = FastTrainer, **given: Any
    ) -> Any:
        """A trainer with a fresh `watch`; `model`, `rows`, `callbacks`, and arguments may be given."""
        self.watch = Watch(kill_at)
        model = given.pop("model", None) or copy.deepcopy(self.template)
        rows, callbacks = given.pop("rows", None) or make_rows(), given.pop("callbacks", [])
        parts = {name: given.pop(name) for name in ("optimizers", "eval_dataset", "compute_metrics") if name in given}
        cls = FastTrainingArguments if issubclass(trainer, FastTrainer) else TrainingArguments
        args = cls(output_dir=str(folder), **{**SETTINGS, **given})
        return trainer(model, args, self.collator, rows, callbacks=[*callbacks, self.watch], **parts)

    def killed(self, folder: Path | str, at: int, **given: Any) -> Any:
        """The trainer of a run that was interrupted after step `at`."""
        trainer = self(folder, kill_at=at, **given)
        with pytest.raises(Killed):
            trainer.train()
        return trainer


class KilledRun:
    """A run of `template` that was killed after step 5 (checkpoints of steps 2 and 4), and the one that was not."""

    def __init__(self, folder: Path, template: Any):
        self.folder, self.make, self.num_copies = folder, Maker(template), 0
        self.make(folder / "whole").train()
        self.whole = self.make.watch.weights
        self.make.killed(folder / "killed", at=5)

    def copy(self, folder: Path | None = None) -> Path:
        """Its output folder again, where others may harm it and go on."""
        self.num_copies += 1
        return Path(shutil.copytree(self.folder / "killed", folder or self.folder / f"copy-{self.num_copies}"))


def bits(model: Any) -> dict[str, bytes]:
    """Every entry of the state dict as bytes, which compare where there are NaNs."""
    return {name: tensor.detach().contiguous().numpy().tobytes() for name, tensor in model.state_dict().items()}


def contents(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder: bytes of files, targets of links, "" for folders."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
    return found


def names(folder: Path) -> list[str]:
    """What is in a folder, without the reports beside checkpoints."""
    return sorted({path.name for path in folder.iterdir()} - {"plan.json", "throughput.json"})


@contextmanager
def messages() -> Iterator[list[str]]:
    """What hf_ext logs, as it comes."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler()
    logging.getLogger("hf_ext").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("hf_ext").removeHandler(handler)


def flip(byte_at: Callable[[int], int]) -> Callable[[bytes], bytes]:
    """Turns over one bit of the byte at the place that `byte_at` gives for a length."""

    def change(content: bytes) -> bytes:
        place = byte_at(len(content))
        return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]

    return change


def zero_block(content: bytes) -> bytes:
    """Zeroes an eighth of the file, behind its middle."""
    start = len(content) // 2
    size = max(1, len(content) // 8)
    return content[:start] + bytes(size) + content[start + size :]
