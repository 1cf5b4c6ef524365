"""The cards of speed-ups, the docstrings of their modules or classes, as Markdown for docs/speedups.md."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from hf_ext import speedups
from hf_ext.reporting.tables import format_markdown_table

CLASSES = {"I": "identical", "N": "numerics", "L": "learning"}
_LABEL = re.compile(
    r"(?:^|(?<=[.)])[ \n]|\n)(Class [INL](?: in expectation)?(?:\.|(?=[:,]))"
    r"|(?:Effect and cost|Effect|Hardware|Models|Families|Evidence|Cost|Conflicts|Source)(?=:| \())"
)
_BULLETS = re.compile(r"(?<=\n)(?<!\n\n)(- .*(?:\n(?:- |  ).*)*)\n?")


def index() -> str:
    """One line per speed-up, in the order in which they are applied."""
    rows = [
        [f"[`{card.NAME}`](#{card.NAME})", CLASSES[card.KIND], read_card(card)[0]]  # type: ignore[attr-defined]
        for card in speedups.REGISTRY
    ]
    return format_markdown_table(rows, ["speed-up", "class", "what it does"])


def cards() -> str:
    """Each card under a heading of its name, in the order of application."""
    return "\n\n".join(format_card(card.NAME, card) for card in speedups.REGISTRY)  # type: ignore[arg-type]


def shared_cards() -> str:
    """Those of modules that several speed-ups measure by, or that are part of one; by name."""
    modules = [import_module(f"{speedups.__name__}.{found.name}") for found in iter_modules(speedups.__path__)]
    holders = {speedup.__module__ for speedup in speedups.REGISTRY if not isinstance(speedup, ModuleType)}
    others = [
        module
        for module in modules
        if module not in speedups.REGISTRY and module.__name__ not in holders and read_card(module)[1]
    ]
    return "\n\n".join(format_card(module.__name__.rpartition(".")[2], module) for module in others)


def read_card(module: Any) -> tuple[str, str]:
    """First line and the rest of a module's docstring; "" where there is no more."""
    first, _, body = (inspect.getdoc(module) or "").partition("\n\n")
    return first, body.strip()


def format_card(name: str, module: Any) -> str:
    """A card with its heading; its labels (Class, Effect, Cost, ...) begin a paragraph each, in bold."""
    first, body = read_card(module)
    body = _BULLETS.sub(r"\n\1\n\n", body)
    body = _LABEL.sub(r"\n\n**\1**", body)
    body = re.sub(r"\n{3,}", "\n\n", body).strip()
    place = module.__name__ if isinstance(module, ModuleType) else module.__module__
    file = f"`{place.replace('.', '/')}.py`"
    return f"### {name}\n\n{first} ({file})\n\n{body}"
