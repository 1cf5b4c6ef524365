"""Runs of a tiny model with dropout that are killed, continued, and compared with the run that nobody killed."""

import copy

import torch
from miniature_esm import make_narrow_esm
from run_outcomes import KillAt, Killed
from token_rows import make_number_rows
from train_until_stopped import Case, Collator
from transformers import TrainingArguments

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

SETTINGS = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False, "seed": 3}
SETTINGS |= {"per_device_train_batch_size": 2, "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 1}
SETTINGS |= {"dataloader_num_workers": 1, "save_steps": 2}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}
MODEL = make_narrow_esm()  # with dropout


def train(
    folder,
    trainer=FastTrainer,
    kill_at=None,
    resume=None,
    collator=Collator,
    rows=lambda table: table,
    held_out=False,
    callbacks=(),
    **given,
):
    """A run on 8 rows, 4 steps an epoch; with `collator`, a function of a `Case` that makes one."""
    arguments = FastTrainingArguments if issubclass(trainer, FastTrainer) else TrainingArguments
    args = arguments(output_dir=str(folder), **{**SETTINGS, **given})
    rows = rows(make_number_rows(8, 1)), make_number_rows(4, 2) if held_out or "eval_strategy" in given else None
    callbacks = [*callbacks, *([] if kill_at is None else [KillAt(kill_at)])]
    made = trainer(copy.deepcopy(MODEL), args, collator(Case()), *rows, callbacks=callbacks)
    try:
        made.train(resume_from_checkpoint=resume)
    except Killed:
        assert kill_at is not None
    if isinstance(made, FastTrainer):
        made.end()
    # Of stock Trainer, and of a subclass: torch waits 5 s for workers left to it.
    for loader in [*made.accelerator._dataloaders, *getattr(made, "own_loaders", [])]:
        getattr(loader, "base_dataloader", loader)._iterator = None
    return made


def interrupt(folder, trainer=FastTrainer, step=2, **given):
    """A run killed in the second step after its checkpoint, and continued."""
    train(folder, trainer, kill_at=step + 2, **given)
    return train(folder, trainer, resume=str(folder / f"checkpoint-{step}"), **given)


def same(ours, theirs, names=("loss", "grad_norm", "eval_loss")):
    """Whether two runs logged the same numbers and ended in the same weights, bit for bit."""
    logged = [[e[n] for e in trainer.state.log_history for n in names if n in e] for trainer in (ours, theirs)]
    weights = zip(ours.model.state_dict().values(), theirs.model.state_dict().values(), strict=True)
    return logged[0] == logged[1] and all(torch.equal(a, b) for a, b in weights)
