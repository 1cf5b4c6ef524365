"""Plain `TrainingArguments` where `FastTrainingArguments` are needed: the same values, and ours as they are by default.

What somebody gives who has changed the trainer's class alone, or whose library has arguments of its own.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from .errors import ArgumentError
from .processes import check_together
from .training_args import FastTrainingArguments

OUTPUT_DIR = "tmp_trainer"  # as Trainer's, of a run without arguments


def as_fast_arguments(args: Any) -> FastTrainingArguments:
    """`args` themselves, if they are FastTrainingArguments; else arguments of that class with the values of `args`.

    Nothing is computed anew: what `TrainingArguments` made of the values when it was built stays, such as
    `greater_is_better`. Both share their values from here on, so that a later change of `args` counts, as in Trainer.
    A subclass keeps its own fields and methods. None gives the defaults.

    Raises:
        ArgumentError: no training arguments at all; a hub strategy that hf_ext does not have; processes that were
            launched together and would train alone.
    """
    if args is None:
        return FastTrainingArguments(output_dir=OUTPUT_DIR)
    if isinstance(args, FastTrainingArguments):
        return args
    if not isinstance(args, TrainingArguments):
        raise ArgumentError(
            f"args is a {type(args).__name__}: give hf_ext's FastTrainingArguments, or transformers' TrainingArguments."
        )
    check_together(args.world_size)
    plain: Any = type(args)
    fast = object.__new__(_fast_class(plain))
    fast.__dict__ = args.__dict__
    fast.adopt_values()
    return fast


def with_values_of(args: FastTrainingArguments) -> FastTrainingArguments:
    """Another object with the same values, from here on too: what is changed in one, is in both."""
    shared = object.__new__(type(args))
    shared.__dict__ = args.__dict__
    return shared


def stock_arguments(args: Any, explicit: frozenset[str], **changed: Any) -> TrainingArguments:
    """`args` as plain `TrainingArguments`, for the stock Trainer.

    Args:
        args: `FastTrainingArguments`.
        explicit: the fields that the user set; a preset's speed-ups are left out, since a control has none.
        changed: what has another value there.

    Raises:
        ArgumentError: the user set a field that the stock Trainer does not have, or a checkpoint that is not there.
    """
    plain = [spec.name for spec in dataclasses.fields(TrainingArguments) if spec.init]
    harmless = {"preset", "embedding_cache_dir"}
    foreign = explicit - {*harmless, *plain}
    asked = sorted(name for name in foreign if getattr(args, name, None) not in (None, False, [], "no"))
    if asked:
        raise ArgumentError(f"--stock_trainer has none of {', '.join(asked)}: leave them out, or train without it.")
    if args.resume_from_checkpoint and not Path(str(args.resume_from_checkpoint)).is_dir():
        raise ArgumentError(f"resume_from_checkpoint={args.resume_from_checkpoint!r}: no such folder in {Path.cwd()}.")
    values = {name: getattr(args, name) for name in plain}
    # On a machine without a GPU it takes bf16 only together with `use_cpu`.
    return TrainingArguments(**{**values, "use_cpu": args.device.type == "cpu", **changed})


@cache
def _fast_class(plain: Any) -> type[FastTrainingArguments]:
    if plain is TrainingArguments:
        return FastTrainingArguments
    # The `__repr__` of a subclass that is a dataclass again would show tokens, which that of TrainingArguments hides.
    made = {"__reduce__": _reduce, "__repr__": TrainingArguments.__repr__, "_plain": plain}
    both = type(f"Fast{plain.__name__}", (FastTrainingArguments, plain), made)
    return dataclasses.dataclass(init=False, repr=False)(both)


def _reduce(args: Any) -> tuple[Any, ...]:
    """A class that was made here cannot be found by its name; Trainer stores arguments while it pushes."""
    return _rebuild, (args._plain, args.__getstate__())


def _rebuild(plain: Any, state: dict[str, Any]) -> FastTrainingArguments:
    fast = object.__new__(_fast_class(plain))
    fast.__dict__.update(state)
    return fast
