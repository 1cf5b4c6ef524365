"""Which of Trainer's methods are overridden: in a subclass or on one trainer.

hf_ext computes some things otherwise than Trainer (see `training/losses.py`), and can do so only where the methods
that they go through are its own or Trainer's. Where one is not, the trainer has to be what Trainer is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..models import is_from, is_in

# Trainer's own: a class of these is no override, nor is one whose methods hand on what these return.
OWN_CLASSES = ("hf_ext", "transformers.trainer", "transformers.trainer_seq2seq")
OWN_CODE = ("hf_ext", "transformers")

TRAINING_LOSS = ("compute_loss", "training_step", "get_batch_samples", "_get_num_items_in_batch", "_prepare_inputs")
BATCHES = (
    *("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "get_batch_samples"),
    *("_prepare_inputs", "_prepare_input", "training_step", "compute_loss", "evaluation_loop", "prediction_step"),
)
EVALUATION = ("evaluate", "_evaluate", "evaluation_loop", "prediction_step", "get_eval_dataloader", "log")
EVALUATION_LOSS = ("compute_loss", "prediction_step", "evaluation_loop", "_prepare_inputs")


def find_override(trainer: object, *names: str) -> str | None:
    """Names the first of these methods that is overridden, and by whom, as "Class.method"; None where none is.

    It does not matter where in the order of the classes the override stands, nor whether it calls `super()`: what it
    makes of the result is not known. An assignment to a class of transformers, or to the trainer, is an override too.
    """
    for name in names:
        if name in vars(trainer) and not is_from(vars(trainer)[name], OWN_CODE):
            return f"{name}, assigned to the trainer"
        for base in type(trainer).__mro__:
            if name in vars(base) and not _is_own(base, vars(base)[name]):
                return f"{base.__name__}.{name}"
    return None


def find_own_loss(trainer: object, compute_loss_func: Callable[..., Any] | None) -> str | None:
    """Names where the user's own loss comes from, which need not be what the model returns; None without one."""
    if compute_loss_func is not None and not is_from(compute_loss_func, ("hf_ext",)):
        return "compute_loss_func"
    return find_override(trainer, *TRAINING_LOSS)


@lru_cache(maxsize=1024)
def _is_own(base: type, method: object) -> bool:
    return is_in(base.__module__, OWN_CLASSES) and is_from(method, OWN_CODE)
