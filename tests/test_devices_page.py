"""The table of devices is made by decisions, and each of its lines names a test that is there."""

import ast

from locations import ROOT
from tables import DEVICES, ENTRIES, device_rows


def test_each_line_names_a_test_that_is_there_and_cells_are_those_known_by_heart():
    for entry in ENTRIES:
        file, name = entry.test.split("::")
        assert name in [getattr(node, "name", "") for node in ast.parse((ROOT / file).read_text()).body], entry
    cells = {row[0]: dict(zip(DEVICES, row[1:])) for row in device_rows()}
    half = cells["precision of what trains"]
    assert (half["T4"], half["A100"], half["P100"]) == ("fp16", "bf16", "float32")
    assert [cells["attention of ESM"][name] for name in ("H100", "cpu")] == ["varlen", "blocked"]
    assert cells["attention of T5"]["H100"] == "padded"
    assert (cells["TF32"]["T4"], cells["TF32"]["A100"]) == ("-", "yes")
    assert cells["default torch wheel runs"]["V100"] == "no: CUDA 12.6"
