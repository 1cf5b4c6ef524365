"""Two real processes compare the rows of both, decide the same and stop at the same step."""

import json

import pytest
from locations import HELPERS
from ranks import run_on_ranks
from stop_early_on_ranks import train


@pytest.mark.nightly
def test_two_processes_decide_and_stop_as_one_does(tmp_path):
    alone = train(tmp_path / "alone")
    run_on_ranks(HELPERS / "stop_early_on_ranks.py", tmp_path)
    assert alone.state.global_step == 3
    for rank in range(2):
        report = json.loads((tmp_path / f"report-{rank}.json").read_text())
        assert report["step"] == 3
        assert report["decisions"] == alone.stopping_decisions
