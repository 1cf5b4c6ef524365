"""Whose code a method of a trainer is: ours and Trainer's, or the user's."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import Trainer

_OWN = __name__.partition(".")[0]


def is_overridden(trainer: Any, name: str) -> bool:
    """Whether `trainer.name` is code of the user's, or of another library's subclass, such as trl's SFTTrainer.

    Looks at what a call would run first: an attribute of the object, else of the first class that has one. What is
    behind FastTrainer in the order of classes, as in `class X(FastTrainer, SFTTrainer)`, is not called and not seen.
    """
    places = [vars(trainer), *(vars(cls) for cls in type(trainer).__mro__)]
    found = next((place[name] for place in places if name in place), None)
    return found is not None and _module_of(found).partition(".")[0] != _OWN and _module_of(found) != Trainer.__module__


def _module_of(found: Any) -> str:
    """Where a function was written, whatever binds it."""
    code: Any = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    return str(getattr(inspect.unwrap(code), "__module__", None))
