"""Whose code a function is; and forwards put on modules in the place of transformers' own, never of a user's.

In the instance, so that classes, names of modules and weights stay; copies of the model take them along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from types import MethodType
from typing import Any

from torch import nn

# Accelerate wraps the forward of a whole model for autocast, torch that of what it compiles.
_LIBRARIES = ("hf_ext", "transformers", "accelerate", "torch")
_NAME = "forward"
_BENEATH = "_original_forward"  # where Accelerate keeps what it wrapped
_HOOK = "_hf_hook"  # Accelerate's, which moves weights in the forward that it puts on a module


@lru_cache(maxsize=1024)  # asked for many times in each step
def is_in(module: str, packages: tuple[str, ...]) -> bool:
    """Returns whether a module, by its name, is one of `packages` or in one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def is_from(function: object, packages: tuple[str, ...]) -> bool:
    """Returns whether a function, bound or not, was written in one of `packages`; a partial is from functools."""
    function = getattr(function, "__func__", function)
    # Where it was written, which `functools.wraps` does not change as it does `__module__`.
    namespace = getattr(function, "__globals__", {})
    return is_in(namespace.get("__name__", type(function).__module__), packages)


def with_wrapped(function: object) -> Iterator[Any]:
    """Yields a function, and those that it wraps, as `functools.wraps` and its like tell; nothing of None."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def has_forward_of(module: nn.Module, family: type[nn.Module]) -> bool:
    """Tells whether `module` computes what a class of transformers, or ours, does: neither a subclass with another
    forward, nor with one that a user put in the class or on the instance."""
    inherited = type(module).forward
    if inherited is not family.forward or not is_from(inherited, _LIBRARIES):
        return False
    return not has_foreign_forward(module)


def has_foreign_forward(module: nn.Module) -> bool:
    """Tells whether a user put a forward on this very module; those of hf_ext and of libraries do not count."""
    own = vars(module).get(_NAME)
    return not all(is_from(function, _LIBRARIES) for function in with_wrapped(own))


def find_replaceable(model: nn.Module, *families: type[nn.Module]) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Finds modules in `model` whose forward is that of a family and may be replaced, with the family."""
    found = []
    for module in model.modules():
        if _HOOK not in vars(module):
            found += [(module, family) for family in families if has_forward_of(module, family)]
    return found


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Has `module` compute `forward(module, ...)`."""
    forward.__name__ = _NAME  # under which pickle, as of `torch.save`, finds the class's own again when it loads
    vars(module)[_NAME] = MethodType(forward, module)


def restore_forward(module: nn.Module) -> None:
    """Takes away what hf_ext put on `module`, with what wraps it; a user's forward stays."""
    for name in (_NAME, _BENEATH):
        if any(is_from(function, ("hf_ext",)) for function in with_wrapped(vars(module).get(name))):
            del vars(module)[name]


def restore_forwards(model: nn.Module, family: type[nn.Module]) -> None:
    """Calls `restore_forward` for all modules of a class in `model`."""
    for module in model.modules():
        if isinstance(module, family):
            restore_forward(module)
