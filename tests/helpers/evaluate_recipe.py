"""recipes/evaluate.py, imported under another name than that of the library `evaluate`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "recipes"

_spec = importlib.util.spec_from_file_location("recipe_evaluate", RECIPES / "evaluate.py")
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["recipe_evaluate"] = _module  # where its dataclasses look their types up
_spec.loader.exec_module(_module)

main, EvaluateArguments = _module.main, _module.EvaluateArguments
