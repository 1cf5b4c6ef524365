"""Columns that a run recorded: what its model reads, what it predicts, and lists of them in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .run_files import RunFiles
from .values import as_dict


def list_columns(run: RunFiles) -> list[str]:
    """Sequence columns that the model reads."""
    towers = as_dict(run.results.get("model")).get("towers") or []
    named = [column for tower in towers for columns in _tower_inputs(tower) for column in columns]
    return list(dict.fromkeys(named)) or list(run.settings.get("sequence_columns") or [])


def label_name(run: RunFiles) -> str:
    """The label column's name."""
    return str(run.settings.get("label_column") or "label")


def join_words(words: Sequence[str]) -> str:
    """heavy, light and antigen."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _tower_inputs(tower: Mapping[str, Any]) -> list[list[str]]:
    """Inputs of a tower: columns that are read together."""
    inputs = tower.get("inputs") or tower.get("columns") or []
    return [[part] if isinstance(part, str) else list(part) for part in inputs]
