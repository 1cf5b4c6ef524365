"""The table of devices is made by decisions, and each of its lines names a test that is there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tables import DEVICES, ENTRIES, device_rows

ROOT = Path(__file__).resolve().parent.parent


def cell(what: str, device: str) -> str:
    (row,) = [row for row in device_rows() if row[0] == what]
    return row[1 + DEVICES.index(device)]


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.what for entry in ENTRIES])
def test_the_test_that_a_line_names_is_there(entry) -> None:
    file, name = entry.test.split("::")
    functions = [node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in functions


@pytest.mark.nightly
def test_cells_known_by_heart() -> None:
    assert cell("precision of what trains", "T4") == "fp16"
    assert cell("precision of what trains", "A100") == "bf16"
    assert cell("precision of what trains", "P100") == "float32"
    assert cell("attention of ESM", "H100") == "varlen"
    assert cell("attention of T5", "H100") == "padded"
    assert cell("attention of ESM", "cpu") == "blocked"
    assert (cell("TF32", "T4"), cell("TF32", "A100")) == ("-", "yes")
    assert cell("default torch wheel runs", "V100") == "no: CUDA 12.6"
