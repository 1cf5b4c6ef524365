"""Two processes, under DDP and FSDP2, have the gradients of one."""

from __future__ import annotations

import pytest
from locations import HELPERS
from ranks import run_on_ranks
from safetensors.torch import load_file


@pytest.mark.nightly
def test_two_processes_have_the_gradients_of_one(tmp_path):
    run_on_ranks(HELPERS / "operator_on_ranks.py", tmp_path)
    alone, *several = (load_file(tmp_path / f"{name}.safetensors") for name in ("alone", "ddp", "fsdp2"))
    scale = max(gradient.abs().max() for gradient in alone.values())
    for found in several:
        assert found.keys() == alone.keys()
        assert all((found[name] - alone[name]).abs().max() < 1e-5 * scale for name in alone)
    assert any((found[name] / 2 - alone[name]).abs().max() > 1e-2 * scale for name in alone)  # half of it is seen
