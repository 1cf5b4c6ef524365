"""Plain `TrainingArguments` in a `FastTrainer`, and `FastTrainingArguments` in a stock one.

Somebody gives plain ones who has changed the trainer's class alone, or whose library has arguments of its own.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from .errors import ArgumentError
from .training_args import OWN_FIELDS, FastTrainingArguments, changed_fields, check_plain, default_of

OUTPUT_DIR = "tmp_trainer"  # as Trainer's, of a run without arguments


def complete_arguments(args: Any) -> Any:
    """`args` themselves, where they lack one of our arguments with its default.

    Nothing is computed anew, and what is changed in them later counts, as in Trainer: they stay the user's object, of
    the user's class. None gives the defaults of all.

    Raises:
        ArgumentError: no training arguments at all; else as `FastTrainingArguments`.
    """
    if args is None:
        return FastTrainingArguments(output_dir=OUTPUT_DIR)
    if not isinstance(args, TrainingArguments):
        raise ArgumentError(
            f"args is a {type(args).__name__}: give hf_ext's FastTrainingArguments, or transformers' TrainingArguments."
        )
    if not isinstance(args, FastTrainingArguments):
        plain: Any = args
        plain.explicit_fields = changed_fields(plain)
        for name, spec in OWN_FIELDS.items():
            if not hasattr(plain, name):
                setattr(plain, name, copy.copy(default_of(spec)))
        check_plain(plain)
    return args


class CurrentArguments:
    """The arguments that a trainer has now. Its parts hold this, since others may be assigned to `trainer.args`."""

    def __init__(self, trainer: Any):
        vars(self)["_trainer"] = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_trainer"].args, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._trainer.args, name, value)


def stock_arguments(args: Any, explicit: frozenset[str], **changed: Any) -> TrainingArguments:
    """`args` as plain `TrainingArguments`, for the stock Trainer.

    Args:
        args: `FastTrainingArguments`.
        explicit: the fields that the user set; a preset's speed-ups are left out, since a control has none.
        changed: what has another value there.

    Raises:
        ArgumentError: the user set a field that the stock Trainer does not have, or a checkpoint that is not there.
    """
    foreign = explicit & OWN_FIELDS.keys() - {"preset", "embedding_cache_dir"}
    asked = sorted(name for name in foreign if getattr(args, name) not in (None, False, [], "no"))
    if asked:
        raise ArgumentError(f"--stock_trainer has none of {', '.join(asked)}: leave them out, or train without it.")
    if args.resume_from_checkpoint and not Path(str(args.resume_from_checkpoint)).is_dir():
        raise ArgumentError(f"resume_from_checkpoint={args.resume_from_checkpoint!r}: no such folder in {Path.cwd()}.")
    values = {spec.name: getattr(args, spec.name) for spec in dataclasses.fields(TrainingArguments) if spec.init}
    # On a machine without a GPU it takes bf16 only together with `use_cpu`.
    return TrainingArguments(**{**values, "use_cpu": args.device.type == "cpu", **changed})
