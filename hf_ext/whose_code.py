"""Which package code is from: hf_ext, a library, or the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    """Whether a module, by its name, is one of `packages` or in one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def is_from(function: Any, packages: tuple[str, ...]) -> bool:
    """Whether a function, bound or not, was written in one of `packages`; a partial is from functools."""
    function = getattr(function, "__func__", function)
    # Where it was written, which `functools.wraps` does not change as it does `__module__`.
    return is_in(getattr(function, "__globals__", {}).get("__name__", type(function).__module__), packages)


def with_wrapped(function: Any) -> Iterator[Any]:
    """A function, and those that it wraps, as `functools.wraps` and its like tell; nothing of None."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)
