"""Tiny runs that fill their disk, and what they leave."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from miniature_esm import make_narrow_esm
from peft import LoraConfig, get_peft_model
from token_rows import make_number_rows, stack_rows
from transformers import EsmForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from hf_ext.checkpoints.run_lock import LOCK
from hf_ext.reporting.run_log import LOGGER, RunLog
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

NUM_STEPS, SAVE_STEPS = 8, 2
KINDS = ("full", "lora", "frozen")
SETTINGS = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False, "seed": 3}
SETTINGS |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 8, "learning_rate": 1e-2}
SETTINGS |= {"logging_steps": 1, "max_steps": NUM_STEPS, "save_steps": SAVE_STEPS}


def make_esm(**shape: Any) -> EsmForSequenceClassification:
    """From config: 0.1 M parameters, 1.3 MB a checkpoint; dropout, so that random states matter."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    return make_narrow_esm(**sizes | shape)


def make_model(kind: str, base: Path) -> Any:
    """`full`, or on the base saved at `base`: `lora`, or `frozen` but for the head."""
    if kind == "full":
        return make_esm()
    model = EsmForSequenceClassification.from_pretrained(base)
    torch.manual_seed(1)
    if kind == "lora":
        return get_peft_model(model, LoraConfig(target_modules=["query", "value"], modules_to_save=["classifier"]))
    model.esm.requires_grad_(False)
    return model


def make_trainer(folder: Path, model: Any = None, trainer: type[Trainer] = FastTrainer, **given: Any) -> Any:
    """A new trainer of 8 steps in `folder` that saves every second; `given` are arguments, or `callbacks`."""
    callbacks = given.pop("callbacks", [])
    arguments = FastTrainingArguments if issubclass(trainer, FastTrainer) else TrainingArguments
    args = arguments(output_dir=str(folder), **{**SETTINGS, **given})
    held_out = make_number_rows(8) if args.eval_strategy != "no" else None
    return trainer(
        model or make_esm(), args, stack_rows, make_number_rows(2 * NUM_STEPS), held_out, callbacks=callbacks
    )


def digest(model: Any) -> str:
    """sha256 over all weights."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    return hashlib.sha256(safetensors.torch.save(tensors)).hexdigest()


def hidden(folder: Path) -> list[str]:
    """Staging, trash and other half-done things that a run left in its folder and its checkpoints."""
    names = [name for _, folders, files in os.walk(folder) for name in [*folders, *files]]  # it may vanish meanwhile
    return [name for name in names if name != LOCK and (name.startswith(".") or name.endswith(".tmp"))]


class Digests(TrainerCallback):
    """Hashes of the weights by optimizer step."""

    def __init__(self) -> None:
        self.by_step: dict[int, str] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.by_step[state.global_step] = digest(kwargs["model"])


@contextmanager
def own_log() -> Iterator[None]:
    """hf_ext's log as in a new process, whatever recipe another test ran; put back afterwards, without run.log."""
    handlers, propagate = [*LOGGER.handlers], LOGGER.propagate
    LOGGER.handlers, LOGGER.propagate = [], True
    try:
        yield
    finally:
        for name in ("hf_ext", "transformers", "accelerate", "datasets", "py.warnings"):
            logger = LOGGER.manager.getLogger(name)
            for handler in [handler for handler in logger.handlers if isinstance(handler, RunLog)]:
                logger.removeHandler(handler)
                handler.close()
        LOGGER.handlers, LOGGER.propagate = handlers, propagate
