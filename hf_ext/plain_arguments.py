"""Plain `TrainingArguments` in a `FastTrainer`, and `FastTrainingArguments` in a stock one.

Somebody gives plain ones who has changed the trainer's class alone, or whose library has arguments of its own.
"""

from __future__ import annotations

import copy
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
