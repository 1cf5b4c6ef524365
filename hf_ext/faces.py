"""What a folder offers to others: the names of its `__init__.py`, each imported when it is first asked for."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def offer(package: str, *more: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Reads what a package imports `if TYPE_CHECKING`, and makes these its names, without importing them yet.

    Type checkers and editors follow the imports; running code pays for a module when it asks for one of its names::

        if TYPE_CHECKING:
            from .store import Store
        else:
            __getattr__, __dir__, __all__ = offer(__name__)

    Args:
        package: its `__name__`.
        more: names that it has itself.

    Returns:
        `__getattr__`, `__dir__` and `__all__` of the package.
    """
    tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
    imports = [
        node
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
    ]
    homes = {alias.name: f".{node.module}" for node in imports for alias in node.names}
    names = sorted([*homes, *more])

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it offers {', '.join(names)}")
        return getattr(import_module(homes[name], package), name)

    return find, lambda: names, names
